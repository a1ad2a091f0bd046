"""The session within `metadata.user_id`, which Claude Code fills in two ways."""

import msgspec
from msgspec import Struct

_MARK = "_session_"


class _UserId(Struct, frozen=True):
    session_id: str = ""


def session_of(user_id: str) -> str:
    """`{"session_id": ...}` as JSON, or `..._session_ID`; any other id stands for itself."""
    if user_id.startswith("{"):
        try:
            return msgspec.json.decode(user_id, type=_UserId).session_id or user_id
        except msgspec.DecodeError:
            return user_id
    return user_id.rpartition(_MARK)[2]
