"""Lines of clients that are not for the model."""

from typing import Any

import pytest

from services.gateway.prompt.client_headers import without_headers
from tests.gateway.http_gateway import gateway
from tests.gateway.responses_rig import TINY
from tests.gateway.tiny import decode, encode, tiny_engines

HEADER = "x-anthropic-billing-header: cc_version=2.1.332.862; cc_entrypoint=sdk-cli;"
USER = {"role": "user", "content": "Go."}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (f"{HEADER} cch=a1b2c;", ""),
        (f"{HEADER} cch=a1b2c", ""),
        (f"{HEADER} cch=a1b2c;\n\nYou are an agent.", "You are an agent."),
        (f"{HEADER} cch=a1b2c\nYou are.\n\nBe brief.", "You are.\n\nBe brief."),
        (f"{HEADER} cch=a1b2c;You are an agent: a=b;", "You are an agent: a=b;"),
        (f"\n{HEADER}\nYou are.", "You are."),
        ("x-anthropic-billing-header:\nYou are.", "You are."),
    ],
)
def test_the_line_goes_and_all_else_stays(given: str, left: str) -> None:
    assert without_headers([system(given), USER]) == ([system(left), USER] if left else [USER])
    assert without_headers([system("First."), system(given)]) == [system("First."), *([system(left)] if left else [])]


@pytest.mark.parametrize("text", ["You are.", f"See {HEADER}", f"You are.\n{HEADER}"])
def test_other_messages_stay_as_they_are(text: str) -> None:
    messages = [system(text), USER, system(HEADER), {"role": "user", "content": HEADER}]
    assert without_headers(messages) == messages


async def asked(g: Any, mark: str) -> None:
    text = f"{HEADER} cch={mark};\nYou are an agent."
    await g.chat(model=TINY, messages=[system(text), USER])
    await g.http.post("/v1/messages", json={"max_tokens": 9, "system": text, "messages": [USER]})
    await g.http.post("/v1/responses", json={"instructions": text, "input": "Go."})


@pytest.mark.parametrize("strip", [True, False])
async def test_every_family_and_the_setting(strip: bool) -> None:
    engines = tiny_engines()
    engines.on_call = lambda call: call._deliver(tuple(encode("</think>Fine.<|im_end|>")), "stop")
    async with gateway(engines, strip_client_headers=strip) as g:
        await asked(g, "aaaaa")
        await asked(g, "bbbbb")
        texts = [decode(call.prompt) for call in engines.calls]
        assert [text.startswith("<|im_start|>system\nYou are an agent.<|im_end|>") for text in texts] == [strip] * 6
        assert (texts[:3] == texts[3:]) == strip
