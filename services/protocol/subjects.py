"""Every NATS subject. Ids are made of letters, digits and `-` (`valid_id`), so they are always one token."""

import re

HEARTBEATS = "samovar.events.heartbeat"
GATEWAY_HEARTBEATS = "samovar.events.gateway"
BLOCK_EVENTS = "samovar.events.blocks"
SESSION_NOTES = "samovar.events.sessions"
"""Publish (gateway -> all engines): SessionNote."""

_ID = re.compile(r"[A-Za-z0-9-]{1,64}")


def valid_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None


def generate(engine_id: str) -> str:
    """Request: GenerateRequest; reply: GenerateReply."""
    return f"samovar.engine.{engine_id}.generate"


def cancel(engine_id: str) -> str:
    """Publish: Cancel."""
    return f"samovar.engine.{engine_id}.cancel"


def resume(engine_id: str) -> str:
    """Request: Resume; reply: ResumeReply."""
    return f"samovar.engine.{engine_id}.resume"


def tokenizer(engine_id: str) -> str:
    """Request: a chunk's index in decimal; reply: TokenizerChunk."""
    return f"samovar.engine.{engine_id}.tokenizer"


def blocks(engine_id: str) -> str:
    """Request: empty; reply: BlockSnapshot."""
    return f"samovar.engine.{engine_id}.blocks"


def cache(engine_id: str) -> str:
    """Request: empty; reply: CacheTree."""
    return f"samovar.engine.{engine_id}.cache"


def tokens(gateway_id: str) -> str:
    """Publish (engine -> gateway): TokenBatch."""
    return f"samovar.gateway.{gateway_id}.tokens"
