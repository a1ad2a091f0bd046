"""Claude Code: the Messages API; names its sessions in a header."""

from tests.frontends.client import Client, Launch, Setting
from tests.frontends.task import ANSWER_PATH, NOTES_PATH, SUB_PROMPT, TEXT, Call


def _set_up(at: Setting, prompt: str) -> Launch:
    return Launch(
        ["-p", "--permission-mode", "acceptEdits", prompt],
        {
            "ANTHROPIC_BASE_URL": at.url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": f"claude-{at.model}",
            "ANTHROPIC_SMALL_FAST_MODEL": f"claude-{at.model}",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(at.context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(at.output),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    )


CLAUDE_CODE = Client(
    name="claude-code",
    package="@anthropic-ai/claude-code",
    version="2.1.332",
    program="claude",
    path="/v1/messages",
    ending=b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    session="header",
    read=Call("Read", (("file_path", NOTES_PATH),)),
    write=Call("Write", (("file_path", ANSWER_PATH), ("content", TEXT))),
    delegate=Call("Agent", (("description", "Read"), ("prompt", SUB_PROMPT), ("subagent_type", "general-purpose"))),
    set_up=_set_up,
)
