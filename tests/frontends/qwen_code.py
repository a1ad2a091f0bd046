"""Qwen Code: chat completions by the OpenAI SDK for Node; sends no mark of its session."""

import json

from tests.frontends.client import Client, Launch, Setting
from tests.frontends.task import ANSWER_PATH, NOTES_PATH, SUB_PROMPT, TEXT, Call


def _set_up(at: Setting, prompt: str) -> Launch:
    settings = at.home / ".qwen" / "settings.json"
    settings.parent.mkdir()
    generation = {"contextWindowSize": at.context, "samplingParams": {"temperature": 0, "max_tokens": at.output}}
    settings.write_text(
        json.dumps(
            {
                "security": {"auth": {"selectedType": "openai"}},
                "model": {"name": at.model, "generationConfig": generation},
                "privacy": {"usageStatisticsEnabled": False},
                "telemetry": {"enabled": False},
                "general": {"enableAutoUpdate": False},
            }
        )
    )
    environ = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{at.url}/v1", "OPENAI_MODEL": at.model}
    return Launch(["--auth-type", "openai", "--approval-mode", "yolo", "-p", prompt], environ)


QWEN_CODE = Client(
    name="qwen-code",
    package="@qwen-code/qwen-code",
    version="0.15.10",
    program="qwen",
    path="/v1/chat/completions",
    ending=b"data: [DONE]\n\n",
    session="lineage",
    read=Call("read_file", (("file_path", NOTES_PATH),)),
    write=Call("write_file", (("file_path", ANSWER_PATH), ("content", TEXT))),
    delegate=Call("agent", (("description", "Read"), ("prompt", SUB_PROMPT), ("subagent_type", "general-purpose"))),
    set_up=_set_up,
)
