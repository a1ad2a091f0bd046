import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tools.corpus import SHIPPED
from tests.tools.prompts import tools_of
from tools.train.checkpoint import initial_parameters, load_model, save_model
from tools.train.data.dataset import Dataset
from tools.train.evaluation.acceptance import chained_acceptance, engine_acceptance, row_acceptance
from tools.train.evaluation.decoding import agreement, greedy
from tools.train.evaluation.draft_prompts import (
    DRAFT_KINDS,
    PASSAGE_TOKENS,
    draft_prompts,
    load_prompts,
    save_prompts,
    text_windows,
)
from tools.train.evaluation.needles import needle_case
from tools.train.evaluation.report import EvalOptions, Report, evaluate
from tools.train.evaluation.text_score import bits_per_byte
from tools.train.evaluation.tool_score import CELLS, Score, draw_cases, forced_score, greedy_score
from tools.train.model import TrainModel
from tools.train.shape import ModelShape
from tools.train.tasks.source import Source
from tools.train.tasks.tools.held_out import is_held_name

CPU = torch.device("cpu")
TOY = ModelShape(vocab_size=96, hidden_size=64, layers=4, intermediate_size=96, head_dim=16, delta_head_dim=16)
STOP = 5


@pytest.fixture(scope="module")
def toy() -> TrainModel:
    """A random model whose greedy output is not constant."""
    parameters = initial_parameters(TOY, 11)
    parameters = {name: value * (8 if name.endswith("proj.weight") else 1) for name, value in parameters.items()}
    return TrainModel(TOY, parameters, CPU)


@pytest.fixture(scope="module")
def shipped() -> TrainModel:
    shape, parameters = load_model(SHIPPED)
    return TrainModel(shape, parameters, CPU)


def prompts(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 96, length).astype(np.int32) for length in lengths]


@torch.no_grad()
def decode_plainly(model: TrainModel, prompt: list[int], limit: int) -> list[int]:
    ids = list(prompt)
    for _ in range(limit):
        chosen = int(model.logits(model.normed(model.body(torch.tensor([ids]))))[-1].argmax())
        if chosen == STOP:
            break
        ids.append(chosen)
    return ids[len(prompt) :]


def test_greedy_equals_decoding_one_prompt_at_a_time(toy: TrainModel):
    starts = prompts(3, 17, 9)
    expected = [decode_plainly(toy, start.tolist(), 12) for start in starts]
    assert greedy(toy, starts, 12, STOP) == expected
    assert len({token for output in expected for token in output}) > 3


def test_greedy_stops_at_the_stop_token(toy: TrainModel):
    starts = prompts(3, 17)
    free = greedy(toy, starts, 8, stop=-1)
    stop = free[0][3]
    assert greedy(toy, starts, 8, stop)[0] == free[0][: free[0].index(stop)]


def test_agreement_counts_the_leading_tokens_that_greedy_gives(toy: TrainModel):
    starts = prompts(4, 30, 11, 2)
    answers = [np.array(output, np.int32) for output in greedy(toy, starts, 10, stop=-1)]
    assert agreement(toy, starts, answers) == [10] * 4
    answers[1][6] = (answers[1][6] + 1) % 96
    answers[3][0] = (answers[3][0] + 1) % 96
    assert agreement(toy, starts, answers) == [10, 6, 10, 0]
    assert agreement(toy, starts, answers, tokens_at_once=1) == [10, 6, 10, 0]  # one at a time


@torch.no_grad()
def engine_drafts(model: TrainModel, ids: list[int], at: int, steps: int) -> list[int]:
    """What an engine drafts after ids[: at + 2]: the past as first drafts, then the drafts in a chain, by whole passes
    of the MTP layer over (hidden, following token) pairs."""
    hidden = model.normed(model.body(torch.tensor([ids])))
    inputs = hidden[: at + 1]
    following = ids[1 : at + 2]
    drafts: list[int] = []
    for _ in range(steps):
        out = model.draft_normed(model.mtp(inputs, torch.tensor([following])))
        drafts.append(int(model.logits(out[-1]).argmax()))
        inputs = torch.cat([inputs, out[-1:]])
        following = [*following, drafts[-1]]
    return drafts


@torch.no_grad()
def test_acceptance_is_that_of_an_engine_s_drafts(toy: TrainModel):
    ids = prompts(24)[0].tolist()
    main = toy.logits(toy.normed(toy.body(torch.tensor([ids])))).argmax(-1).tolist()
    found = row_acceptance(toy, torch.tensor(ids), steps=3)
    for at in range(20):
        drafts = engine_drafts(toy, ids, at, 3)
        expected = [drafts[: s + 1] == main[at + 1 : at + 2 + s] for s in range(3)]
        assert found[:, at].tolist() == expected


