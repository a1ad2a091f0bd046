"""Sessions: which conversation a request belongs to, and what each cost. Never on the token path."""

from services.gateway.sessions.bounded import RowBounds
from services.gateway.sessions.lineage import opening_digest
from services.gateway.sessions.records import RequestRecord, SessionHint
from services.gateway.sessions.responses import ResponseBounds
from services.gateway.sessions.routes import session_routes
from services.gateway.sessions.store import SessionStore

__all__ = [
    "RequestRecord",
    "ResponseBounds",
    "RowBounds",
    "SessionHint",
    "SessionStore",
    "opening_digest",
    "session_routes",
]
