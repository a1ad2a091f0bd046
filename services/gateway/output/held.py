"""How much of a text must wait, since with what follows it may become a tag."""

from collections.abc import Iterable


def held_back(text: str, tags: Iterable[str]) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of one of `tags`."""
    longest = 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:length]):
                longest = length
                break
    return longest
