"""The bench of the engine, with a small model on a CPU."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tests.engine.hybrid_models  # noqa: F401 (hides flash-linear-attention from transformers)
from bench import engine, engine_plot, engine_timeline, results
from bench.engine_peer import NAME, peer
from bench.engine_rig import EngineRig, pages_for
from bench.engine_trace import Launch, summed
from bench.filled_contexts import FilledContexts
from bench.random_model import SPREAD, random_model, shape
from bench.results import Entry
from bench.shape_source import ShapeSource
from kernels.linear.quantized import dequantize
from kernels.linear.weight import Weight, unpack
from services.engine.batch import ModelOutput, Row, Sampled, SampleSpec, ScheduledBatch
from services.engine.cache.pages import KvLayout, KvPages
from services.engine.cache.states import StateLayout, StatePool
from services.engine.model.matrix import Matrix, MatrixSlot
from services.engine.weights import recipes
from services.engine.weights.footprint import footprint
from services.protocol.generate import SamplingParams

CPU = torch.device("cpu")
RAW = {**shape(4), **engine.TINY}


@pytest.mark.parametrize("name", engine.RECIPES)
def test_model_is_what_the_loader_makes(name: str) -> None:
    torch.manual_seed(0)
    recipe = recipes.load(name)
    made = random_model(RAW, recipe, torch.float32, CPU)
    places = [place for place in made.model.slots() if isinstance(place, MatrixSlot)]
    matrices: dict[str, Matrix] = {place.name: place.matrix for place in places}
    planned = footprint(ShapeSource(RAW), torch.float32, packed=True, recipe=recipe)
    embedding = matrices["model.embed_tokens.weight"].block.nbytes
    assert made.read_bytes == planned.decoder - embedding
    for tensor, matrix in matrices.items():
        block = matrix.block
        assert isinstance(block, Weight)
        assert block.format == recipe.rule(tensor, 4).format
        values = dequantize(unpack(block))
        assert values.std() == pytest.approx(SPREAD, rel=0.2)
        assert abs(values.mean()) < SPREAD / 20


@pytest.mark.parametrize("name", engine.RECIPES)
def test_each_step_gives_each_request_a_token(name: str) -> None:
    torch.manual_seed(0)
    weights = random_model(RAW, recipes.load(name), torch.float32, CPU)
    rig = EngineRig(weights, pages_for(192, 2), 4, "fp8", "float32", CPU, running=2, graph_seconds=0)
    decoded = rig.decode(192, 2, temperature=0.7, steps=2)
    assert decoded.tokens == (2, 2)
    assert decoded.mean_rate == pytest.approx(4 / sum(decoded.seconds))
    state = 4 * 3 * (4 * 64 * 64 + 3 * 512)  # float32, three layers: heads and convolution; K and V: 64 codes, a scale
    assert rig.step_bytes(192, 2) == weights.read_bytes + 2 * (192 * 2 * 2 * (64 + 2) + 2 * state)
    assert rig.prefill(192, chunk=64) > 0
    rig.close()


class Recorder:
    """A `Runner` that keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[ScheduledBatch] = []

    def run(self, batch: ScheduledBatch) -> ModelOutput:
        self.batches.append(batch)
        return ModelOutput(batch.step, {row.request_id: Sampled((9,)) for row in batch.rows})

    def close(self) -> None:
        raise AssertionError("is not the contexts' own")


def test_prompts_are_filled_and_decodes_go_to_the_model() -> None:
    torch.manual_seed(0)
    model = random_model(RAW, recipes.load("bf16"), torch.float32, CPU).model
    pages = KvPages(KvLayout.of(model.config, torch.float32, "fp8"), 6, CPU)
    states = StatePool(StateLayout.of(model.config, torch.float32), 3, CPU)
    inner = Recorder()
    contexts = FilledContexts(inner, pages, states)
    pages.tensor.zero_()
    spec = SampleSpec(SamplingParams(max_tokens=9), (), ())
    prompt = Row("prompt", range(100, 292), 64, [5, 3, 1, 4], 64, spec, state=2)
    decode = Row("decode", [7], 64, [0, 2], 64, spec, state=0)
    output = contexts.run(ScheduledBatch(1, (prompt, decode)))
    assert output.sampled == {"prompt": Sampled((291,)), "decode": Sampled((9,))}
    assert [batch.rows for batch in inner.batches] == [(decode,)]
    assert [bool(page.any()) for page in pages.tensor] == [False, True, False, True, True, False, False]
    assert len(pages.tensor[[1, 3, 4]].unique(dim=0)) == 3
    assert [bool(slot.any()) for slot in states.states[:3]] == [False, False, True]
    contexts.run(ScheduledBatch(2, (replace(prompt, sample=None),)))
    assert len(inner.batches) == 1
    with pytest.raises(ValueError, match="not whole pages"):
        contexts.run(ScheduledBatch(3, (replace(prompt, tokens=range(5)),)))
    contexts.close()


