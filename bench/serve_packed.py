"""A checkpoint of the 27B's shape with random weights, from its files to answers over HTTP: packed by each recipe,
served by the whole stack, asked by chats, and compared with the same packed folder decoded to dense weights.

    serve-packed/<recipe>/disk               bytes of the packed folder
    serve-packed/<recipe>/pack, .../ready    seconds of `samovar pack`, and from `samovar up` to the first health check
    serve-packed/<recipe>/device-memory      what nvidia-smi says while the stack runs, without what was there before
    serve-packed/<recipe>/ttft, .../decode   of a prompt of about 2,000 tokens that nobody has seen, and behind a short
                                             one
    serve-packed/<recipe>/decode-2           the rates of two answers at once, summed
    serve-packed/<recipe>/same-again         share of the chats that were answered in the same words again, with nothing
                                             cached either time
    serve-packed/<recipe>/reference-first    share of the served tokens that are the reference's first choice too, where
                                             it reads the same prompt and the served tokens before
    serve-packed/<recipe>/reference-gap      nats between its first choice and the served token, in the mean

Finished stages are found in the folder again: a second call goes on where one was cut. `python -m bench serve-packed
--help` says how to choose.
"""

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Literal

import httpx
import torch

from bench import engine, random_checkpoint, results
from bench.device_memory import used_bytes
from bench.judges.checkpoint import word_ids
from bench.judges.server import Server, StackEnded
from bench.results import Entry
from bench.scoring import log_probabilities
from bench.served_answers import Answer, Asking, agreeing, words
from services.engine.config import EngineConfig
from services.engine.weights import recipes
from services.engine.weights.artifact.manifest import FILE
from services.engine.weights.loader import load_model

TINY: dict[str, Any] = {**random_checkpoint.TEXT, **engine.TINY, "vocab_size": 8192}
SHAPES = {"27b": random_checkpoint.TEXT, "tiny": TINY}
_ANSWER, _LONG_ANSWER = 48, 256
"""Tokens."""
_PROMPT_WORDS = 900
"""Of 2.3 tokens each to the tokenizer."""
_REFERENCE_PROMPTS, _REFERENCE_PROMPT, _REFERENCE_ANSWER = 8, 96, 12
"""And tokens of each prompt and of each answer."""
_LEAST_FIRST, _MOST_GAP = 0.5, 0.5
"""Where the head's rows are random, another model would agree in one word of a thousand, and be 5 nats off."""


@dataclass(frozen=True, slots=True)
class Options:
    folder: Path
    shape: Literal["27b", "tiny"]
    layers: int
    recipes: tuple[str, ...]
    device: torch.device
    vram: str
    context: int
    ready_seconds: float
    graph_seconds: float
    copy: Path | None


@dataclass
class Stages:
    """Prints what each takes."""

    failures: list[str] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """What goes wrong inside is printed and kept, and the next stage begins."""
        print(f"-- {name}", flush=True)
        begin = time.monotonic()
        try:
            yield
        except (RuntimeError, OSError, ValueError, httpx.HTTPError, subprocess.SubprocessError) as error:
            self.fail(f"{name}: {type(error).__name__}: {error}")
        print(f"   {name}: {time.monotonic() - begin:.1f} s", flush=True)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.fail(what)

    def fail(self, what: str) -> None:
        print(f"   FAILED {what}", flush=True)
        self.failures.append(what)


