import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.prompts import turns
from tools.train.data.dataset import Dataset
from tools.train.data.vocabulary import ADDED_TOKENS
from tools.train.tasks.chat import chat, small_talk
from tools.train.tasks.dialog import ANSWER, CALL, Dialog, Document
from tools.train.tasks.facts import facts
from tools.train.tasks.induction import induction
from tools.train.tasks.needle import needle
from tools.train.tasks.rows import Task, micro_batch, row
from tools.train.tasks.source import FILLERS, Source
from tools.train.tasks.wording import OTHER_QUESTIONS, QUESTION

seeds = st.integers(0, 10**9).map(str)
few = settings(max_examples=25, deadline=None, derandomize=True)
TASKS: tuple[Task, ...] = ("python", "english", "induction", "facts", "needle", "tools", "chat")


def weighted_runs(dataset: Dataset, document: Document, weight: float) -> list[str]:
    """The texts of the runs of tokens with this weight."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], document.weights == weight, [0]])))
    return [dataset.decode(document.ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


def text_of(dataset: Dataset, document: Document) -> str:
    return dataset.decode(document.ids.tolist())


@few
@given(seeds)
def test_equal_seeds_give_equal_rows(train_source: Source, seed: str):
    for task in TASKS:
        one, two = (row(train_source.reseeded(seed), 512, {task: 1.0}) for _ in range(2))
        assert np.array_equal(one.ids, two.ids)
        assert np.array_equal(one.weights, two.weights)
        assert len(one.ids) == len(one.weights) == 512
        assert one.weights.any()


def test_another_seed_gives_other_rows(train_source: Source):
    for task in TASKS:
        one, two = (row(train_source.reseeded(seed), 512, {task: 1.0}) for seed in ("1", "2"))
        assert not np.array_equal(one.ids, two.ids), task


@few
@given(seeds)
def test_pieces_tokenize_as_the_whole_text(train_source: Source, seed: str):
    dataset = train_source.dataset
    for document in (chat(train_source.reseeded(seed)), row(train_source.reseeded(seed), 1500, {"tools": 1.0})):
        ids = document.ids[: int(np.flatnonzero(document.ids == dataset.token_id("<|im_end|>"))[-1]) + 1]
        assert np.array_equal(dataset.encode(dataset.decode(ids.tolist())), ids)


@few
@given(seeds)
def test_loss_is_on_assistant_turns_only(train_source: Source, seed: str):
    dataset = train_source.dataset
    for document in (
        chat(train_source.reseeded(seed)),
        facts(train_source.reseeded(seed), 900),
        needle(train_source.reseeded(seed), 700),
    ):
        position = 0
        for part in re.split(r"(<\|im_start\|>assistant\n)", text_of(dataset, document)):
            count = len(dataset.encode(part))
            if part.startswith("<|im_start|>assistant"):
                assert not document.weights[position : position + count].any()
            position += count
        for run in weighted_runs(dataset, document, 0.0):
            # what carries no loss never holds an answer: it ends with a generation prompt, or it is the last newline
            assert run == "\n" or run.endswith(("assistant\n", "<think>\n", "</think>\n\n"))


@few
@given(seeds, st.integers(300, 6000))
def test_needle_asks_for_codes_that_stand_in_the_text(train_source: Source, seed: str, tokens: int):
    source = train_source.reseeded(seed)
    document = needle(source, tokens)
    text = text_of(source.dataset, document)
    dialog = [turn for turn in turns(text) if turn[0] != "system"]
    questions = [content for role, content in dialog if role == "user"]
    answers = weighted_runs(source.dataset, document, ANSWER)
    assert len(questions) == len(answers)
    hay = questions[0]
    assert hay.endswith((QUESTION, *OTHER_QUESTIONS))
    secret = re.findall(r"\[(?:the )?secret code(?: is)?:? (.*?)\]", hay)
    assert [f"{secret[0]}<|im_end|>"] == answers[:1]
    assert len(secret) == 1
    for question, answer in zip(questions[1:], answers[1:], strict=True):
        label = re.fullmatch(r"What is the (.*) code\? Reply with the code only\.", question)
        assert label
        assert f"[the {label[1]} code is {answer.removesuffix('<|im_end|>')}]" in hay
    assert abs(len(document.ids) - tokens) < 150 + 35 * len(questions)


@few
@given(seeds, st.sampled_from([500, 2000, 6000]))
def test_facts_are_answered_as_they_stand_in_the_text(train_source: Source, seed: str, tokens: int):
    source = train_source.reseeded(seed)
    document = facts(source, tokens)
    dialog = [turn for turn in turns(text_of(source.dataset, document)) if turn[0] == "user"]
    answers = [a.removesuffix("<|im_end|>") for a in weighted_runs(source.dataset, document, ANSWER)]
    assert len(dialog) == len(answers) > 0
    hay, _, first = dialog[0][1].rpartition("\n")
    for question, answer in zip([first, *(content for _, content in dialog[1:])], answers, strict=True):
        key = re.fullmatch(
            r'(?:What is the (?:value|code) of |What is the |Where does )"?(.*?)"?(?: code| live)?\?', question
        )
        assert key, question
        forms = ("[the {} code is {}]", '{} = "{}"', '{{"{}": "{}"}}', "The code of {} is {}.", "{} lives in {}.")
        assert any(form.format(key[1], answer) in hay for form in forms), (question, answer)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(seeds)
def test_chats_are_answered_rightly(train_source: Source, seed: str):
    question, answer, thought = small_talk(train_source.reseeded(seed))
    assert "\n" not in thought
    head, _, rest = question.partition(": ")
    words = rest.removesuffix("?").split(", ")
    if match := re.fullmatch(r"What is (\d+) ([+*-]) (\d+)\?", question):
        a, b = int(match[1]), int(match[3])
        assert int(answer) == {"+": a + b, "-": a - b, "*": a * b}[match[2]] >= 0
    elif match := re.fullmatch(r"Count from (\d+) to (\d+)\.", question):
        assert [int(x) for x in answer.split(", ")] == list(range(int(match[1]), int(match[2]) + 1))
    elif head in ("Repeat after me", "Say exactly", "Repeat"):
        assert answer == rest
    elif head == "List these words, one a line":
        assert answer.split("\n") == [f"- {word}" for word in words]
    elif head == "Reverse the order of these words":
        assert answer.split(", ") == words[::-1]
    elif head == "What is the first word":
        assert answer == words[0]
    elif head == "What is the last word":
        assert answer == words[-1]
    elif head == "How many words are these":
        assert int(answer) == len(words)
    elif question.startswith("Here is a table.\n"):
        *rows, last = question.split("\n")[1:]
        key = last.removeprefix("What is the entry of ").removesuffix("?")
        assert f"{key} | {answer}" in rows
    elif "\n\n" in question:
        assert question.split("\n\n", 1)[1] == answer
        assert "<" not in answer
    else:
        assert answer == "Hello! How can I help you?"


@few
@given(seeds, st.integers(64, 2000))
def test_induction_repeats_itself(train_source: Source, seed: str, tokens: int):
    ids, weights = induction(train_source.reseeded(seed), tokens)
    half = len(ids) // 2
    assert len(ids) <= max(66, tokens)
    assert np.array_equal(ids[:half], ids[half:])
    assert ids.max() < train_source.dataset.ordinary_ids
    assert not weights[:half].any()
    assert (weights[half:] == 1).all()


@pytest.mark.parametrize("kind", FILLERS)
@pytest.mark.parametrize("n", [0, 1, 63, 5000])
def test_fillers_have_the_length_and_no_added_tokens(train_source: Source, kind, n: int):
    ids = train_source.reseeded(f"{kind}{n}").filler(n, kind)
    assert ids.shape == (n,)
    assert ids.dtype == np.int32
    assert (ids < train_source.dataset.ordinary_ids).all()


def test_a_turn_in_each_mode(train_source: Source):
    source = train_source.reseeded("modes")
    dialog = Dialog(source)
    for mode in ("bare", "empty", "think"):
        dialog.user("Hi")
        dialog.assistant("Yes", "I think.", CALL, mode)
    document = dialog.document()
    assert [content for role, content in turns(text_of(source.dataset, document)) if role == "assistant"] == [
        "Yes",
        "<think>\n\n</think>\n\nYes",
        "<think>\nI think.\n</think>\n\nYes",
    ]
    assert weighted_runs(source.dataset, document, CALL) == ["Yes<|im_end|>"] * 3
    assert weighted_runs(source.dataset, document, 1.0) == ["I think.\n</think>\n\n"]


def test_text_rows_are_corpus_text_with_weight_one(train_source: Source):
    text = row(train_source.reseeded("text"), 300, {"english": 1.0})
    corpus = train_source.dataset.texts["english"]
    assert (text.weights == 1).all()
    starts = np.flatnonzero(corpus == text.ids[0])
    assert any(np.array_equal(corpus[start : start + 300], text.ids) for start in starts)


def test_a_micro_batch_has_the_mix_and_the_shape(train_source: Source):
    batch = micro_batch(train_source.reseeded("mix"), 16384, 512, {"english": 1.0, "chat": 1.0})
    assert batch.ids.shape == batch.weights.shape == (32, 512)
    assert batch.ids.dtype == np.int32
    assert batch.weights.dtype == np.float32
    text_rows = int((batch.weights == 1).all(axis=1).sum())
    assert 6 <= text_rows <= 26


def test_added_tokens_of_the_corpus_do_not_get_into_messages(data, train_source: Source):
    dataset = Dataset(data, "train")
    dataset.texts = {"python": np.arange(4000, 4096, dtype=np.uint16), "english": np.full(96, 4089, np.uint16)}
    source = Source(dataset, "x", train_source.tables)
    assert (source.passage("python", 96) < 4087).all()
    assert not any(token in source.passage_text("english", 50) for token in ADDED_TOKENS)
