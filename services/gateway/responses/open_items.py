"""Output items while they are written: each tells, as events, how it begins, grows and ends."""

from collections.abc import Iterator
from typing import Any

from services.gateway.responses.custom_input import CustomInput
from services.gateway.responses.output_items import (
    CustomToolCallItem,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
)

Event = tuple[str, dict[str, Any]]
"""The type without its `response.` in front, and the fields but for the sequence number."""


class OpenText:
    """A message (`thoughts` false) or thoughts; either has one part."""

    def __init__(self, id: str, index: int, thoughts: bool) -> None:
        """`index`: the item's place in the output."""
        self.thoughts = thoughts
        self._id = id
        self._place = {"item_id": id, "output_index": index, "content_index": 0}
        self._texts: list[str] = []
        # Nobody asked for log probabilities, and the SDKs want the field all the same.
        self._extra: dict[str, Any] = {} if thoughts else {"logprobs": ()}
        self._name = "reasoning_text" if thoughts else "output_text"

    def begin(self) -> Iterator[Event]:
        yield "content_part.added", {**self._place, "part": self._part()}

    def add(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        yield f"{self._name}.delta", {**self._place, "delta": text, **self._extra}

    def end(self) -> Iterator[Event]:
        yield f"{self._name}.done", {**self._place, "text": "".join(self._texts), **self._extra}
        yield "content_part.done", {**self._place, "part": self._part()}

    def item(self, status: Status) -> OutputItem:
        begun = bool(self._texts)
        if self.thoughts:
            content = (ReasoningText("".join(self._texts)),) if begun else ()
            return ReasoningItem(id=self._id, content=content, status=status)
        return MessageItem(id=self._id, content=(OutputText("".join(self._texts)),) if begun else (), status=status)

    def _part(self) -> ReasoningText | OutputText:
        text = "".join(self._texts)
        return ReasoningText(text) if self.thoughts else OutputText(text)


class OpenCall:
    """A function's call."""

    def __init__(self, id: str, index: int, call_id: str, name: str) -> None:
        self._id = id
        self._call_id = call_id
        self._name = name
        self._place = {"item_id": id, "output_index": index}
        self._arguments: list[str] = []

    def begin(self) -> Iterator[Event]:
        return iter(())

    def add(self, text: str) -> Iterator[Event]:
        """Some of the arguments."""
        if text:
            self._arguments.append(text)
            yield "function_call_arguments.delta", {**self._place, "delta": text}

    def end(self) -> Iterator[Event]:
        arguments = "".join(self._arguments)
        yield "function_call_arguments.done", {**self._place, "name": self._name, "arguments": arguments}

    def item(self, status: Status) -> OutputItem:
        arguments = "".join(self._arguments)
        return FunctionCallItem(id=self._id, call_id=self._call_id, name=self._name, arguments=arguments, status=status)


class OpenCustomCall:
    """A custom tool's call, whose input is text."""

    def __init__(self, id: str, index: int, call_id: str, name: str) -> None:
        self._id = id
        self._call_id = call_id
        self._name = name
        self._place = {"item_id": id, "output_index": index}
        self._input = CustomInput()

    def begin(self) -> Iterator[Event]:
        return iter(())

    def add(self, text: str) -> Iterator[Event]:
        """Some of the arguments that the model's call has."""
        yield from self._deltas(self._input.feed(text))

    def end(self) -> Iterator[Event]:
        yield from self._deltas(self._input.finish())
        yield "custom_tool_call_input.done", {**self._place, "input": self._input.text}

    def item(self, status: Status) -> OutputItem:
        return CustomToolCallItem(
            id=self._id, call_id=self._call_id, name=self._name, input=self._input.text, status=status
        )

    def _deltas(self, text: str) -> Iterator[Event]:
        if text:
            yield "custom_tool_call_input.delta", {**self._place, "delta": text}


OpenItem = OpenText | OpenCall | OpenCustomCall
