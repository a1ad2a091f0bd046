"""How much of a text must wait, since with what follows it may become a tag."""

from collections.abc import Iterable


def unfinished_tag(text: str, start: int, tags: Iterable[str]) -> int:
    """Where, not before `start`, the text ends in what may become one of `tags`; its length where it does not. Each
    tag begins with its only `<`."""
    place = text.rfind("<", start)
    if place < 0:
        return len(text)
    tail = text[place:]
    for tag in tags:
        if len(tail) < len(tag) and tag.startswith(tail):
            return place
    return len(text)
