import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.prompts import calls_of, check_calls, tools_of, turns
from tools.train.evaluation.probes import PROBES
from tools.train.evaluation.tool_score import is_well_formed
from tools.train.tasks.source import Source
from tools.train.tasks.tools.coding_files import FILE_SKILLS
from tools.train.tasks.tools.coding_work import WORK_SKILLS
from tools.train.tasks.tools.composed import ACTIONS, ROLE_PHRASES
from tools.train.tasks.tools.episode import tool_case, tools_dialog
from tools.train.tasks.tools.everyday import EVERYDAY
from tools.train.tasks.tools.held_out import TRAINING, UNSEEN, Holdout, is_held_name, split
from tools.train.tasks.tools.kit import FAMILIES, Family, draw_ask, draw_kit
from tools.train.tasks.tools.phrasing import PLACEHOLDER, PREFIXES
from tools.train.tasks.tools.role import Role, Skill
from tools.train.tasks.tools.schema import Call, Parameter, Tool, render_calls
from tools.train.tasks.wording import EMPTY_THOUGHT, OPEN_THOUGHT

seeds = st.integers(0, 10**9).map(str)
families = st.sampled_from(FAMILIES)
SKILLS = (*FILE_SKILLS, *WORK_SKILLS, *EVERYDAY)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(seeds, families, st.booleans(), st.booleans(), st.integers(1, 6), st.integers(1, 3))
def test_every_answer_follows_from_its_prompt(
    train_source: Source, seed: str, family: Family, names: bool, phrasings: bool, tools: int, asks: int
):
    case = tool_case(train_source.reseeded(seed), family, Holdout(names, phrasings), tools, asks)
    (_, system), (_, user), (_, opened) = turns(case.prompt)
    assert opened == EMPTY_THOUGHT
    kit = tools_of(system)
    assert len(kit) == tools
    assert all(is_held_name(name) == names for name in kit)
    assert len(calls_of(case.answer)) == case.calls == asks
    assert is_well_formed(case.answer)
    check_calls(kit, user, case.answer)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seeds)
def test_training_dialogs_are_consistent_and_never_show_what_is_held_out(train_source: Source, seed: str):
    source = train_source.reseeded(seed)
    document = tools_dialog(source, 2048)
    (_, system), *dialog = turns(source.dataset.decode(document.ids.tolist()))
    kit = tools_of(system)
    assert not any(is_held_name(name) for name in kit)
    for (_, user), (role, answer) in zip(dialog[::2], dialog[1::2], strict=True):
        assert role == "assistant"
        answer = answer.split("</think>\n\n")[-1]
        if user.startswith("<tool_response>"):
            results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", user)
            assert answer == f"The result is {' and '.join(results)}."
        elif answer.startswith("<tool_call>"):
            check_calls(kit, user, answer)


def test_training_uses_every_family_and_manner(train_source: Source):
    source = train_source.reseeded("all")
    calls = thoughts = multi = 0
    for _ in range(150):
        document = tools_dialog(source, 2048)
        text = source.dataset.decode(document.ids.tolist())
        calls += text.count("<|im_start|>assistant\n<tool_call>") > 0
        thoughts += "<think>\nI call " in text
        multi += "</tool_call>\n<tool_call>" in text
    assert min(calls, thoughts, multi) > 15


def test_a_case_with_a_thought_ends_inside_the_block(train_source: Source):
    case = tool_case(train_source.reseeded("t"), "coding", UNSEEN, 2, 1, think=True)
    assert case.prompt.endswith("<|im_start|>assistant\n" + OPEN_THOUGHT)


def test_the_same_seed_gives_the_same_case(train_source: Source):
    one, two = (tool_case(train_source.reseeded("s"), "composed", UNSEEN, 4, 2) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.topic)
def test_skills_are_complete(skill: Skill):
    keys = {role.key for role in skill.roles}
    assert len(keys) == len(skill.roles)
    required = {role.key for role in skill.roles if not role.optional}
    for phrasing in skill.phrasings:
        placeholders = PLACEHOLDER.findall(phrasing)
        used = {key for key, _ in placeholders}
        assert required <= used <= keys, phrasing
        assert PLACEHOLDER.sub("", phrasing).count("{") == 0
        assert not phrasing.endswith(".")
        check_styles(skill.roles, phrasing)
    assert len(set(skill.phrasings)) == len(skill.phrasings) >= 5
    assert any(description for description in skill.descriptions)
    for role in skill.roles:
        assert any(role.descriptions), role.key


def check_styles(roles: tuple[Role, ...], phrasing: str) -> None:
    """A block can only stand at the end; nothing in the sentence may follow it."""
    by_key = {role.key: role for role in roles}
    for match in PLACEHOLDER.finditer(phrasing):
        key, fixed = match.groups()
        if fixed is None and by_key[key].style == "block":
            assert match.end() == len(phrasing), phrasing
        if fixed is not None:
            assert by_key[key].kind == "boolean"
            assert fixed in ("true", "false")


