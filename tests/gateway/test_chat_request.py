"""The body of a chat: what is taken, what is refused and how the refusal names its field."""

import json

import pytest

from services.gateway.errors import ApiError
from services.gateway.openai.messages import for_template
from services.gateway.openai.request import ChatRequest, parse
from services.gateway.sampling import sampling_params
from services.gateway.stops import MAX_STOPS
from services.protocol.generate import SamplingParams

USER = {"role": "user", "content": "Hi"}


def chat(**fields: object) -> ChatRequest:
    return parse(json.dumps({"messages": [USER], **fields}).encode())


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        for_template(parse(body).messages)
    assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")
    return caught.value


def params(request: ChatRequest, room: int = 100, default_max_tokens: int = 0, **defaults: float) -> SamplingParams:
    return sampling_params(
        request.sampling,
        defaults=defaults,
        stop_token_ids=(7,),
        vocab_size=1000,
        room=room,
        default_max_tokens=default_max_tokens,
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "odd", "text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"model": 3}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"user": 5}, "user"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(fields: dict, param: str) -> None:
    error = refused(json.dumps({"messages": [USER], **fields}).encode())
    assert error.param == param
    assert param.split("[")[0].split(".")[0] in error.message


def test_messages_are_required() -> None:
    assert refused(b"{}").param == "messages"


@pytest.mark.parametrize(
    "body", [b"", b"hello", b'{"messages":', b"\xff\xfe", b'{"messages": [{"role": "user", "content": "\xff"}]}']
)
def test_what_is_no_json_is_a_400(body: bytes) -> None:
    error = refused(body)
    assert error.code == "invalid_json"
    assert "JSON" in error.message


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (rb"cut \ud83d", "cut \ufffd"),
        (rb"\uDE0A cut", "\ufffd cut"),
        (rb"\ud83d\ud83d\ude0a\ude0a", "\ufffd😊\ufffd"),
        (rb"\\ud83d \ud83d", "\\ud83d \ufffd"),
        (rb"\ud83d\n\u00e9", "\ufffd\n\u00e9"),
    ],
)
def test_half_a_character_does_not_end_a_conversation(escaped: bytes, text: str) -> None:
    request = parse(b'{"messages": [{"role": "user", "content": "%b"}]}' % escaped)
    assert request.messages[0].content == text


@pytest.mark.parametrize("body", [b"[]", b"3", b"null", b"[" * 100_000, b'{"tool_choice": ' + b"[" * 100_000])
def test_json_of_another_shape_or_depth_is_a_400(body: bytes) -> None:
    refused(body)


def test_an_image_is_refused_clearly() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]}
    error = refused(json.dumps(body).encode())
    assert error.param == "messages[0].content[1]"
    assert "image_url" in error.message
    assert "text only" in error.message


def test_unknown_fields_and_nulls_are_ignored() -> None:
    fields = dict.fromkeys(
        [
            "model",
            "stream",
            "stop",
            "temperature",
            "top_p",
            "max_tokens",
            "tools",
            "tool_choice",
            "response_format",
            "n",
        ]
    )
    request = chat(**fields, store=False, metadata={"x": 1})
    assert request == chat()
    message = {**USER, "odd": "hm", "cache_control": {"type": "ephemeral"}}
    assert parse(json.dumps({"messages": [message]}).encode()) == chat()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tools": [{"type": "function", "function": {"name": "f"}}, {"type": "web_search"}]},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"n": 1},
        {"logprobs": False, "top_logprobs": 0},
        {"modalities": ["text"]},
        {"temperature": 3, "top_k": -1, "min_p": 0, "top_p": 1},
        {"stop": ["x"] * MAX_STOPS},
        {"stop": []},
    ],
)
def test_what_does_not_change_the_meaning_is_taken(fields: dict) -> None:
    chat(**fields)


def test_messages_for_the_template() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "system", "content": "Late."},
        {"role": "assistant"},
        {"role": "user", "content": "", "name": "Ann"},
    ]
    assert for_template(chat(messages=messages).messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "system", "content": "Late."},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "", "name": "Ann"},
    ]


def test_every_sampling_field_reaches_the_engine() -> None:
    request = chat(
        max_tokens=5,
        temperature=0,
        top_k=4,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"3": -100},
        seed=42,
    )
    assert params(request) == SamplingParams(
        max_tokens=5,
        temperature=0.0,
        top_k=4,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias={3: -100.0},
        seed=42,
        stop_token_ids=(7,),
    )


def test_the_models_defaults_stand_behind_the_clients_fields() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20.0, "min_p": 0.05, "repetition_penalty": 1.05}
    given = params(chat(), **defaults)
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.6, 0.95, 20, 0.05)
    assert given.repetition_penalty == 1.05
    own = params(chat(temperature=0, top_k=-1, top_p=1), **defaults)
    assert (own.temperature, own.top_p, own.top_k) == (0.0, 1.0, 0)
    bare = params(chat())
    assert (bare.temperature, bare.top_p, bare.top_k) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("fields", "default_max_tokens", "expected"),
    [
        ({}, 0, 96),
        ({}, 50, 50),
        ({}, 500, 96),
        ({"max_tokens": 512}, 0, 96),
        ({"max_tokens": 8}, 50, 8),
        ({"max_completion_tokens": 9, "max_tokens": 8}, 0, 9),
    ],
)
def test_the_limit_is_clamped_never_refused(fields: dict, default_max_tokens: int, expected: int) -> None:
    assert params(chat(**fields), room=96, default_max_tokens=default_max_tokens).max_tokens == expected


def test_seeds() -> None:
    assert params(chat(seed=-1)).seed == 2**63 - 1
    drawn = {params(chat()).seed for _ in range(4)}
    assert len(drawn) == 4
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_a_bias_for_a_token_that_is_not_there() -> None:
    with pytest.raises(ApiError, match="no token 1000") as caught:
        params(chat(logit_bias={"1000": 1}))
    assert caught.value.param == "logit_bias"
