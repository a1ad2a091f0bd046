"""The many spellings of `think` and `do not think`, and the sampling defaults that depend on it."""

import json

import pytest

from services.gateway.errors import ApiError
from services.gateway.openai.request import ChatRequest, parse
from services.gateway.prompt.presets import PRESETS, sampling_defaults
from services.gateway.sampling import sampling_params
from services.gateway.thinking import template_variables
from services.protocol.generate import SamplingParams

OFF = [
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"thinking": {"type": "disabled"}},
    {"thinking": False},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "None"},
    {"chat_template_kwargs": {"reasoning_effort": "none"}},
]
ON = [
    {"enable_thinking": True},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "adaptive"}},
    {"reasoning": {"effort": "low", "summary": "auto"}},
    *({"reasoning_effort": effort} for effort in ("minimal", "low", "medium", "high", "xhigh", "max", "extreme")),
]


def chat(**fields: object) -> ChatRequest:
    return parse(json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode())


@pytest.mark.parametrize("fields", OFF)
def test_off(fields: dict) -> None:
    assert template_variables(chat(**fields)) == {"enable_thinking": False}


@pytest.mark.parametrize("fields", ON)
def test_on(fields: dict) -> None:
    assert template_variables(chat(**fields))["enable_thinking"] is True


def test_all_at_once() -> None:
    def merged(all_fields: list[dict]) -> dict:
        return {name: value for fields in all_fields for name, value in fields.items()}

    assert template_variables(chat(**merged(OFF))) == {"enable_thinking": False}
    assert template_variables(chat(**merged(ON)))["enable_thinking"] is True


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"chat_template_kwargs": {}},
        {"thinking": {"type": "odd"}},
        {"reasoning": {}},
        {"enable_thinking": None},
        {"reasoning_effort": ""},
    ],
)
def test_nothing_said(fields: dict) -> None:
    assert template_variables(chat(**fields)) == {}


def test_what_contradicts_itself_follows_the_documented_order() -> None:
    order = [
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"enable_thinking": False},
        {"thinking": {"type": "enabled"}},
        {"reasoning": {"effort": "none"}},
        {"reasoning_effort": "high"},
    ]
    for place in range(len(order)):
        fields = {name: value for one in order[place:] for name, value in one.items()}
        assert template_variables(chat(**fields))["enable_thinking"] is (place % 2 == 0)


@pytest.mark.parametrize(
    ("effort", "nearest"),
    [("minimal", "low"), ("low", "low"), ("medium", "medium"), ("high", "high"), ("xhigh", "high"), ("odd", "medium")],
)
def test_a_template_gets_the_nearest_effort(effort: str, nearest: str) -> None:
    for fields in ({"reasoning_effort": effort}, {"chat_template_kwargs": {"reasoning_effort": effort}}):
        assert template_variables(chat(**fields)) == {"enable_thinking": True, "reasoning_effort": nearest}
    assert template_variables(chat(enable_thinking=False, reasoning_effort=effort)) == {"enable_thinking": False}


def test_other_variables_go_to_the_template() -> None:
    given = {"preserve_thinking": True, "nothing": None, "enable_thinking": True}
    assert template_variables(chat(chat_template_kwargs=given)) == {"preserve_thinking": True, "enable_thinking": True}


@pytest.mark.parametrize(
    "given",
    [
        {"messages": []},
        {"tools": []},
        {"add_generation_prompt": False},
        {"bos_token": "x"},
        {"raise_exception": 1},
        {"enable_thinking": "false"},
        {"enable_thinking": 0},
        {"reasoning_effort": 3},
    ],
)
def test_what_a_client_cannot_set(given: dict) -> None:
    with pytest.raises(ApiError) as caught:
        template_variables(chat(chat_template_kwargs=given))
    assert (caught.value.status, caught.value.param) == (400, f"chat_template_kwargs.{next(iter(given))}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"thinking": "no"}, "thinking"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
    ],
)
def test_a_wrong_type_is_named(fields: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def params(thinking: bool | None, generation: dict[str, float], **fields: object) -> SamplingParams:
    return sampling_params(
        chat(**fields).sampling,
        defaults=sampling_defaults(generation, thinking),
        stop_token_ids=(),
        vocab_size=10,
        room=10,
        default_max_tokens=0,
    )


QWEN = {"temperature": 1.0, "top_p": 0.95, "top_k": 20.0}


def test_presets_of_the_family() -> None:
    for thinking in (True, None):
        given = params(thinking, QWEN)
        assert (given.temperature, given.top_p, given.top_k, given.presence_penalty) == (1.0, 0.95, 20, 0.0)
    plain = params(False, QWEN)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.presence_penalty) == (0.7, 0.8, 20, 1.5)
    own = params(False, QWEN, temperature=0.3, presence_penalty=0)
    assert (own.temperature, own.top_p, own.presence_penalty) == (0.3, 0.8, 0.0)


def test_a_greedy_request_gets_no_penalty_that_it_did_not_ask_for() -> None:
    assert params(False, QWEN, temperature=0).presence_penalty == 0.0
    assert params(False, QWEN, temperature=0, presence_penalty=1).presence_penalty == 1.0


@pytest.mark.parametrize("generation", [{}, {"temperature": 0.0}, {**QWEN, "temperature": 0.8}])
def test_another_models_defaults_are_left_alone(generation: dict[str, float]) -> None:
    assert sampling_defaults(generation, False) == generation


def test_each_family_is_known_by_its_own_values() -> None:
    assert len({tuple(sorted(preset.thinking.items())) for preset in PRESETS}) == len(PRESETS)


def test_forbidden_tokens_win_over_the_clients_bias() -> None:
    wishes = chat(logit_bias={"3": 5, "4": 1}).sampling
    given = sampling_params(
        wishes, defaults={}, stop_token_ids=(), vocab_size=10, room=9, default_max_tokens=0, forbidden=[3]
    )
    assert given.logit_bias == {3: -100.0, 4: 1.0}


@pytest.mark.parametrize("thinks", [False, True])
def test_the_switch_of_other_families(thinks: bool) -> None:
    """DeepSeek's templates, and with them cache-pressure's needle-test, call it `thinking`; a template that does so
    still gets it."""
    variables = template_variables(chat(chat_template_kwargs={"thinking": thinks}))
    assert variables == {"enable_thinking": thinks, "thinking": thinks}