def test_topics_and_composed_phrases_are_distinct():
    assert len({skill.topic for skill in SKILLS}) == len(SKILLS)
    assert len({role.key for role, _ in ROLE_PHRASES}) == len(ROLE_PHRASES)
    for role, phrases in ROLE_PHRASES:
        assert all(role.key in {key for key, _ in PLACEHOLDER.findall(phrase)} for phrase in phrases)
        assert len(phrases) >= 4
    for action in ACTIONS:
        assert all(request.count("{noun}") == 1 and request.count("{rest}") == 1 for request in action.requests)


@settings(derandomize=True)
@given(st.lists(st.text(min_size=1), min_size=2, unique=True))
def test_a_split_has_two_parts_which_make_the_whole(items: list[str]):
    training, held = split(items, False), split(items, True)
    assert training
    assert held
    assert sorted([*training, *held]) == sorted(items)


def test_a_split_needs_two_items():
    with pytest.raises(ValueError, match="cannot split"):
        split(["only", "only"], held=True)


def test_held_out_phrasings_appear_in_no_training_request(train_source: Source):
    """By the phrasings' own fixed words, over many requests of a skill."""
    source = train_source.reseeded("phrasings")
    for _ in range(300):
        item = draw_kit(source, "coding", 1, TRAINING)[0]
        assert item.skill
        assert not set(item.phrasings) & set(split(item.skill.phrasings, held=True))
        unseen = draw_kit(source, "everyday", 1, UNSEEN)[0]
        assert unseen.skill
        assert set(unseen.phrasings) == set(split(unseen.skill.phrasings, held=True))
    assert set(split(PREFIXES, True)).isdisjoint(split(PREFIXES, False))


def test_a_kit_has_no_two_tools_of_one_topic(train_source: Source):
    source = train_source.reseeded("kits")
    for family in FAMILIES:
        for _ in range(30):
            kit = draw_kit(source, family, 8, TRAINING)
            assert kit[0].family == family
            topics = [item.skill.topic if item.skill else item.noun for item in kit]
            assert len(set(topics)) == len({item.tool.name for item in kit}) == 8


def test_twins_are_two_calls_of_one_tool(train_source: Source):
    source = train_source.reseeded("twins")
    twins = 0
    for _ in range(100):
        item = draw_kit(source, "coding", 1, TRAINING)[0]
        ask = draw_ask(source, item, TRAINING, twins=True)
        if len(ask.calls) == 2:
            twins += 1
            (_, first), (_, second) = ask.calls[0].arguments[0], ask.calls[1].arguments[0]
            assert first != second
            assert " and " in ask.text
            assert ask.text.index(first) != ask.text.rindex(second)
    assert twins > 10


def test_values_keep_what_they_are(train_source: Source):
    """Several lines, quotes, slashes and braces get into calls as they were said."""
    source = train_source.reseeded("values")
    multi_line = 0
    for _ in range(200):
        case = tool_case(source, "coding", TRAINING, 1, 1)
        multi_line += any("\n" in value for _, arguments in calls_of(case.answer) for value in arguments.values())
    assert multi_line > 5


def test_a_call_is_written_as_the_template_writes_it():
    calls = [Call("f", (("a", "1"), ("b", "x\ny"))), Call("g", ())]
    assert render_calls(calls) == (
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
    )


def test_a_tool_s_schema():
    tool = Tool(
        "f",
        "Does f.",
        (
            Parameter("a", "integer", "An a."),
            Parameter("b", "array", required=False),
            Parameter("c", "string", choices=("x", "y")),
        ),
    )
    assert json.loads(tool.json_line()) == {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Does f.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "An a."},
                    "b": {"type": "array", "items": {"type": "string"}},
                    "c": {"type": "string", "enum": ["x", "y"]},
                },
                "required": ["a", "c"],
            },
        },
    }


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.user[:40])
def test_probes_have_the_form_of_prompts(probe):
    (_, system), (_, user), (_, opened) = turns(probe.prompt())
    kit = tools_of(system)
    assert user == probe.user
    assert opened == EMPTY_THOUGHT
    assert is_well_formed(probe.answer())
    check_calls(kit, user, probe.answer())


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", True),
        ("<tool_call>\n<function=f>\n<parameter=a>\n1 < 2\n\nx\n</parameter>\n</function>\n</tool_call>", True),
        (
            "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
            True,
        ),
        ("", False),
        ("Sure: <tool_call>\n<function=f>\n</function>\n</tool_call>", False),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call> done", False),
        ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>", False),
        ("<tool_call>\n<function=f>\n<parameter=a>\n<parameter=b>\n1\n</parameter>\n</function>\n</tool_call>", False),
        ("<tool_call>\n<function=>\n</function>\n</tool_call>", False),
    ],
)
def test_well_formed(text: str, right: bool):
    assert is_well_formed(text) is right
