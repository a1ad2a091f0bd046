import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tools.corpus import SHIPPED
from tools.train.checkpoint import initial_parameters, load_model, stored
from tools.train.schedule import MIX_LONG, PLANS, Phase, Rate, phase_at
from tools.train.shape import ModelShape
from tools.train.stream import StreamOptions, open_stream
from tools.train.tasks.rows import Mix
from tools.train.trainer import TrainingError, TrainOptions, train

CPU = torch.device("cpu")
TOY = ModelShape(
    hidden_size=32, layers=4, intermediate_size=64, heads=2, kv_heads=1, head_dim=16, value_heads=2, delta_head_dim=16
)
MIX: Mix = {"python": 0.4, "english": 0.4, "tools": 0.2}
PLAN = (Phase(0.5, (128,), MIX), Phase(1.0, (64, 128), MIX, (256,)))


def options(data: Path, out: Path, steps: int = 20, **changes: object) -> TrainOptions:
    stream = StreamOptions(data, PLAN, steps, tokens=256, seed=4)
    made = TrainOptions(stream, Rate(0.02, 0.3, 0.1, rise_steps=4), out, files_from=SHIPPED, workers=0)
    return replace(made, **changes)


def test_a_short_training_lowers_the_loss_and_saves_a_model(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tools.train.trainer.LOG_STEPS", 5)
    lines: list[str] = []
    model = train(options(data, tmp_path), TOY, initial_parameters(TOY, 0), CPU, log=lines.append)
    journal = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [line["step"] for line in journal] == [5, 10, 15, 20]
    assert journal[0]["loss"] == pytest.approx(math.log(4096), abs=0.5)
    assert journal[-1]["loss"] < journal[0]["loss"] - 0.8
    assert journal[-1]["drafts"][0] < journal[0]["drafts"][0] - 0.4
    assert journal[-1]["tokens"] == 10 * 256 + 10 * 2 * 256
    shape, parameters = load_model(tmp_path)
    assert shape == TOY
    for name, value in parameters.items():
        assert torch.equal(value, stored(name, model.parameters[name]).float())
    assert lines[-1].startswith("trained 20 steps")


def test_the_same_seed_gives_the_same_weights(data: Path, tmp_path: Path):
    runs = [
        train(options(data, tmp_path / name, steps=4), TOY, initial_parameters(TOY, 0), CPU, log=lambda _: None)
        for name in ("one", "two")
    ]
    for name, value in runs[0].parameters.items():
        assert torch.equal(value, runs[1].parameters[name]), name
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()


def test_a_deadline_ends_the_training_with_a_saved_model(data: Path, tmp_path: Path):
    lines: list[str] = []
    made = options(data, tmp_path, steps=10_000, deadline=0.3)
    train(made, TOY, initial_parameters(TOY, 0), CPU, log=lines.append)
    assert lines[0].startswith("deadline: stopped after ")
    assert load_model(tmp_path)[0] == TOY


def test_a_loss_that_is_no_number_stops_the_training(data: Path, tmp_path: Path):
    parameters = initial_parameters(TOY, 0)
    parameters["model.norm.weight"][0] = math.nan
    with pytest.raises(TrainingError, match="the loss is nan at step 1"):
        train(options(data, tmp_path, steps=1), TOY, parameters, CPU, log=lambda _: None)


def test_the_stream_is_the_same_with_any_number_of_workers(data: Path):
    made = StreamOptions(data, PLAN, steps=5, tokens=256, seed=9)
    with open_stream(made, workers=0) as alone, open_stream(made, workers=2) as two:
        steps = 0
        for expected, found in zip(alone, two, strict=True):
            steps += 1
            assert len(expected) == len(found) == (1 if steps <= 3 else 2)
            for one, other in zip(expected, found, strict=True):
                assert np.array_equal(one.ids, other.ids)
                assert np.array_equal(one.weights, other.weights)
    assert steps == 5


def test_another_seed_gives_another_stream(data: Path):
    first = []
    for seed in (1, 2):
        with open_stream(StreamOptions(data, PLAN, 1, 256, seed), workers=0) as stream:
            first.append(next(stream)[0].ids)
    assert not np.array_equal(*first)


def test_a_dead_worker_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tools.train.stream.PATIENCE", 0.2)
    made = StreamOptions(tmp_path / "missing", PLAN, 2, 256, 0)
    with (
        open_stream(made, workers=1) as stream,
        pytest.raises(RuntimeError, match="data worker 0 died with exit code 1"),
    ):
        next(stream)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_plans_cover_a_run_with_rows_that_fit(plan: tuple[Phase, ...]):
    assert [phase.until for phase in plan] == sorted(phase.until for phase in plan)
    assert plan[-1].until == 1.0
    for phase in plan:
        assert sum(phase.mix.values()) == pytest.approx(1.0)
        assert all(65536 % length == 0 and length % 64 == 0 for length in (*phase.short, *phase.long))
    assert sum(MIX_LONG.values()) == pytest.approx(1.0)
    assert phase_at(plan, 0, 1000) is plan[0]
    assert phase_at(plan, 999, 1000) is plan[-1]


def test_phases_change_at_their_share():
    assert [phase_at(PLAN, step, 10) is PLAN[0] for step in range(10)] == [True] * 5 + [False] * 5


def test_the_rate_rises_stays_and_falls():
    rate = Rate(0.02, fall=0.5, floor=0.1, rise_steps=10)
    assert rate.scale(0, 0.0) == pytest.approx(0.1)
    assert rate.scale(9, 0.1) == 1.0
    assert rate.scale(50, 0.5) == 1.0
    assert rate.scale(75, 0.75) == pytest.approx(0.5)
    assert rate.scale(99, 0.99) == pytest.approx(0.1)
