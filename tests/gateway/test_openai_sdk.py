"""The openai SDK against the gateway's HTTP side."""

import openai
import pytest

from services.gateway.engine_errors import EngineRejected
from tests.gateway.fake_engines import MODEL, FakeEngines
from tests.gateway.http_gateway import Gateway, gateway


def client(g: Gateway, key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{g.url}/v1", api_key=key, max_retries=0, timeout=10)


async def test_a_stream_with_usage_and_a_whole_answer() -> None:
    async with gateway(FakeEngines().says("Hello, world", cached_device=9)) as g, client(g) as sdk:
        chunks = []
        async for chunk in await sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        ):
            chunks.append(chunk)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "Hello, world"
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 9
        whole = await sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
        assert whole.choices[0].message.content == text
        assert [model.id for model in (await sdk.models.list()).data] == [MODEL, f"claude-{MODEL}"]
        assert (await sdk.models.retrieve(MODEL)).id == MODEL


async def test_errors_have_their_types() -> None:
    async with gateway(FakeEngines().says("x"), api_keys=("key",)) as g:
        hi = [{"role": "user", "content": "Hi"}]
        async with client(g, "wrong") as sdk:
            with pytest.raises(openai.AuthenticationError):
                await sdk.models.list()
        async with client(g, "key") as sdk:
            with pytest.raises(openai.BadRequestError) as bad:
                await sdk.chat.completions.create(model=MODEL, messages=hi, temperature=-1, stream=True)
            assert bad.value.param == "temperature"
            with pytest.raises(openai.NotFoundError) as missing:
                await sdk.chat.completions.create(model="nope", messages=hi)
            assert missing.value.code == "model_not_found"
            g.engines.refusal = EngineRejected("overloaded", "The queue is full.", 1.0)
            with pytest.raises(openai.InternalServerError) as full:
                await sdk.chat.completions.create(model=MODEL, messages=hi)
            assert (full.value.status_code, full.value.code) == (503, "server_is_overloaded")


async def test_an_error_in_a_stream_is_raised() -> None:
    engines = FakeEngines()

    def fail(call) -> None:
        call.say("Half")
        call.finish("error", "The device is gone.")

    engines.on_call = fail
    async with gateway(engines) as g, client(g) as sdk:
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="The device is gone"):
            async for _ in stream:
                pass
