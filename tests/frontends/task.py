"""The task that every client gets: read a file, then write one whose content is only known from the first."""

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTES, ANSWER = "notes.txt", "answer.txt"

AWKWARD = 'print("\u00e4\\n")  # </parameter> </function> & <tool_call>\n\n\tend'
"""Goes behind the word: what a client could get wrong if the gateway did."""

_ASKED = "Read the file "
_TOLD = "The code word is "
_LET_READ = "Let an agent read the file "
_REPORTED = "It says: the code word is "


@dataclass(frozen=True, slots=True)
class Task:
    folder: Path
    """Empty but for NOTES; the client works here."""
    word: str
    """In NOTES, new for every run: nobody can write it who has not read it."""

    @staticmethod
    def lay_out(folder: Path) -> "Task":
        folder.mkdir(parents=True)
        task = Task(folder, f"heron-{secrets.token_hex(4)}")
        task.notes.write_text(f"{_TOLD}{task.word}. Write it to the file {ANSWER} in this folder.\n")
        return task

    @property
    def notes(self) -> Path:
        return self.folder / NOTES

    def said(self, line: Mapping[str, Any]) -> str:
        """What the scripted engine says by that line of `script`, when this task is done with it."""
        told = f"{self.prompt}\n{self.notes.read_text()}"
        return "".join(
            piece if isinstance(piece, str) else re.findall(piece["quote"], told)[-1] for piece in line["pieces"]
        )

    @property
    def prompt(self) -> str:
        """For a model that understands it, or follows `script`."""
        return f"{_ASKED}{self.notes} and do what it says."

    @property
    def delegated(self) -> str:
        """As `prompt`, for a client that is to start a sub-agent."""
        return f"{_LET_READ}{self.notes} and do what it says."

    def spelled_out(self, read: "Call") -> str:
        """For the small model, which understands hardly more than this."""
        ((name, _),) = read.arguments
        return f"Call {read.tool} with {name} = {self.notes}."

    def problems(self) -> list[str]:
        """What is wrong with the file on disk; a last newline does not count."""
        path = self.folder / ANSWER
        if not path.exists():
            return [f"{ANSWER} was not written"]
        text, wanted = path.read_text().removesuffix("\n"), f"{self.word}\n{AWKWARD}"
        return [] if text == wanted else [f"{ANSWER} holds {text!r} instead of {wanted!r}"]

    def unread(self, bodies: Iterable[bytes]) -> list[str]:
        """What is wrong where the file was only to be read: its word must be in one of the requests."""
        return [] if any(self.word.encode() in body for body in bodies) else [f"{NOTES} was not read"]


@dataclass(frozen=True, slots=True)
class Quote:
    """A piece of a scripted answer that the engine takes from its prompt."""

    pattern: str
    """Its first group."""


NOTES_PATH = Quote(rf"{_ASKED}(\S+)")
ANSWER_PATH = (Quote(rf"{_ASKED}(\S+/){re.escape(NOTES)}"), ANSWER)
TEXT = (Quote(rf"[Tt]{_TOLD[1:]}(\S+?)\."), f"\n{AWKWARD}")

SUB_PROMPT = (_ASKED, Quote(rf"{_LET_READ}(\S+)"), " and report.")
"""What a sub-agent is asked."""

Value = str | Quote | tuple[str | Quote, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of the client's own tools."""

    tool: str
    arguments: tuple[tuple[str, Value], ...]

    def pieces(self) -> Iterable[str | Quote]:
        """In the form of the Qwen3.5 family, cut as its tokens might be."""
        yield from ("<tool_call>", "\n<function=", self.tool, ">\n")
        for name, value in self.arguments:
            yield from ("<parameter=", name, ">\n")
            yield from value if isinstance(value, tuple) else (value,)
            yield from ("\n</parameter>", "\n")
        yield from ("</function>\n", "</tool_call>")


def script(read: Call, write: Call, titles: str = "", delegate: Call | None = None) -> list[dict[str, Any]]:
    """The lines of a scripted engine that does the task with these tools. `titles`: what only those prompts hold by
    which the client wants a title for the conversation. `delegate`: starts a sub-agent, which reads the file."""
    lines = [_line("", "A code word", given=titles)] if titles else []
    reading = ("<think>", "\nFirst ", "the file.\n", "</think>", "\n\nI look", " at it.", "\n\n", *read.pieces())
    writing = ("<think>", "\nNow ", "I write it.\n", "</think>", "\n\n", *write.pieces())
    done = ("The word is ", TEXT[0], ".")
    if delegate is None:
        return [*lines, _line(_ASKED, *reading), _line(_TOLD, *writing), _line("", *done)]
    return [
        *lines,
        _line(_LET_READ, "I ask ", "an agent.", "\n\n", *delegate.pieces()),
        _line(_ASKED, *reading),
        _line(_TOLD, _REPORTED, TEXT[0], "."),
        _line(_REPORTED, *writing),
        _line("", *done, given=_REPORTED),
        _line("", "I wait", " for it."),  # of a sub-agent in the background
    ]


def _line(when: str, *pieces: str | Quote, given: str = "") -> dict[str, Any]:
    said = [{"quote": piece.pattern} if isinstance(piece, Quote) else piece for piece in pieces]
    return {"when": when, "given": given, "pieces": said, "delay_ms": 2, "finish": "stop"}
