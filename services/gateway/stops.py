"""Checks the strings that end an answer."""

from collections.abc import Sequence

from services.gateway.errors import invalid

MAX_STOPS = 16
MAX_STOP_CHARS = 1024


def checked_stops(stops: Sequence[str], field: str) -> tuple[str, ...]:
    """`field`: their name in the request. Raises ApiError."""
    if len(stops) > MAX_STOPS:
        raise invalid(f"{field}: {len(stops)} strings, at most {MAX_STOPS} are taken.", field)
    for stop in stops:
        if not stop:
            raise invalid(f"{field}: An empty string would end every answer at once.", field)
        if len(stop) > MAX_STOP_CHARS:
            raise invalid(f"{field}: A string of {len(stop)} characters, at most {MAX_STOP_CHARS} are taken.", field)
    return tuple(stops)