class ServePacked:
    def __init__(self, options: Options, report: Callable[[Entry], None]) -> None:
        self._options, self._report = options, report
        self._stages = Stages()

    def run(self) -> list[str]:
        """What failed."""
        stages, source = self._stages, self._options.folder / "source"
        with stages.stage("checkpoint"):
            self._write(source)
        if not source.exists():
            return stages.failures
        for recipe in self._options.recipes:
            packed = self._options.folder / recipe
            with stages.stage(f"{recipe}: pack"):
                self._pack(recipe, source, packed)
            if not (packed / FILE).exists():
                continue
            served: list[tuple[list[int], list[int]]] = []
            with stages.stage(f"{recipe}: serve"):
                served = self._serve(recipe, packed)
            if served:
                with stages.stage(f"{recipe}: reference"):
                    self._compare(recipe, packed, served)
        return stages.failures

    def _add(self, recipe: str, what: str, value: float, unit: str, ratio: float | None = None) -> None:
        self._report(Entry(f"serve-packed/{recipe}/{what}", value, unit, ratio))

    def _write(self, source: Path) -> None:
        if source.exists():
            print("   is there", flush=True)
            return
        options, part = self._options, source.with_suffix(".part")
        if part.exists():
            for file in part.iterdir():
                file.unlink()
            part.rmdir()
        said = word_ids()
        written = random_checkpoint.write(part, options.layers, options.device, 0, SHAPES[options.shape], said)
        part.rename(source)
        _let_go(options.device)
        print(f"   {written / 1e9:.2f} GB", flush=True)

    def _pack(self, recipe: str, source: Path, packed: Path) -> None:
        if (packed / FILE).exists():
            print("   is there", flush=True)
        else:
            begin = time.monotonic()
            command = [sys.executable, "-m", "services.cli", "pack", str(source), "--recipe", recipe, "-o", str(packed)]
            done = subprocess.run([*command, "--device", self._options.device.type], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
            print(done.stdout.rstrip(), flush=True)
            self._add(recipe, "pack", round(time.monotonic() - begin, 1), "s")
        self._add(recipe, "disk", sum(file.stat().st_size for file in packed.iterdir() if file.is_file()), "bytes")

    def _serve(self, recipe: str, packed: Path) -> list[tuple[list[int], list[int]]]:
        """Prompts and answers for the comparison."""
        options = self._options
        before = used_bytes() if options.device.type == "cuda" else None
        flags = ["--model", str(packed), "--device", options.device.type, "--kv-size", "1GiB"]
        flags += ["--max-model-len", str(options.context)]
        if options.device.type == "cuda":
            flags += ["--vram", options.vram]
        settings = {
            "SAMOVAR_START_TIMEOUT": f"{options.ready_seconds:.0f}",
            "SAMOVAR_GRAPH_SECONDS": f"{options.graph_seconds:.0f}",
            "SAMOVAR_MAX_RUNNING": "4",
            "HF_HUB_OFFLINE": "1",
        }
        folder = next(place for n in count() if not (place := options.folder / f"{recipe}-stack-{n}").exists())
        server = Server(folder, flags, settings)
        try:
            ready = server.wait_ready(options.ready_seconds)
            self._add(recipe, "ready", round(ready, 1), "s")
            asking = Asking(server.url, _ANSWER)
            self._chats(recipe, asking)
            self._rates(recipe, asking)
            served = self._answers(asking)
            if before is not None and (now := used_bytes()) is not None:
                self._add(recipe, "device-memory", now - before, "bytes")
            return served
        except StackEnded:
            raise  # has the log's end already
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}\n{server.log_end()}") from error
        finally:
            server.stop()

    def _chats(self, recipe: str, asking: Asking) -> None:
        """Each twice with nothing cached, whole and streamed; once more from the cache; two at once."""
        check = self._stages.check
        short, other, long = _text(30, 1), _text(40, 2), _text(_PROMPT_WORDS, 3)
        answers: dict[str, Answer] = {}
        same = 0
        for name, content in (("short", short), ("other", other), ("long", long)):
            whole = asking.chat(content, f"{name}-whole")
            streamed = asking.chat(content, f"{name}-streamed", stream=True)
            again = asking.chat(content, f"{name}-streamed", stream=True)
            for answer in (whole, streamed, again):
                print(f"   {recipe} {name}: {answer.told()}", flush=True)
                check(_is_whole(answer), f"{recipe} {name}: {answer.finish} {answer.usage}")
            check(whole.cached == streamed.cached == 0, f"{recipe} {name}: something was cached under a new salt")
            check(again.prompt - again.cached < 256, f"{recipe} {name}: {again.cached} of {again.prompt} cached")
            same += whole.text == streamed.text
            if whole.text != streamed.text:
                where = f"{agreeing(whole.text, streamed.text)} of {_ANSWER} words"
                check(False, f"{recipe} {name}: not the same again, nothing cached: {where}")
            print(f"   {recipe} {name}, cached: {agreeing(streamed.text, again.text)} words the same", flush=True)
            answers[name] = streamed
        self._add(recipe, "same-again", round(same / 3, 3), "")
        pair = asking.together((short, other), "pair")
        for answer in pair:
            check(_is_whole(answer), f"{recipe} pair: {answer.finish} {answer.usage}")
        found = agreeing(pair[0].text, answers["short"].text)
        print(f"   {recipe}, beside another one: {found} of {_ANSWER} words the same as alone", flush=True)

    def _rates(self, recipe: str, asking: Asking) -> None:
        firsts = [asking.chat(_text(_PROMPT_WORDS, 10 + n), f"first {n}", stream=True, limit=2) for n in range(3)]
        tokens, seconds = median(a.prompt for a in firsts), median(a.arrivals[0] for a in firsts)
        self._add(recipe, "ttft", round(seconds * 1e3, 1), "ms")
        print(f"   {recipe}: the first text of {tokens} tokens after {seconds * 1e3:.0f} ms", flush=True)
        asking.chat(_text(30, 20), "warm", stream=True, limit=_LONG_ANSWER)
        one = asking.chat(_text(30, 21), "one", stream=True, limit=_LONG_ANSWER)
        self._add(recipe, "decode", round(one.rate, 1), "tokens/s")
        two = asking.together((_text(30, 22), _text(30, 23)), "two", limit=_LONG_ANSWER)
        self._add(recipe, "decode-2", round(sum(answer.rate for answer in two), 1), "tokens/s")

    def _answers(self, asking: Asking) -> list[tuple[list[int], list[int]]]:
        """Raises ValueError for an answer that is not of the words that the head has."""
        vocabulary = json.loads((self._options.folder / "source" / "tokenizer.json").read_text())["model"]["vocab"]
        draw, ids = random.Random(0), word_ids()
        served = []
        for _ in range(_REFERENCE_PROMPTS):
            prompt = draw.choices(ids, k=_REFERENCE_PROMPT)
            answer = asking.complete(prompt, _REFERENCE_ANSWER)
            served.append((prompt, [vocabulary["\u0120" + word[1:]] for word in words(answer.text)]))
        return served

    def _compare(self, recipe: str, packed: Path, served: Sequence[tuple[list[int], list[int]]]) -> None:
        device = self._options.device
        config = EngineConfig(model=str(packed), device="cuda" if device.type == "cuda" else "cpu", weights="dense")
        with torch.inference_mode():
            model = load_model(config, lambda share, what: None).model
        first, gaps = 0, []
        for prompt, answer in served:
            behind = log_probabilities(model, [*prompt, *answer], len(prompt) - 1)[: len(answer)]
            chosen = behind.gather(1, torch.tensor(answer)[:, None])[:, 0]
            gaps += (behind.amax(-1) - chosen).tolist()
            first += int((behind.argmax(-1) == torch.tensor(answer)).sum())
        del model
        _let_go(device)
        share, gap = first / len(gaps), sum(gaps) / len(gaps)
        self._add(recipe, "reference-first", round(share, 3), "")
        self._add(recipe, "reference-gap", round(gap, 4), "nats")
        check = self._stages.check
        check(len(gaps) == _REFERENCE_PROMPTS * _REFERENCE_ANSWER, f"{recipe}: {len(gaps)} tokens were served")
        check(share >= _LEAST_FIRST, f"{recipe}: only {share:.0%} of the served tokens are the reference's")
        check(gap <= _MOST_GAP, f"{recipe}: served tokens are {gap:.2f} nats behind the reference's")


