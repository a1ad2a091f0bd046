"""What a person sees of a pack run: its progress on stderr, and a table of what was written."""

import math
import re
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from services.engine.weights.artifact.manifest import Group, Manifest

_PLAIN_SECONDS = 5.0
"""Between two lines where stderr is no terminal."""
_KINDS = (
    ("draft head (mtp)", re.compile(r"mtp\.")),
    ("embedding", re.compile(r".*embed_tokens")),
    ("head", re.compile(r"lm_head")),
    ("attention", re.compile(r".*\.self_attn\.\w+_proj")),
    ("gated delta net", re.compile(r".*\.linear_attn\.(in_proj_qkvz?|in_proj_z|out_proj)")),
    ("experts", re.compile(r".*\.experts\b.*")),
    ("mlp", re.compile(r".*\.(mlp|shared_expert)\.\w+_proj")),
    ("norms and others", re.compile(r"")),
)
"""The first pattern that a group's name begins with decides."""


class Meter:
    """A writer's `Progress`: a bar with the time that is left on a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
        )
        self._task: TaskID | None = None
        self._began = self._said = time.monotonic()
        self._first: float | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
            self._task = self._bar.add_task("", total=1.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._bar.stop()

    def __call__(self, share: float, what: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=share, description=what)
            return
        now = time.monotonic()
        if self._first is None:
            self._first = share  # an earlier run did that much
        if now - self._said >= _PLAIN_SECONDS:
            self._said = now
            done = share - self._first
            left = f", {(1 - share) / done * (now - self._began):.0f} s left" if done > 0 else ""
            print(f"samovar pack: {share:.0%} {what}{left}", file=sys.stderr)


def table(manifest: Manifest) -> str:
    """A line for each kind of tensor and format: groups, weights, bits a weight (scales and all), GB, and the relative
    error against the source."""
    lines: dict[tuple[int, str], list[Group]] = {}
    for group in manifest.groups:
        kind = next(index for index, (_, pattern) in enumerate(_KINDS) if pattern.match(group.name))
        lines.setdefault((kind, group.format), []).append(group)
    rows = [("tensors", "format", "groups", "weights", "bits", "GB", "error")]
    rows += [(_KINDS[kind][0], format, *_numbers(groups)) for (kind, format), groups in sorted(lines.items())]
    rows.append(("all", "", *_numbers(manifest.groups)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join((str.ljust if at < 2 else str.rjust)(cell, widths[at]) for at, cell in enumerate(row)).rstrip()
        for row in rows
    )


def _numbers(groups: Sequence[Group]) -> tuple[str, str, str, str, str]:
    weights = sum(group.rows * group.columns for group in groups)
    nbytes = sum(group.nbytes for group in groups)
    changed = [group.squares for group in groups if group.squares is not None]
    error = "none"
    if changed:
        error = f"{math.sqrt(sum(e for e, _ in changed) / (sum(s for _, s in changed) or 1.0)):.2%}"
    return str(len(groups)), f"{weights:,}", f"{8 * nbytes / weights:.3f}", f"{nbytes / 1e9:.3f}", error
