"""All the numbers of the model card, on held-out names, phrasings and text."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from tools.train.data.dataset import TEXT_KINDS, Dataset
from tools.train.data.vocabulary import END_OF_TURN
from tools.train.evaluation.acceptance import chained_acceptance, engine_acceptance
from tools.train.evaluation.decoding import agreement, greedy
from tools.train.evaluation.draft_prompts import chat_prompt
from tools.train.evaluation.needles import needle_case
from tools.train.evaluation.text_score import bits_per_byte
from tools.train.evaluation.tool_score import (
    CELLS,
    THINKING_CELLS,
    Score,
    draw_cases,
    forced_score,
    greedy_score,
    mean,
    probe_score,
)
from tools.train.model import TrainModel
from tools.train.tasks.chat import Exchange, copying, small_talk
from tools.train.tasks.rows import Task, micro_batch
from tools.train.tasks.source import Source

LONGEST_FULL = 131_072
"""Longer needles get a quarter of the salts."""
OUTPUT_TOKENS = 60


@dataclass(frozen=True, slots=True)
class EvalOptions:
    lengths: tuple[int, ...] = (2048, 8192, 32768, 65536, 131072, 250000)
    salts: int = 20
    tool_cases: int = 100
    """In each line of the table of tools."""
    decoded: int = 200
    """Prompts that are decoded token by token; the slow part without a GPU."""
    text_rows: int | None = None
    """Of 2,048 tokens of each kind of text; None: all."""
    seed: int = 987


@dataclass(slots=True)
class Report:
    """Shares in [0, 1] unless said otherwise."""

    needles: dict[str, float] = field(default_factory=dict)
    tools: dict[str, Score] = field(default_factory=dict)
    missed_probes: list[str] = field(default_factory=list)
    chat_exact: float = 0.0
    copy_exact: float = 0.0
    bits_per_byte: dict[str, float] = field(default_factory=dict)
    acceptance_given: dict[str, list[float]] = field(default_factory=dict)
    """Drafts 1, 1-2, 1-3 on given held-out text."""
    acceptance_own: dict[str, list[float]] = field(default_factory=dict)
    """The same on the model's own greedy output, with an engine's keys."""

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def markdown(self) -> str:
        lines = ["| test | result |", "|---|---|"]
        lines += [f"| needle, {name} | {value:.0%} |" for name, value in self.needles.items()]
        lines += [f"| short chats / copying | {self.chat_exact:.1%} / {self.copy_exact:.1%} |"]
        lines += [f"| bits per byte, {name} | {value:.3f} |" for name, value in self.bits_per_byte.items()]
        lines += ["", "| tool calls | cases | exact | name right | well formed |", "|---|---|---|---|---|"]
        for name, score in self.tools.items():
            shares = (score.exact, score.name_right, score.well_formed)
            lines.append(f"| {name} | {score.cases} | {' | '.join('' if s is None else f'{s:.1%}' for s in shares)} |")
        lines += ["", "| draft acceptance | given text | own greedy output |", "|---|---|---|"]
        for name in {**self.acceptance_given, **self.acceptance_own}:
            both = (self.acceptance_given.get(name), self.acceptance_own.get(name))
            lines.append(
                f"| {name} | {' | '.join('' if x is None else ' / '.join(f'{s:.3f}' for s in x) for x in both)} |"
            )
        return "\n".join(lines)


def evaluate(model: TrainModel, dataset: Dataset, options: EvalOptions, log: Callable[[str], None] = print) -> Report:
    """`dataset` must be the held-out split. The same options give the same cases for every model."""
    if dataset.split != "held":
        raise ValueError("evaluate on the held-out split")
    source = Source(dataset, f"evaluation/{options.seed}")
    report = Report()
    with torch.no_grad():
        measure_needles(model, dataset, options, report)
        log(f"needles {report.needles}")
        measure_tools(model, source.reseeded(f"tools/{options.seed}"), options, report)
        log(f"tools {report.tools['probes']}")
        measure_chat(model, source.reseeded(f"chat/{options.seed}"), options, report)
        for kind in TEXT_KINDS:
            report.bits_per_byte[kind] = bits_per_byte(model, dataset, kind, most_rows=options.text_rows)
        log(f"bits per byte {report.bits_per_byte}")
        measure_acceptance(model, source.reseeded(f"acceptance/{options.seed}"), options, report)
    return report


def measure_needles(model: TrainModel, dataset: Dataset, options: EvalOptions, report: Report) -> None:
    def exact(length: int, salts: range, depth: float) -> float:
        cases = [needle_case(dataset.tokenizer, length, salt, depth) for salt in salts]
        answers = [dataset.encode(code + END_OF_TURN) for _, code in cases]
        # prompts of this size are not worth caching
        prompts = [np.array(dataset.tokenizer.encode(p, add_special_tokens=False).ids, np.int32) for p, _ in cases]
        agreed = agreement(model, prompts, answers)
        return mean(count == len(ids) for count, ids in zip(agreed, answers, strict=True))

    for length in options.lengths:
        salts = options.salts if length <= LONGEST_FULL else max(1, options.salts // 4)
        report.needles[f"{length} tokens"] = exact(length, range(1000 + length, 1000 + length + salts), 0.8)
    if max(options.lengths, default=0) >= 32768:
        for depth in (0.02, 0.3, 0.98):
            salts = range(5000, 5000 + max(1, options.salts // 2))
            report.needles[f"32768 tokens at depth {depth}"] = exact(32768, salts, depth)


def measure_tools(model: TrainModel, source: Source, options: EvalOptions, report: Report) -> None:
    dataset = source.dataset
    for cell in CELLS:
        cases = draw_cases(source, cell, options.tool_cases)
        report.tools[cell.label] = forced_score(model, dataset, [(case.prompt, case.answer) for case in cases])
    if options.decoded:
        for cell in (CELLS[0], CELLS[5]):
            decoded = greedy_score(model, dataset, draw_cases(source, cell, options.decoded))
            report.tools[f"{cell.label}, decoded"] = decoded
        for cell in THINKING_CELLS:
            thought = draw_cases(source, cell, max(1, options.decoded // 4), think=True)
            report.tools[cell.label] = greedy_score(model, dataset, thought)
    report.tools["probes"], report.missed_probes = probe_score(model, dataset)


def measure_chat(model: TrainModel, source: Source, options: EvalOptions, report: Report) -> None:
    def exact(exchanges: list[Exchange]) -> float:
        encode = source.dataset.encode
        prompts = [encode(chat_prompt(exchange.question)) for exchange in exchanges]
        answers = [encode(exchange.answer + END_OF_TURN) for exchange in exchanges]
        agreed = agreement(model, prompts, answers)
        return mean(count == len(ids) for count, ids in zip(agreed, answers, strict=True))

    report.chat_exact = exact([small_talk(source) for _ in range(2 * options.tool_cases)])
    report.copy_exact = exact([copying(source) for _ in range(max(1, options.tool_cases // 2))])


def measure_acceptance(model: TrainModel, source: Source, options: EvalOptions, report: Report) -> None:
    dataset = source.dataset
    tasks: tuple[Task, ...] = ("python", "english", "tools", "chat", "facts")
    rows = min(16, options.text_rows or 16)
    for task in tasks:
        batch = micro_batch(source, rows * 2048, 2048, {task: 1.0})
        ids = torch.from_numpy(batch.ids).to(model.device, torch.long)
        counted = torch.from_numpy(batch.weights > 0).to(model.device)
        report.acceptance_given[task] = [round(s, 4) for s in chained_acceptance(model, ids, counted)]
    count = options.decoded // 8
    if count == 0:
        return
    prompts = {
        "python": [source.text("python", 200) for _ in range(count)],
        "english": [source.text("english", 200) for _ in range(count)],
        "tools": [dataset.encode(case.prompt) for case in draw_cases(source, CELLS[0], count)],
        "chat": [dataset.encode(chat_prompt(small_talk(source).question)) for _ in range(2 * count)],
    }
    for name, starts in prompts.items():
        outputs = greedy(model, starts, OUTPUT_TOKENS, dataset.token_id(END_OF_TURN))
        written = [(start.tolist(), output) for start, output in zip(starts, outputs, strict=True)]
        report.acceptance_own[name] = [round(s, 4) for s in engine_acceptance(model, written)]
