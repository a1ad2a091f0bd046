"""What a response's output consists of, as clients read it and send it back."""

from typing import Literal

from msgspec import Struct

Status = Literal["in_progress", "completed", "incomplete"]


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    text: str


class OutputText(Struct, frozen=True, tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ReasoningItem(Struct, frozen=True, kw_only=True, tag="reasoning"):
    """Thoughts. They are given whole: there is no summary of them, and nothing is encrypted."""

    id: str
    summary: tuple[()] = ()
    content: tuple[ReasoningText, ...] = ()
    encrypted_content: None = None
    status: Status


class MessageItem(Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: tuple[OutputText, ...] = ()


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    """A JSON object; the beginning of one where the status is `incomplete`."""
    status: Status


class CustomToolCallItem(Struct, frozen=True, kw_only=True, tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: Status


OutputItem = ReasoningItem | MessageItem | FunctionCallItem | CustomToolCallItem
