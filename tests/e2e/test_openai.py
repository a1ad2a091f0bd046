"""What a user of the OpenAI SDK sees, with the real model and all real processes."""

import httpx
import openai
import pytest
from openai import OpenAI

from tests.e2e.stack import Stack

STORY = "Tell me in two sentences why the sky is blue. " + "Use plain words that a child knows, please. " * 12


@pytest.fixture
def client(smollm: Stack) -> OpenAI:
    return OpenAI(base_url=f"{smollm.url}/v1", api_key="none", max_retries=0, timeout=120)


def stream(client: OpenAI, model: str, **fields: object) -> tuple[str, object]:
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": STORY}],
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    )
    text, usage, finish = "", None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert finish == "length"
    return text, usage


def test_a_streamed_chat_repeats_from_the_cache(client: OpenAI, smollm: Stack) -> None:
    first, cold = stream(client, smollm.model())
    again, warm = stream(client, smollm.model())
    assert "sky" in first.lower() or "light" in first.lower()
    assert again == first
    assert cold.prompt_tokens == warm.prompt_tokens > 100
    assert cold.completion_tokens == warm.completion_tokens == 32
    assert warm.prompt_tokens_details.cached_tokens >= warm.prompt_tokens // 64 * 64
    assert cold.prompt_tokens_details.cached_tokens < warm.prompt_tokens_details.cached_tokens


def test_stream_and_answer_are_the_same_text(client: OpenAI, smollm: Stack) -> None:
    streamed, _ = stream(client, smollm.model())
    whole = client.chat.completions.create(
        model=smollm.model(), messages=[{"role": "user", "content": STORY}], max_tokens=32, temperature=0
    )
    assert whole.choices[0].message.content == streamed
    assert whole.choices[0].finish_reason == "length"


def test_a_seed_repeats_a_sampled_answer(client: OpenAI, smollm: Stack) -> None:
    def sample(seed: int) -> str:
        reply = client.chat.completions.create(
            model=smollm.model(),
            messages=[{"role": "user", "content": "Name three animals."}],
            max_tokens=16,
            temperature=1.2,
            seed=seed,
        )
        return reply.choices[0].message.content

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(8, 12)}) > 1


def test_errors_are_typed(client: OpenAI, smollm: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=smollm.model(), messages=[], max_tokens=4)
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-nine", messages=[{"role": "user", "content": "hi"}])
    assert smollm.model() in missing.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=smollm.model(), messages=[{"role": "user", "content": "word " * 9000}])
    assert long.value.code == "context_length_exceeded"


def test_models_health_and_sessions(smollm: Stack) -> None:
    card, *aliases = httpx.get(f"{smollm.url}/v1/models").json()["data"]
    assert all(alias["id"].startswith("claude-") for alias in aliases)
    assert card["max_model_len"] == card["context_length"] == 8192
    assert httpx.get(f"{smollm.url}/health/live").status_code == 200
    smollm.chat("Say hi.", max_tokens=2, user="ann")
    found = httpx.get(f"{smollm.url}/api/sessions/ann")
    assert found.status_code == 200, found.text
