"""Conversations of a shape that many templates refuse, put into one that they know.

Templates of the family take one system message, at the front. Agents send later ones all the time, as reminders. Moved
to the front they would change the whole prompt and cost its cache; so they stay in place, as a turn of the user's.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def with_reminders(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The system messages at the front become one, each later one a user message that is marked as a reminder.
    Contents must be strings."""
    front = _front(messages)
    head: list[Mapping[str, Any]] = list(messages[:front])
    if front > 1:
        head = [{**messages[0], "content": "\n\n".join(message["content"] for message in messages[:front])}]
    return head + [_reminder(message) if message["role"] == "system" else message for message in messages[front:]]


def with_question(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """With an empty message of the user's behind the system messages at the front."""
    front = _front(messages)
    return [*messages[:front], {"role": "user", "content": ""}, *messages[front:]]


def _front(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many system messages stand at the front."""
    others = (place for place, message in enumerate(messages) if message["role"] != "system")
    return next(others, len(messages))


def _reminder(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": f"<system-reminder>\n{message['content']}\n</system-reminder>"}