def test_engine_acceptance_counts_output_positions_only(toy: TrainModel, monkeypatch: pytest.MonkeyPatch):
    def accepted_at(model: TrainModel, ids: torch.Tensor, steps: int) -> torch.Tensor:
        at = torch.arange(len(ids))
        return torch.stack([at >= 4 + step for step in range(steps)])

    monkeypatch.setattr("tools.train.evaluation.acceptance.row_acceptance", accepted_at)
    # prompt of 5, output of 7: positions 4 .. 7 have three drafts that all stand for output
    assert engine_acceptance(toy, [(range(5), range(7))]) == [1.0, 0.75, 0.5]
    assert engine_acceptance(toy, [(range(5), range(3))]) == [0.0, 0.0, 0.0]


@torch.no_grad()
def test_chained_acceptance_counts_the_marked_tokens(toy: TrainModel):
    ids = torch.from_numpy(prompts(64)[0]).long()[None]
    main = toy.logits(toy.normed(toy.body(ids))).argmax(-1)
    hidden = toy.draft_normed(toy.mtp(toy.normed(toy.body(ids)), torch.roll(ids, -1, 1)))
    right = (toy.logits(hidden).argmax(-1)[:60] == main[1:61]).tolist()
    for at in (3, 20, 59):
        counted = torch.zeros(1, 64, dtype=torch.bool)
        counted[0, at + 2] = True  # the token that the first draft at `at` stands for
        assert chained_acceptance(toy, ids, counted, steps=1) == [float(right[at])]


def test_a_uniform_model_has_the_bits_of_its_vocabulary(held_source: Source):
    shape = ModelShape(
        hidden_size=32,
        layers=1,
        intermediate_size=32,
        heads=1,
        kv_heads=1,
        head_dim=8,
        key_heads=1,
        value_heads=1,
        delta_head_dim=8,
    )
    parameters = initial_parameters(shape, 0)
    parameters["model.embed_tokens.weight"] = torch.zeros(4096, 32)
    size = held_source.dataset.sizes["english"]
    found = bits_per_byte(TrainModel(shape, parameters, CPU), held_source.dataset, "english", 256)
    assert found == pytest.approx(12 * size.tokens / size.bytes, rel=1e-5)
    with pytest.raises(ValueError, match="less than a row"):
        bits_per_byte(TrainModel(shape, parameters, CPU), held_source.dataset, "english", 10**9)


def test_needle_prompts_are_those_of_the_public_test(held_source: Source):
    prompt, code = needle_case(held_source.dataset.tokenizer, 2048, 7)
    text = prompt.split("<|im_start|>user\n")[1]
    assert text.count(f"\n[the secret code is {code}]\n") == 1
    assert text.index(code) / len(text) == pytest.approx(0.8, abs=0.03)
    assert len(held_source.dataset.encode(prompt)) == pytest.approx(2048, rel=0.1)
    assert needle_case(held_source.dataset.tokenizer, 2048, 7) == (prompt, code)
    assert needle_case(held_source.dataset.tokenizer, 2048, 8)[1] != code


def test_the_shipped_model_finds_a_needle_and_calls_tools(shipped: TrainModel, held_source: Source):
    dataset = held_source.dataset
    prompt, code = needle_case(dataset.tokenizer, 512, 3)
    answer = dataset.encode(code + "<|im_end|>")
    assert agreement(shipped, [dataset.encode(prompt)], [answer]) == [len(answer)]
    cases = draw_cases(held_source.reseeded("cases"), CELLS[0], 5)
    score = forced_score(shipped, dataset, [(case.prompt, case.answer) for case in cases])
    assert score.cases == 5
    assert score.exact >= 0.6  # the card: 91%
    assert score.name_right is not None
    assert score.name_right >= max(0.75, score.exact)


def test_forced_scores_judge_name_and_arguments(shipped: TrainModel, held_source: Source):
    dataset = held_source.dataset
    case = next(
        case
        for case in draw_cases(held_source.reseeded("forced"), CELLS[0], 8)
        if forced_score(shipped, dataset, [(case.prompt, case.answer)]).exact == 1
    )
    other_argument = case.answer.replace("\n</parameter>", "x\n</parameter>", 1)
    other_name = case.answer.replace(">", "x>", 2)
    assert other_argument != case.answer
    assert forced_score(shipped, dataset, [(case.prompt, other_argument)]) == Score(1, 0.0, 1.0)
    assert forced_score(shipped, dataset, [(case.prompt, other_name)]) == Score(1, 0.0, 0.0)


def test_greedy_scores_judge_what_is_decoded(held_source: Source, shipped: TrainModel, monkeypatch: pytest.MonkeyPatch):
    cases = draw_cases(held_source.reseeded("greedy"), CELLS[0], 4)
    texts = [
        cases[0].answer,
        "I think so.\n</think>\n\n" + cases[1].answer,
        cases[2].answer.replace("\n</function>", "x</function>"),
        cases[3].answer.replace("<function=", "<function=not_"),
    ]
    outputs = [held_source.dataset.encode(text).tolist() for text in texts]
    monkeypatch.setattr("tools.train.evaluation.tool_score.greedy", lambda *_: outputs)
    assert greedy_score(shipped, held_source.dataset, cases) == Score(4, 0.5, 0.75, 0.75)


