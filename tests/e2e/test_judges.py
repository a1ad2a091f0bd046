"""The outside judges of the cache against the real stack, scaled: 65 contexts of 512 tokens where the device has room
for a quarter, agents whose contexts do not fit together, one server for all of it that is never cleaned."""

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.judges import JUDGE_PYTHON, missed
from bench.judges.outside import MODEL, OutsideJudges, has_cache_pressure
from bench.judges.parts import PARTS, Court
from bench.judges.scales import CPU, SMALL_MODEL, Pool
from bench.judges.server import ENGINE, KVSTORE, Server, serving, wait_for
from bench.results import Entry

pytestmark = [
    pytest.mark.skipif(
        not has_cache_pressure(JUDGE_PYTHON), reason="no .venv-judge with cache-pressure (Python 3.12; `make test`)"
    ),
    pytest.mark.timeout(120),
]

SCALE = replace(CPU, agents=replace(CPU.agents, step=180, steps=15), needle_salts=1)
"""Half the turns of the bench."""


@contextlib.contextmanager
def court(home: Path, pool: Pool) -> Generator[Court]:
    words = ("--model", str(SMALL_MODEL), "--model-name", MODEL, "--device", "cpu")
    settings = {**SCALE.settings, "SAMOVAR_KV_PAGES": str(pool.pages), "SAMOVAR_STATES": str(pool.states)}
    with serving(home / "stack", words, settings, SCALE.start) as server:
        yield Court(SCALE, server, OutsideJudges(JUDGE_PYTHON, server.url, home), salt=11)


@pytest.fixture(scope="module")
def dirty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Court]:
    with court(tmp_path_factory.mktemp("judged"), SCALE.pool) as held:
        yield held


def judged(part: str, court: Court) -> dict[str, Entry]:
    entries = {entry.name: entry for entry in PARTS[part](court)}
    print("\n".join(map(str, entries.values())))
    assert not [entry for entry in entries.values() if missed(entry)]
    wait_for("nothing is left of it", lambda: nothing_held(court.server), 20)
    return entries


def nothing_held(server: Server) -> bool:
    if server.metric(ENGINE, "samovar_engine_requests_running") or server.metric(
        ENGINE, "samovar_engine_requests_waiting"
    ):
        return False
    pages = server.metric(ENGINE, "samovar_engine_pages_total") - server.metric(ENGINE, "samovar_engine_pages_free")
    states = server.metric(ENGINE, "samovar_engine_states", owner="request")
    leases = server.metric(KVSTORE, "samovar_kvstore_leased") + server.metric(KVSTORE, "samovar_kvstore_reserved")
    return pages == states == leases == 0


def test_every_context_is_retained(dirty: Court) -> None:
    entries = judged("pressure", dirty)
    assert entries["cache-pressure/retained"].value == 65
    # The tool goes by time; this is by what was computed: nothing was read again but the last token.
    assert entries["cache-pressure/min-reuse"].value > 0.99


def test_agents_find_their_contexts_behind_their_sub_agents(dirty: Court) -> None:
    assert judged("agent", dirty)["agent-sim/min-finalize-reuse"].limit == 0.99


def test_a_stopped_thought_is_gone_on_from(dirty: Court) -> None:
    assert judged("abort", dirty)["abort-sim/min-reuse"].limit is not None


def test_a_prompt_left_half_read_is_not_read_twice(dirty: Court) -> None:
    entries = judged("leave", dirty)
    assert entries["abort-prefill/read-before"].value > SCALE.chunk


def test_needles_are_found_where_all_was_moved(dirty: Court) -> None:
    for part in ("needle", "needle-again"):
        judged(part, dirty)


def test_a_killed_engine_finds_all_contexts(dirty: Court) -> None:
    entries = judged("restart", dirty)
    assert entries["restart/contexts-hit"].value == 10
    for restore in SCALE.restores:
        assert entries[f"restore/{restore.name}/hits"].value == restore.contexts


def test_agents_of_which_the_device_holds_one(tmp_path: Path) -> None:
    with court(tmp_path, SCALE.small_pool) as held:
        judged("agent-200k", held)
