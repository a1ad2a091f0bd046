"""The marks by which agents say which conversation a request belongs to, in headers and in the body.

The first one that is there counts (`SessionStore.resolve` has the order of all): the body's `session_id`, Claude Code's
header, Codex's, OpenCode's (`x-session-id` is also anyone's own), `prompt_cache_key`, `metadata.user_id`, `user`. A
sub-agent is a session of its own, whose parent is the agent that started it.
"""

from collections.abc import Mapping

from services.gateway.sessions.records import SessionHint


def session_hint(
    headers: Mapping[str, str],
    *,
    session_id: str | None = None,
    prompt_cache_key: str | None = None,
    metadata_user: str | None = None,
    user: str | None = None,
) -> SessionHint:
    """`headers` are looked up by lower-case names. `metadata_user`: the session within Anthropic's
    `metadata.user_id`."""
    header, parent, agent = _of_headers(headers)
    return SessionHint(
        session_id=session_id or "",
        header=header,
        parent=parent,
        agent=agent,
        prompt_cache_key=prompt_cache_key or "",
        metadata_user=metadata_user or "",
        user=user or "",
    )


def _of_headers(headers: Mapping[str, str]) -> tuple[str, str, bool]:
    """Session and parent, and whether they are an agent's own marks."""
    if claude := headers.get("x-claude-code-session-id", ""):
        agent = headers.get("x-claude-code-agent-id", "")
        if not agent:
            return claude, "", True
        above = headers.get("x-claude-code-parent-agent-id", "")
        return f"{claude}/{agent}", f"{claude}/{above}" if above else claude, True
    # Codex: threads are what its cache keys name; a session may have several.
    if codex := headers.get("thread-id", "") or headers.get("session-id", ""):
        return codex, headers.get("x-codex-parent-thread-id", ""), True
    affinity = headers.get("x-session-affinity", "")
    named = headers.get("x-session-id", "") or affinity
    return named, headers.get("x-parent-session-id", "") if named else "", bool(affinity)