def test_a_small_run_prints_and_writes_only_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path / "docs")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("bench.engine_rig.WARM_STEPS", 1)
    trace = tmp_path / "trace.json"
    engine.main(["--tiny", "--layers=4", "--format=bf16", "--depth=64", "--batch=1", f"--trace={trace}"])
    told = capsys.readouterr().out
    for name in (
        "decode/bf16/depth64/batch1",
        "decode-greedy/bf16/depth64/batch1",
        "prefill/bf16/64",
        f"prefill/{NAME}/64",
    ):
        assert f"\n{name}: " in told
    assert not (tmp_path / "docs").exists()
    (traced,) = json.loads(trace.read_text()).values()
    assert traced["kernels"][0]["us"] >= traced["kernels"][-1]["us"]
    engine.main(["--tiny", "--layers=4", "--seconds=1e-9"])
    assert "cases left out" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--depth=100"], ["--format=fp7"], ["--batch=0"], ["--only=everything"]])
def test_options_are_checked(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        engine.main(wrong)


def test_peer_is_of_the_same_shape() -> None:
    names = [entry.name for entry in peer(RAW, torch.float32, CPU, [64], [64])]
    assert names == [f"prefill/{NAME}/64", f"decode/{NAME}/depth64/batch1"]


def test_kernels_that_overlap_count_once_as_busy() -> None:
    launches = [Launch("b", 30.0, 10.0), Launch("a", 10.0, 10.0), Launch("a", 14.0, 2.0), Launch("b", 18.0, 4.0)]
    trace = summed(launches, steps=2)
    assert [(kernel.name, kernel.launches, kernel.us) for kernel in trace.kernels] == [("b", 1, 7), ("a", 1, 6)]
    assert (trace.busy, trace.span) == (11, 15)
    with pytest.raises(ValueError, match="nothing was launched"):
        summed([], 1)


def test_entries_are_merged_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    results.write_entries("topic", [Entry("a", 1, "x"), Entry("b", 2, "x")], "old GPU")
    results.merge_entries("topic", [Entry("c", 3, "x"), Entry("a", 4, "x")], "new GPU")
    there = [(entry["name"], entry["value"], entry["gpu"]) for entry in results.read_entries("topic")]
    assert there == [("a", 4, "new GPU"), ("b", 2, "old GPU"), ("c", 3, "new GPU")]


def test_plot_has_a_panel_a_batch_and_a_line_a_format() -> None:
    entries = [
        {"name": f"decode/{format}/depth{depth}/batch{batch}", "value": 100.0, "limit": limit}
        for format, limit in (("fp8", 150.0), ("<peer>", None))
        for depth in (1024, 8192)
        for batch in (1, 4)
    ]
    root = ET.fromstring(engine_plot.svg("title", [*entries, {"name": "prefill/fp8/1", "value": 1, "limit": None}]))
    assert len(root.findall("{*}g")) == 2
    lines = root.findall(".//{*}polyline")
    assert [bool(line.get("stroke-dasharray")) for line in lines] == [False, True, False] * 2
    with pytest.raises(ValueError, match="no decode"):
        engine_plot.svg("title", [])


def test_a_picture_of_what_runs() -> None:
    launches = [Launch("stream", 100.0, 40.0), Launch("draw", 139.0, 11.0), Launch("unknown", 170.0, 30.0)]
    picture = engine_timeline.svg("three <steps>", launches)
    ET.fromstring(picture)
    assert "three &lt;steps&gt;" in picture
    assert "Nothing runs for 20.0% of the 0.10 ms" in picture  # 20 us between the draw and the last
    with pytest.raises(ValueError, match="nothing was launched"):
        engine_timeline.svg("none", [])
