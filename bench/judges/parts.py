"""What each part asks, and the numbers that come of it."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx

from bench.judges import client
from bench.judges.client import Answer, Decoding
from bench.judges.outside import OutsideJudges
from bench.judges.scales import ARGUMENT, REPROMPT, STOP_IDS, TOKENS_PER_CHAR, Restore, Scale
from bench.judges.server import ENGINE, KVSTORE, Server, wait_for
from bench.results import Entry

LEAST_REUSE = 0.99
MOST_LOSS = 0.10
"""Of the tokens that others decode while a context is restored."""
_WRITTEN_SECONDS = 120.0
_SETTLED = 1.0
"""Seconds without a new object in the kvstore: all is written through."""
_ALONE = 2.0
"""Seconds of decoding with nothing beside it."""


@dataclass(frozen=True, slots=True)
class Court:
    """One server and those who judge it, for all parts in turn."""

    scale: Scale
    server: Server
    judges: OutsideJudges
    salt: int
    """Of all texts: nothing that an earlier run left may be found."""

    def limit(self, value: float) -> float | None:
        """A limit on what takes time."""
        return value if self.scale.timed else None


Part = Callable[[Court], Iterator[Entry]]


def pressure(court: Court) -> Iterator[Entry]:
    """cache-pressure sees the time to the first token only; the rows say what was read again."""
    scale = court.scale
    options = {"kv-size": scale.kv_size, "context-tokens": scale.context}
    result = court.judges.ask("cache-pressure", options, scale.patience).result
    _check(result["hydrate"] + result["verify"])
    contexts = result["num_contexts"]
    yield _share("cache-pressure/retained", result["retained"], contexts, "contexts")
    verified = len(result["verify"])
    rows = court.server.rows(court.server.row_count() - verified, verified)
    yield Entry("cache-pressure/min-reuse", _round(min(row.cached / row.prompt_tokens for row in rows)), "", 1.0)
    for name in ("cold_ttft", "hit_ttft"):
        yield Entry(f"cache-pressure/{name.replace('_', '-')}", _round((result[name] or 0.0) * 1e3, 1), "ms")


def agents(court: Court, name: str = "agent-sim") -> Iterator[Entry]:
    scale, sizes = court.scale, court.scale.agents
    step = round(sizes.step * ARGUMENT)
    options = {
        "sessions": sizes.sessions,
        "main-tokens": step * sizes.steps,
        "step-tokens": step,
        "sub-tokens": round(sizes.sub * ARGUMENT),
        "finalize-tokens": round(sizes.finalize * ARGUMENT),
        "max-tokens": sizes.reply,
        "salt": court.salt,
        "no-viz": True,
    }
    result = court.judges.ask("agent-sim", options, scale.patience).result
    _check(result["records"])
    ended = [record for record in result["records"] if not record["aborted"]]
    finals = [record for record in ended if record["phase"] == "finalize"]
    least = min((record["reuse"] for record in finals), default=0.0) if len(finals) == sizes.sessions else 0.0
    yield Entry(f"{name}/min-finalize-reuse", _round(least), "", _round(least / LEAST_REUSE), LEAST_REUSE)
    mains = [record["reuse"] for record in ended if record["phase"] == "main" and record["step"]]
    yield Entry(f"{name}/min-main-reuse", _round(min(mains, default=0.0)), "")
    summary = result["summary"]
    ttft_ok = Entry(f"{name}/finalize-ttft-ok", summary["finalize_ttft_ok"], "sessions", limit=court.limit(len(finals)))
    yield ttft_ok
    yield Entry(f"{name}/seconds", _round(summary["elapsed"], 1), "s")
    longest = max((record["prompt"] for record in ended), default=0)
    yield Entry(f"{name}/longest-prompt", longest, "tokens")


def small_agents(court: Court) -> Iterator[Entry]:
    return agents(court, "agent-sim-200k")


def abort(court: Court) -> Iterator[Entry]:
    scale = court.scale
    options = {
        "context-tokens": scale.abort_argument,
        "thinking-tokens": scale.abort_after,
        "max-tokens": scale.abort_budget,
        "runs": 5,
        "salt": court.salt,
        "min-reuse": scale.least_reuse or 0.9,
    }
    records = court.judges.ask("abort-sim", options, scale.patience).result["records"]
    _check(records)
    least = min(record["reuse"] for record in records)
    prompt = min(record["prompt"] for record in records)
    limit = scale.least_reuse if scale.least_reuse is not None else _round(1 - REPROMPT / prompt)
    yield Entry("abort-sim/min-reuse", _round(least), "", _round(least / limit), limit)
    computed = max(record["prompt"] - record["cached"] for record in records)
    yield Entry("abort-sim/most-computed", computed, "tokens", limit=REPROMPT)


def leave(court: Court) -> Iterator[Entry]:
    """A client that leaves while its prompt is read, and comes back with it."""
    scale, server = court.scale, court.server
    content = client.text(scale.left, f"leave {court.salt}")

    def computed() -> float:
        return server.metric(ENGINE, "samovar_engine_computed_tokens_total", phase="prefill")

    def idle() -> bool:
        return server.metric(ENGINE, "samovar_engine_requests_running") == 0

    wait_for("the engine has nothing to do", idle, 30)
    before = computed()
    client.leave(server.url, content, lambda: computed() - before >= scale.left / 3, scale.patience)
    wait_for("the request is called off", idle, 30)
    read = computed() - before
    answer = client.ask(server.url, content)
    if read >= answer.prompt - scale.chunk:
        raise RuntimeError(f"the client left too late: {read:g} of {answer.prompt} tokens were read")
    twice = read + answer.computed - answer.prompt
    yield Entry("abort-prefill/read-before", read, "tokens")
    yield Entry("abort-prefill/read-twice", twice, "tokens", _round(twice / scale.chunk), scale.chunk)


def needles(court: Court) -> Iterator[Entry]:
    return _needles(court, "cold")


def needles_again(court: Court) -> Iterator[Entry]:
    """The same texts, which come out of the host tier by now, if anything of them was kept: what was moved is right."""
    return _needles(court, "again")


def _needles(court: Court, when: str) -> Iterator[Entry]:
    scale = court.scale
    found = []
    for salt in range(scale.needle_salts):
        options = {
            "lengths": ",".join(map(str, scale.needles)),
            "max-tokens": 48,
            "tokens-per-char": TOKENS_PER_CHAR,
            "salt": court.salt + salt,
        }
        results = court.judges.ask("needle-test", options, scale.patience).result["results"]
        _check(results)
        found += [needle["ok"] for needle in results]
    yield _share(f"needle-test/{when}", sum(found), scale.needle_salts * len(scale.needles), "needles")


def perf(court: Court) -> Iterator[Entry]:
    scale = court.scale
    options = {
        "runs": 1,
        "max-context": scale.perf_context,
        "step-tokens": round(scale.perf_step * ARGUMENT),
        "output-tokens": scale.perf_output,
        "salt": court.salt,
    }
    summary: dict[str, Any] = court.judges.ask("perf-sim", options, scale.patience).result["summary"]
    yield _share("perf-sim/completed", summary["completed"], summary["steps"], "steps")
    for context, prefill, decode in zip(summary["context"], summary["pp"], summary["tg"], strict=True):
        yield Entry(f"perf-sim/prefill/{context:.0f}", _round(prefill or 0.0, 1), "tokens/s")
        yield Entry(f"perf-sim/decode/{context:.0f}", _round(decode or 0.0, 1), "tokens/s")


def restart(court: Court) -> Iterator[Entry]:
    """The engine is killed with contexts in the host tier. Then nothing is on the device, so that what is asked next
    shows what a restore takes, with others that decode beside it."""
    scale, server = court.scale, court.server
    contexts = [_context(court, "restart", scale.restarted_tokens, index) for index in range(scale.restarted)]
    later = [
        [_context(court, f"restore {restore.name}", restore.tokens, index) for index in range(restore.contexts)]
        for restore in scale.restores
    ]
    for content in (*contexts, *(content for group in later for content in group)):
        client.ask(server.url, content)
    _wait_written(server)
    begin = time.monotonic()
    server.kill(ENGINE)
    answers = wait_for("an answer of the new engine", lambda: _answers(server, contexts[0]), scale.start)
    yield Entry("restart/first-token", _round(time.monotonic() - begin, 2), "s")
    answers += [client.ask(server.url, content) for content in contexts[1:]]
    hits = sum(answer.cached >= LEAST_REUSE * answer.prompt for answer in answers)
    yield _share("restart/contexts-hit", hits, scale.restarted, "contexts")
    yield Entry("restart/context", answers[0].prompt, "tokens")
    yield Entry("restart/ttft", _round(median(answer.first for answer in answers[1:]) * 1e3, 1), "ms")
    # The random model never ends an answer by itself, and a bias costs time in each of its steps.
    with Decoding(server.url, 4, STOP_IDS if scale.model == "small" else ()) as decoding:
        time.sleep(_ALONE)
        alone = _rate(decoding, time.monotonic() - _ALONE, time.monotonic())
        for restore, group in zip(scale.restores, later, strict=True):
            yield from _restored(court, restore, group, decoding, alone)


def _restored(court: Court, restore: Restore, contents: list[str], decoding: Decoding, alone: float) -> Iterator[Entry]:
    """`alone`: tokens a second that the others decode with nothing beside them."""
    begin = time.monotonic()
    answers = [client.ask(court.server.url, content) for content in contents]
    beside = _rate(decoding, begin, time.monotonic())
    hits = sum(answer.cached >= LEAST_REUSE * answer.prompt for answer in answers)
    name = f"restore/{restore.name}"
    yield _share(f"{name}/hits", hits, len(answers), "contexts")
    waited = median(answer.waited for answer in answers) * 1e3
    ratio = None if restore.limit is None else _round(waited / restore.limit)
    yield Entry(f"{name}/ms", _round(waited, 2), "ms", ratio, restore.limit)
    yield Entry(f"{name}/slowest", _round(max(answer.waited for answer in answers) * 1e3, 2), "ms")
    yield Entry(f"{name}/ttft", _round(median(answer.first for answer in answers) * 1e3, 1), "ms")
    if court.scale.timed:
        yield Entry(f"{name}/decode-loss", _round(1 - beside / alone), "", limit=MOST_LOSS)


def _rate(decoding: Decoding, begin: float, end: float) -> float:
    """Pieces of text a second."""
    return sum(begin <= moment < end for moment in decoding.arrivals) / (end - begin)


def _context(court: Court, name: str, tokens: int, index: int) -> str:
    return client.text(tokens, f"{name} {court.salt} {index}")


def _answers(server: Server, content: str) -> list[Answer]:
    """One; none while no engine is there."""
    with suppress(httpx.HTTPError, RuntimeError):
        return [client.ask(server.url, content)]
    return []


def _wait_written(server: Server) -> None:
    """Until the kvstore gets nothing new any more."""
    seen = [(time.monotonic(), -1.0)]

    def settled() -> bool:
        objects = server.metric(KVSTORE, "samovar_kvstore_objects")
        if objects != seen[0][1] or server.metric(KVSTORE, "samovar_kvstore_reserved"):
            seen[0] = (time.monotonic(), objects)
        return time.monotonic() - seen[0][0] > _SETTLED

    wait_for("all is written through", settled, _WRITTEN_SECONDS)


def _check(records: list[dict[str, Any]]) -> None:
    """Raises RuntimeError when a request of a judge failed."""
    errors = [record["error"] for record in records if record["error"]]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(records)} requests failed: {errors[0]}")


def _share(name: str, count: int, all: int, unit: str) -> Entry:
    return Entry(name, count, unit, _round(count / all), all)


def _round(value: float, digits: int = 4) -> float:
    return round(value, digits)


PARTS: dict[str, Part] = {
    "needle": needles,
    "pressure": pressure,
    "agent": agents,
    "abort": abort,
    "leave": leave,
    "needle-again": needles_again,
    "perf": perf,
    "restart": restart,
    "agent-200k": small_agents,
}
"""In the order in which they are held, all on one server but the last."""
ON_SMALL_POOL = ("agent-200k",)
