"""Whether a call that comes back says what the model's did."""

import json
from collections.abc import Mapping
from typing import Any

from services.gateway.sessions.records import CallRecord


def unchanged(function: Mapping[str, Any], record: CallRecord) -> bool:
    """Whether a call of the history says what was read out of `record.raw`."""
    if function["name"] != record.name:
        return False
    try:
        return same_json(function["arguments"], json.loads(record.arguments))
    except (ValueError, RecursionError):  # as deep as JSON can be written, and too deep to be read
        return False


def same_json(one: Any, other: Any) -> bool:
    """Whether two values are the same in JSON: 1 is 1.0 and not true, the order of an object's keys says nothing."""
    pairs = [(one, other)]
    while pairs:
        a, b = pairs.pop()
        if isinstance(a, dict) and isinstance(b, dict):
            if a.keys() != b.keys():
                return False
            pairs += ((a[key], b[key]) for key in a)
        elif isinstance(a, list) and isinstance(b, list):
            if len(a) != len(b):
                return False
            pairs += zip(a, b, strict=True)
        elif isinstance(a, bool) is not isinstance(b, bool) or a != b:
            return False
    return True