def test_a_whole_report(data: Path, tmp_path: Path):
    shape = ModelShape(
        hidden_size=32,
        layers=4,
        intermediate_size=32,
        heads=1,
        kv_heads=1,
        head_dim=8,
        key_heads=1,
        value_heads=1,
        delta_head_dim=8,
    )
    model = TrainModel(shape, initial_parameters(shape, 0), CPU)
    options = EvalOptions(lengths=(300,), salts=1, tool_cases=1, decoded=0, text_rows=1)
    with pytest.raises(ValueError, match="held-out"):
        evaluate(model, Dataset(data, "train"), options)
    report = evaluate(model, Dataset(data, "held"), options, log=lambda _: None)
    assert set(report.tools) == {*(cell.label for cell in CELLS), "probes"}
    assert report.tools["probes"].exact == 0
    assert len(report.missed_probes) == report.tools["probes"].cases
    report.save(tmp_path / "eval.json")
    assert json.loads((tmp_path / "eval.json").read_text())["needles"] == {"300 tokens": 0.0}
    table = report.markdown()
    assert "| needle, 300 tokens | 0% |" in table
    assert "| probes | 26 | 0.0% |" in table


def test_the_table_of_a_report():
    report = Report(
        tools={"a": Score(4, 0.5, None, 1.0)}, acceptance_given={"x": [1.0, 0.5]}, acceptance_own={"y": [0.25, 0.125]}
    )
    assert "| a | 4 | 50.0% |  | 100.0% |" in report.markdown()
    assert "| x | 1.000 / 0.500 |  |" in report.markdown()
    assert "| y |  | 0.250 / 0.125 |" in report.markdown()


def test_the_command_line_trains(data: Path, tmp_path: Path):
    start, out = tmp_path / "start", tmp_path / "out"
    shape = ModelShape(
        hidden_size=32, layers=1, intermediate_size=32, heads=1, kv_heads=1, head_dim=8, delta_head_dim=8
    )
    save_model(start, shape, initial_parameters(shape, 0), SHIPPED)
    arguments = [
        sys.executable,
        "-m",
        "tools.train",
        "train",
        "--data",
        str(data),
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    arguments += ["--steps", "1", "--tokens", "1024", "--plan", "early", "--workers", "1", "--start"]

    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*arguments, str(folder)],
            cwd=SHIPPED.parents[1],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    missing = run(tmp_path / "none")
    assert missing.returncode == 1
    assert missing.stderr.startswith("FileNotFoundError")
    done = run(start)
    assert done.returncode == 0, done.stderr
    assert load_model(out)[0] == shape
    assert (out / "chat_template.jinja").read_bytes() == (SHIPPED / "chat_template.jinja").read_bytes()


def test_draft_prompts_are_held_out_and_the_same_for_one_seed(held_source: Source, tmp_path: Path):
    prompts = draft_prompts(held_source.reseeded("drafts"), 5)
    assert [prompt.kind for prompt in prompts] == [kind for kind in DRAFT_KINDS for _ in range(5)]
    assert draft_prompts(held_source.reseeded("drafts"), 5) == prompts
    save_prompts(tmp_path / "prompts.jsonl", prompts)
    assert load_prompts(tmp_path / "prompts.jsonl") == prompts
    for prompt in prompts:
        if prompt.kind in ("code", "English"):
            length = len(held_source.dataset.encode(prompt.text))
            assert length == pytest.approx(PASSAGE_TOKENS, rel=0.1)
        else:
            assert prompt.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        if prompt.kind == "tool calls":
            system = prompt.text.split("<|im_start|>system\n")[1].split("<|im_end|>")[0]
            assert all(is_held_name(name) for name in tools_of(system))


def test_text_windows_lie_evenly_over_the_held_out_text(held_source: Source):
    dataset = held_source.dataset
    found = text_windows(dataset, 3)
    assert [prompt.kind for prompt in found] == ["code"] * 3 + ["English"] * 3
    for kind, three in (("python", found[:3]), ("english", found[3:])):
        tokens = dataset.texts[kind]
        whole = len(tokens) // PASSAGE_TOKENS
        for number, prompt in enumerate(three):
            start = number * whole // 3 * PASSAGE_TOKENS
            ids = [10 if t >= dataset.ordinary_ids else t for t in tokens[start : start + PASSAGE_TOKENS].tolist()]
            assert prompt.text == dataset.decode(ids).strip("\ufffd")
    with pytest.raises(ValueError, match=r"windows, 1000000 are asked for"):
        text_windows(dataset, 1_000_000)
