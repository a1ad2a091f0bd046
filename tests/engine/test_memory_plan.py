"""How memory is shared out: the 27B's shape on cards of several sizes, what helps where it does not fit, and the pools
of a real engine."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.shape_source import ShapeSource, model_27b
from services import settings as environment
from services.engine.assembly import CannotLoad, assemble
from services.engine.config import EngineConfig
from services.engine.memory_advice import DoesNotFit, plan
from services.engine.memory_plan import (
    DRAFT,
    DRAFT_PAGES,
    LEAST_CONTEXT,
    MOST_SESSIONS,
    PAGES,
    STATES,
    WEIGHTS,
    WORKSPACE,
    MemoryPlan,
    Sizes,
    Wish,
    blocks,
    find_plan,
)
from services.engine.runner import ModelRunner
from services.engine.sizing import CUDA_BYTES, alternatives, cap, engine_plan, sizes, total_bytes, wish
from services.engine.weights import recipes
from services.engine.weights.loader import open_checkpoint
from services.engine.workspace import Stage, Step, Workspace
from services.settings import SettingsError
from tests.engine.tiny_prompts import MODEL

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ELEMENTS_27B = 48 * 48 * 128 * 128
"""Of a state: layers x heads x 128 x 128."""


@pytest.fixture(scope="module")
def large() -> ShapeSource:
    return model_27b()


def config(**given: object) -> EngineConfig:
    return environment.load(EngineConfig, {}, **{name: str(value) for name, value in given.items()})


def state(dtype: str) -> int:
    """Bytes of a slot of the 27B: the state, 48 x 3 x 10240 columns and a hidden vector in bfloat16."""
    return ELEMENTS_27B * (4 if dtype == "float32" else 2) + 48 * 3 * 10_240 * 2 + 5120 * 2


def planned(source: ShapeSource, given: EngineConfig, sessions: int = 1, drafts: int = 0) -> MemoryPlan:
    """As `samovar plan` does on a machine without a GPU."""
    recipe = recipes.load(given.recipe) if given.recipe else None
    wanted = replace(wish(source, given, CUDA, int(given.vram)), sessions=sessions, drafts=drafts)
    measured = sizes(source, given, CUDA, drafts > 0, recipe)
    return plan(measured, wanted, lambda: alternatives(source, given, CUDA, drafts > 0, recipe))


@pytest.mark.parametrize(
    ("vram", "recipe", "kv_format", "state_dtype", "context", "token"),
    [
        (16, "gsq3", "rk4v4-e8", "float32", 102_400, 17_408),
        (24, "int4", "fp8", "float32", 102_400, 33_024),
        (32, "nvfp4-mixed", "rk4v4", "float32", 262_144, 17_408),
        (80, "fp8", "bf16", "float32", 262_144, 65_536),
    ],
)
def test_cards(
    large: ShapeSource, vram: int, recipe: str, kv_format: str, state_dtype: str, context: int, token: int
) -> None:
    given = config(
        vram=f"{vram}GiB", recipe=recipe, kv_format=kv_format, state_dtype=state_dtype, max_model_len=context
    )
    found = planned(large, given)
    assert found.context == context <= found.largest_context
    assert found.pages * 64 >= context
    assert found.bytes(PAGES) == (found.pages + 1) * 64 * token
    assert found.bytes(STATES) == found.states * state(state_dtype)
    assert found.states >= 2
    # No page more would fit.
    assert found.total == vram * GIB >= found.used > found.total - 64 * token


def test_weights(large: ShapeSource) -> None:
    """26.1 thousand million parameters in the body, embedding and head, and the head for drafts beside them."""
    plain = planned(large, config(vram="80GiB"))
    assert plain.bytes(WEIGHTS) == pytest.approx(2 * 26.9e9, rel=1e-3)
    packed = planned(large, config(vram="80GiB", recipe="gsq3"))
    # 3 bits and a bfloat16 scale for 128; 4 and one for 64 in embedding and head.
    ends = 2 * 248_320 * 5120
    assert packed.bytes(WEIGHTS) == pytest.approx(ends * 4.25 / 8 + (26.9e9 - ends) * 3.125 / 8, rel=5e-3)
    assert packed.bytes(DRAFT) == pytest.approx(plain.bytes(DRAFT) / 2, rel=1e-2)


def test_drafts(large: ShapeSource) -> None:
    """The head has a layer of its own K and V beside the 16 of the body; a model without the head cannot draft."""
    given = config(vram="80GiB", recipe="fp8", max_model_len=100_000)
    without, found = planned(large, given, sessions=4), planned(large, given, sessions=4, drafts=3)
    assert found.bytes(DRAFT_PAGES) * 16 == found.bytes(PAGES)
    assert without.bytes(DRAFT_PAGES) == 0
    assert found.bytes(WORKSPACE) >= without.bytes(WORKSPACE)
    assert found.pages < without.pages
    with pytest.raises(Exception, match="no head for multi-token prediction"):
        planned(model_27b(mtp=False), given, drafts=3)


def test_more_context_never_takes_less(large: ShapeSource) -> None:
    given = config(vram="1MiB", recipe="fp8", kv_format="fp8", max_model_len=1)
    measured = sizes(large, given, CUDA, recipe=recipes.load("fp8"))
    needed = []
    for context in (1, 64, 65, 1000, 8192, 100_000, 262_144):
        with pytest.raises(DoesNotFit) as caught:
            plan(measured, replace(wish(large, given, CUDA, 2**20), context=context))
        needed.append(caught.value.needed)
    assert needed == sorted(needed)
    assert needed[0] == needed[1] < needed[2]
    cards = [config(vram=f"{gib}GiB", recipe="gsq3", max_batch_tokens=512) for gib in range(13, 24)]
    largest = [planned(large, card).largest_context for card in cards]
    assert largest == sorted(largest)
    assert largest[0] < largest[-1]


def test_the_chunk_makes_room(large: ShapeSource) -> None:
    """Small cards read in smaller chunks, so that the context fits beside their work."""
    card = config(vram="1GiB", recipe="gsq3", kv_format="rk4v4", max_model_len=65_536)
    measured, wanted = sizes(large, card, CUDA, recipe=recipes.load("gsq3")), wish(large, card, CUDA, GIB)
    found = [find_plan(measured, replace(wanted, total=mib * 2**20)) for mib in range(12_000, 36_000, 25)]
    fitting = [one for one in found if one is not None]
    chunks = [one.chunk for one in fitting]
    assert found[-len(fitting) :] == fitting
    assert chunks == sorted(chunks)
    assert {512, 8192} < set(chunks)


@pytest.mark.parametrize(
    ("given", "sessions"),
    [
        ({"vram": "16GiB", "recipe": "gsq3", "max_model_len": 102_400}, 1),
        ({"vram": "16GiB", "recipe": "gsq3", "kv_format": "rk4v4", "max_model_len": 102_400}, 3),
        ({"vram": "16GiB", "recipe": "nvfp4-mixed", "kv_format": "rk4v4", "max_model_len": 65_536}, 1),
        ({"vram": "32GiB", "recipe": "nvfp4-mixed", "max_model_len": 262_144}, 1),
        ({"vram": "24GiB", "recipe": "int4", "states": 100}, 1),
        ({"vram": "24GiB", "recipe": "int4", "kv_pages": 5000}, 1),
        ({"vram": "16GiB", "recipe": "gsq3", "kv_format": "rk4v4", "states": 40}, 1),
    ],
)
def test_what_to_change(large: ShapeSource, given: dict[str, object], sessions: int) -> None:
    """Every change that is said to suffice does, and no other."""
    with pytest.raises(DoesNotFit) as caught:
        planned(large, config(**given), sessions)
    error = caught.value
    assert any(change.fits for change in error.changes)
    for change in error.changes:
        assert change.saves > 0
        setting, _, value = change.what.partition(":")[0].partition("=")
        if setting.startswith("SAMOVAR_"):
            other = (config(**{**given, setting.removeprefix("SAMOVAR_").lower(): value}), sessions)
        else:
            other = (config(**given), int(change.what.split()[0]))
        if change.fits:
            assert change.what in str(error)
            assert planned(large, *other).used <= error.total
        else:
            with pytest.raises(DoesNotFit):
                planned(large, *other)


def test_nothing_is_enough(large: ShapeSource) -> None:
    with pytest.raises(
        DoesNotFit, match=r"None of these is enough alone: .*SAMOVAR_RECIPE=gsq3: weights of 10\.\d\d GiB"
    ):
        planned(large, config(vram="4GiB", recipe="fp8"))


def runner(given: EngineConfig) -> tuple[ModelRunner, MemoryPlan, int, int]:
    """Of a real engine, with the plan made for it, its longest request and its largest step."""
    parts = assemble(given, lambda share, what: None)
    core = parts.core(lambda result: None)
    made = core._runner
    assert isinstance(made, ModelRunner)
    source, _ = open_checkpoint(given, lambda share, what: None)
    return made, engine_plan(source, given, CPU), parts.card.max_model_len, core._scheduler._config.max_batch_tokens


def test_states_of_half_the_size(large: ShapeSource) -> None:
    """As many slots take less, or there are more of them."""
    given = {"vram": "32GiB", "recipe": "nvfp4-mixed", "states": 10, "max_model_len": 8192, "max_batch_tokens": 512}
    wide, half = (planned(large, config(**given, state_dtype=dtype)) for dtype in ("float32", "float16"))
    saved = 10 * ELEMENTS_27B * 2
    assert wide.states == half.states == 10
    assert wide.bytes(STATES) - half.bytes(STATES) == saved
    assert wide.bytes(WORKSPACE) == half.bytes(WORKSPACE)
    assert half.pages - wide.pages == pytest.approx(saved / (64 * 65_536), abs=1)
    auto = [planned(large, config(vram="80GiB", recipe="fp8", state_dtype=dtype)) for dtype in ("float32", "bfloat16")]
    assert auto[1].states > 1.9 * auto[0].states > 100


def test_a_small_card_is_told_of_smaller_states(large: ShapeSource) -> None:
    given = {"vram": "16GiB", "recipe": "gsq3", "kv_format": "rk4v4", "states": 40}
    with pytest.raises(DoesNotFit) as caught:
        planned(large, config(**given))
    (change,) = (change for change in caught.value.changes if change.what.startswith("SAMOVAR_STATE_DTYPE"))
    assert change.what == "SAMOVAR_STATE_DTYPE=float16: states of 75 MiB and not 147 MiB"
    assert change.saves == 40 * ELEMENTS_27B * 2
    with pytest.raises(DoesNotFit) as caught:
        planned(large, config(**given, state_dtype="bfloat16", max_model_len=262_144))
    assert not any("STATE_DTYPE" in change.what for change in caught.value.changes)


@pytest.mark.parametrize(("kv_format", "state_dtype"), [("auto", "float16"), ("rk4v4-e8", "float32")])
@pytest.mark.parametrize("vram", ["0", "200MiB"])
def test_pools_of_a_real_engine(vram: str, kv_format: str, state_dtype: str) -> None:
    """Byte for byte, with and without a total; on a CPU without one they are what they always were."""
    made, expected, longest, chunk = runner(
        config(
            model=MODEL,
            device="cpu",
            dtype="float32",
            vram=vram,
            kv_format=kv_format,
            state_dtype=state_dtype,
            kv_pages=0 if int(vram[0]) else 99,
        )
    )
    assert made._states is not None
    assert made._states.states.dtype == getattr(torch, state_dtype)
    assert made._pages.tensor.nbytes == expected.bytes(PAGES)
    assert made._states.tensor.nbytes == expected.bytes(STATES)
    assert (longest, chunk) == (expected.context, expected.chunk)
    if vram == "0":
        assert (expected.pages, expected.states, longest, chunk) == (99, 64 + 256, 99 * 64, 512)
        assert expected.used == expected.total
    else:
        assert expected.used <= expected.total == 200 * 2**20
        assert LEAST_CONTEXT <= longest <= expected.pages * 64


def test_a_host_without_a_limit() -> None:
    source, _ = open_checkpoint(config(model=MODEL, device="cpu"), lambda share, what: None)
    found = engine_plan(source, config(model=MODEL, device="cpu"), CPU)
    page = 2 * 2 * 64 * 2 * 64 * 4
    assert (found.pages, found.context) == (GIB // page - 1, 262_144)
    assert total_bytes(config(device="cpu"), CPU) is None


def test_the_engine_refuses_what_does_not_fit() -> None:
    """Before it loads anything."""
    with pytest.raises(
        DoesNotFit, match=r"for one session of 200,000 tokens, 200 MiB are there.*SAMOVAR_MAX_MODEL_LEN="
    ):
        assemble(config(model=MODEL, device="cpu", vram="200MiB", max_model_len=200_000), lambda share, what: None)
    with pytest.raises(CannotLoad, match="SAMOVAR_MAX_MODEL_LEN=300000: the model was made for 262144"):
        assemble(config(model=MODEL, device="cpu", max_model_len=300_000), lambda share, what: None)
    with pytest.raises(SettingsError, match="SAMOVAR_KV_MEMORY: 1000 bytes hold no page"):
        assemble(config(model=MODEL, device="cpu", vram="200MiB", kv_memory=1000), lambda share, what: None)


def test_a_gpu_has_its_context_too(large: ShapeSource) -> None:
    assert planned(large, config(vram="80GiB")).bytes("CUDA context") == CUDA_BYTES


WORK = st.builds(
    Workspace,
    stages=st.tuples(
        st.builds(
            Stage,
            st.just("all"),
            st.integers(1, 10**5),
            st.integers(0, 10**8),
            st.integers(0, 10**7),
            st.integers(0, 10**4),
        )
    ),
    stream=st.integers(1, 10**5),
    vocab_size=st.integers(1, 300_000),
    logit=st.integers(1, 16),
    fixed=st.integers(0, 10**8),
)
SIZES = st.builds(
    Sizes,
    weights=st.integers(1, 30 * GIB),
    draft=st.integers(0, GIB),
    page=st.integers(64, 2**23),
    draft_page=st.integers(0, 2**19),
    state=st.one_of(st.just(0), st.integers(1, 2**28)),
    context=st.integers(1, 300_000),
    workspace=WORK,
    kv_format=st.just("bf16"),
    state_dtype=st.just("float32"),
)


@st.composite
def wishes(draw: st.DrawFn, most: int) -> Wish:
    return Wish(
        total=draw(st.integers(1, 100 * GIB)),
        context=draw(st.integers(1, most)),
        sessions=draw(st.integers(1, 20)),
        must=draw(st.booleans()),
        chunks=draw(st.sampled_from([(8192, 4096, 2048, 1024, 512), (512,), (100,)])),
        running=draw(st.integers(1, 100)),
        drafts=draw(st.integers(0, 5)),
        pages=draw(st.one_of(st.just(0), st.integers(1, 10**5))),
        states=draw(st.one_of(st.just(0), st.integers(1, 500))),
        device=draw(st.sampled_from([0, 2**29])),
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_fits_fits(data: st.DataObject) -> None:
    """A plan never sums up to more than there is, holds what was asked for, and says no more than a new plan would."""
    model = data.draw(SIZES)
    wanted = data.draw(wishes(model.context))
    found = find_plan(model, wanted)
    if found is None:
        with pytest.raises(DoesNotFit) as caught:
            plan(model, wanted)
        short = wanted.must and 0 < wanted.pages < wanted.sessions * blocks(wanted.context)
        assert short or caught.value.needed > caught.value.total
        return
    assert wanted.total is not None
    assert found.used <= found.total == wanted.total
    step = Step(found.chunk, min(wanted.running, found.states or wanted.running), 0, 0)
    assert found.bytes(WORKSPACE) >= model.workspace.bytes(step)
    assert found.bytes(PAGES) == (found.pages + 1) * model.page
    assert found.bytes(STATES) == found.states * model.state
    assert found.pages == wanted.pages or not wanted.pages
    assert found.states == (wanted.states or found.states if model.state else 0)
    assert found.context <= wanted.context
    if wanted.must:
        assert found.context == wanted.context
        assert found.chunk in wanted.chunks
        alone = replace(wanted, chunks=(found.chunk,))
        assert plan(model, replace(alone, sessions=1, context=found.largest_context)).used <= wanted.total
        if not wanted.states and found.most_sessions < MOST_SESSIONS:
            assert plan(model, replace(alone, sessions=max(1, found.most_sessions))).used <= wanted.total
            with pytest.raises(DoesNotFit):
                plan(model, replace(alone, sessions=found.most_sessions + 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_more_is_allocated_than_the_cap() -> None:
    """The device as a setting names it, without a number."""
    try:
        cap(config(vram="2GiB"), CUDA)
        torch.empty(2**30, dtype=torch.uint8, device=CUDA)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * 2**30, dtype=torch.uint8, device=CUDA)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())
        torch.cuda.empty_cache()