def _is_whole(answer: Answer) -> bool:
    """Of as many tokens as it may have, and counted right."""
    usage, found = answer.usage, len(answer.text.split())
    return (
        answer.finish == "length"
        and answer.tokens == _ANSWER == found
        and usage["total_tokens"] == answer.prompt + answer.tokens
        and 0 <= answer.cached <= answer.prompt
    )


def _text(count: int, seed: int) -> str:
    draw = random.Random(seed)
    names = ("river", "stone", "lamp", "garden", "paper", "window", "silver", "horse", "bridge", "market", "water")
    return " ".join(draw.choices(names, k=count))


def _let_go(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] = ()) -> None:
    options = _options(arguments)
    cuda = options.device.type == "cuda"
    name = torch.cuda.get_device_name() if cuda else ""
    topic = "serve-packed" if cuda and options.shape == "27b" else ""
    found: list[Entry] = []

    def report(entry: Entry) -> None:
        found.append(entry)
        print(f"{entry.name}: {entry.value:,} {entry.unit}", flush=True)
        if topic:
            path = results.merge_entries(topic, [entry], name)
            if options.copy is not None:
                (options.copy / path.name).write_bytes(path.read_bytes())

    options.folder.mkdir(parents=True, exist_ok=True)
    failures = ServePacked(options, report).run()
    print(_table(found, options.recipes), flush=True)
    if failures:
        sys.exit("failed:\n" + "\n".join(failures))


def _table(entries: Sequence[Entry], names: Sequence[str]) -> str:
    values = {entry.name: f"{entry.value:,} {entry.unit}".rstrip() for entry in entries}
    whats = dict.fromkeys(entry.name.rpartition("/")[2] for entry in entries)
    rows = [("", *names)]
    rows += [(what, *(values.get(f"serve-packed/{name}/{what}", "-") for name in names)) for what in whats]
    return "\n".join(f"{row[0]:18}" + "".join(f"{cell:>26}" for cell in row[1:]) for row in rows)


def _options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m bench serve-packed", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoint, packed models and logs; they stay")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="27b", help="tiny: nothing is written, only printed")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--recipes", default="nvfp4-mixed,gsq3", metavar="A,B", help="default nvfp4-mixed,gsq3")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--vram", default="24GiB", help="of the stack on a GPU; default 24GiB")
    parser.add_argument("--context", type=int, default=16384, help="tokens; default 16384")
    parser.add_argument("--ready-seconds", type=float, default=200.0, help="in which the stack must be ready")
    parser.add_argument("--graph-seconds", type=float, default=30.0, help="SAMOVAR_GRAPH_SECONDS of the stack")
    parser.add_argument("--copy", type=Path, metavar="FOLDER", help="put the results there too")
    chosen = parser.parse_args(arguments)
    names = tuple(chosen.recipes.split(","))
    if unknown := set(names) - set(recipes.names()):
        parser.error(f"--recipes: {', '.join(sorted(unknown))}; known: {', '.join(recipes.names())}")
    cuda = chosen.device == "cuda" or (chosen.device == "auto" and torch.cuda.is_available())
    return Options(
        chosen.folder,
        chosen.shape,
        chosen.layers,
        names,
        torch.device("cuda" if cuda else "cpu"),
        chosen.vram,
        chosen.context,
        chosen.ready_seconds,
        chosen.graph_seconds,
        chosen.copy,
    )
