"""The Responses API with the real model and all real processes."""

from openai import OpenAI

from tests.e2e.stack import Stack

STORY = "Tell me in two sentences why the sky is blue. " + "Use plain words that a child knows, please. " * 12


def test_a_chain_is_answered_from_the_cache(smollm: Stack) -> None:
    client = OpenAI(base_url=f"{smollm.url}/v1", api_key="none", max_retries=0, timeout=120)
    first = client.responses.create(model=smollm.model(), input=STORY, max_output_tokens=32, temperature=0)
    assert first.status == "incomplete"
    with client.responses.stream(
        model=smollm.model(),
        input="And at night?",
        previous_response_id=first.id,
        max_output_tokens=16,
        temperature=0,
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    whole = client.responses.create(
        model=smollm.model(),
        input=[
            {"role": "user", "content": STORY},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And at night?"},
        ],
        max_output_tokens=16,
        temperature=0,
    )
    assert whole.output_text == text
    assert first.usage is not None
    assert whole.usage is not None
    assert whole.usage.input_tokens > first.usage.input_tokens > 100
    assert whole.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 64 * 64
