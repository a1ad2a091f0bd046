"""Codex: the Responses API; names its threads in headers. It reads files with a shell, and writes them by a patch whose
text is a `custom` tool's raw input."""

import json

from tests.frontends.client import Client, Launch, Setting
from tests.frontends.task import ANSWER, AWKWARD, NOTES_PATH, TEXT, Call

_CONFIG = """\
model = "{model}"
model_provider = "samovar"
model_catalog_json = "{catalog}"
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.samovar]
name = "Samovar"
base_url = "{url}/v1"
wire_api = "responses"

[analytics]
enabled = false
"""

_PATCH = (
    "*** Begin Patch\n*** Add File: ",
    ANSWER,
    "\n+",
    TEXT[0],
    "\n+",
    AWKWARD.replace("\n", "\n+"),
    "\n*** End Patch",
)


def _set_up(at: Setting, prompt: str) -> Launch:
    folder = at.home / ".codex"
    folder.mkdir()
    catalog = folder / "models.json"
    catalog.write_text(json.dumps({"models": [_model(at)]}))
    (folder / "config.toml").write_text(_CONFIG.format(model=at.model, catalog=catalog, url=at.url))
    # The scratch folder is all that it is asked to touch, and its own sandbox does not start in every container.
    return Launch(["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt], {})


def _model(at: Setting) -> dict[str, object]:
    """An entry of its catalogue with all fields that it must have; without an entry it does not offer `apply_patch`."""
    return {
        "slug": at.model,
        "display_name": at.model,
        "description": "Served by Samovar",
        "base_instructions": "You are a coding agent in the Codex CLI.",
        "context_window": at.context,
        "truncation_policy": {"mode": "tokens", "limit": 10000},
        "input_modalities": ["text"],
        "shell_type": "shell_command",
        "apply_patch_tool_type": "freeform",
        "supports_parallel_tool_calls": True,
        "support_verbosity": False,
        "supported_reasoning_levels": [],
        "experimental_supported_tools": [],
        "supported_in_api": True,
        "visibility": "list",
        "priority": 1,
    }


CODEX = Client(
    name="codex",
    package="@openai/codex",
    version="0.171.0",
    program="codex",
    path="/v1/responses",
    ending=b"event: response.completed\n",
    session="header",
    read=Call("exec_command", (("cmd", ("cat ", NOTES_PATH)),)),
    write=Call("apply_patch", (("input", _PATCH),)),
    set_up=_set_up,
)
