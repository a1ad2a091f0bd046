"""`python -m bench memory` with a small model on a CPU, and its sums with readings as a GPU would give them."""

from pathlib import Path

import pytest
import torch

from bench import engine, memory, results
from bench.memory import Memory, Reading
from bench.random_model import random_model, shape
from bench.shape_source import ShapeSource
from services.engine.memory_plan import Line, MemoryPlan
from services.engine.model.matrix import MatrixSlot
from services.engine.weights import recipes
from services.engine.weights.footprint import footprint

MIB = 2**20


def test_the_draft_head_takes_what_is_planned() -> None:
    raw = {**shape(4), **engine.TINY, "mtp_num_hidden_layers": 1}
    recipe = recipes.load("gsq3")
    made = random_model(raw, recipe, torch.float32, torch.device("cpu"))
    planned = footprint(ShapeSource(raw), torch.float32, packed=True, recipe=recipe)
    assert made.draft is not None
    places = list(made.draft.slots())
    matrices = {place.matrix for place in places if isinstance(place, MatrixSlot)}
    plain = sum(place.target.nbytes for place in places if not isinstance(place, MatrixSlot))
    assert sum(block.nbytes for matrix in matrices for block in matrix.blocks) + plain == planned.draft


def test_a_small_run_plans_prefills_and_decodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory, "_STEPS", 2)
    monkeypatch.setattr(memory, "_SESSION_TOKENS", 64)
    memory.main(["--shape=tiny", "--layers=4", "--vram=88MiB", "--context=256", "--kv=rk4v4-e8", "--sessions=2"])
    told = capsys.readouterr().out
    for name in ("pool-tokens", "prefill", "decode", "decode-2"):
        assert f"\nmemory/88MiB/gsq3/{name}: " in told
    assert "A session may have" in told
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"bench memory: .* are needed for one session"):
        memory.main(["--shape=tiny", "--layers=4", "--vram=66MiB", "--context=65536"])


def test_parts_beside_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """9 MiB of 10 are planned: 5 of weights and their draft head, 2 of pools, 1 of graphs and work, 1 of CUDA."""
    told: dict[str, tuple[float, float | None]] = {}

    def report(name: str, value: float, unit: str, limit: float | None = None) -> None:
        told[name] = value, limit

    sizes = {"weights": 4, "draft head": 1, "KV pages": 1.5, "states": 0.5, "workspace": 0.75, "decode graphs": 0.25}
    lines = [Line(name, int(size * MIB)) for name, size in {**sizes, "CUDA context": 1, "headroom": 1}.items()]
    found = MemoryPlan(10 * MIB, tuple(lines), 64, 4, 2, 128, 1, 128, 1)
    options = memory._options(["--shape=tiny"])
    loaded, pools = Reading(5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB), Reading(7 * MIB, 7 * MIB, 7 * MIB, 7 * MIB)
    graphs = Reading(7 * MIB, 8 * MIB, int(7.5 * MIB), 8 * MIB)
    last = Reading(7 * MIB, 8 * MIB, 8 * MIB, int(8.25 * MIB), beside=MIB // 2)
    Memory(options, report)._compare(found, loaded, pools, graphs, last)
    assert told == {
        "weights": (5 * MIB, 5 * MIB),
        "pages-and-states": (2 * MIB, 2 * MIB),
        "graphs": (MIB // 2, MIB // 4),
        "workspace": (MIB, MIB * 3 // 4),
        "beside-torch": (MIB // 2, MIB),
        "planned": (9 * MIB, 10 * MIB),
        "allocated": (8.5 * MIB, 9 * MIB),
        "peak": (8.75 * MIB, 9 * MIB),
        "peak-over-plan": (0.9722, None),
    }


def test_readings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = Reading(MIB, 2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB).told("weights")
    assert line.split() == ["weights", "1.0", "2.0", "3.0", "4.0", "5.0"]
    assert len(line) == len(memory.HEADING)
    meter = memory.Meter(torch.device("cpu"))
    meter.begin()
    assert meter.read("nothing") == Reading()
    assert not capsys.readouterr().out
