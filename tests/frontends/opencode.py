"""OpenCode: chat completions by `@ai-sdk/openai-compatible`; names its session in headers."""

import json

from tests.frontends.client import Client, Launch, Setting
from tests.frontends.task import ANSWER_PATH, NOTES_PATH, SUB_PROMPT, TEXT, Call


def _set_up(at: Setting, prompt: str) -> Launch:
    model = {"name": at.model, "tool_call": True, "limit": {"context": at.context, "output": at.output}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Samovar",
        "options": {"baseURL": f"{at.url}/v1", "apiKey": "none"},
        "models": {at.model: model},
    }
    config = at.home / ".config" / "opencode" / "opencode.json"
    config.parent.mkdir(parents=True)
    config.write_text(
        json.dumps(
            {
                "$schema": "https://opencode.ai/config.json",
                "provider": {"samovar": provider},
                "model": f"samovar/{at.model}",
                "share": "disabled",
                "autoupdate": False,
            }
        )
    )
    return Launch(["run", prompt], {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"})


OPENCODE = Client(
    name="opencode",
    package="opencode-ai",
    version="1.18.33",
    program="opencode",
    path="/v1/chat/completions",
    ending=b"data: [DONE]\n\n",
    session="header",
    read=Call("read", (("filePath", NOTES_PATH),)),
    write=Call("write", (("filePath", ANSWER_PATH), ("content", TEXT))),
    delegate=Call("task", (("description", "Read"), ("prompt", SUB_PROMPT), ("subagent_type", "general"))),
    titles="You are a title generator",
    set_up=_set_up,
)
