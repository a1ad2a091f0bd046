"""The sampler's kernels on CPU tensors, in Triton's interpreter: a process of its own, since TRITON_INTERPRET is read
when the kernels are defined.

The interpreter runs one program after the other. So programs that wait for each other are run in a process each, on
shared memory; its atomics are real ones.
"""

import multiprocessing
from typing import Any

import torch
from torch import Tensor

from kernels.sampling import DrawRow, DrawTable
from kernels.sampling import triton as kernels
from kernels.sampling.device import draw_rows, draw_workspace
from kernels.sampling.launch import MOST_SEGMENTS, DrawLaunch, draw_launch
from tests.kernels.drawn_rows import CPU, check_cells, expected, on, random_logits, random_rows


def launch_of(vocabulary: int, parts: int = 1, block: int = 64, span: int = 1) -> DrawLaunch:
    segments = -(-vocabulary // (block * span))
    each = -(-segments // parts)
    return DrawLaunch(segments, span, -(-segments // each), each, draw_launch(1, vocabulary, 1).one_bits, block)


def drawn(logits: Tensor, rows: list[DrawRow], workspace: Tensor, span: int = 1) -> Tensor:
    table, tokens = DrawTable(len(logits), CPU), torch.full((len(logits),), -7)
    table.fill(rows)
    draw_rows(logits, table, workspace, tokens, launch_of(logits.shape[1], span=span))
    return tokens


def check(count: int, vocabulary: int, seed: int) -> None:
    """Twice behind each other, in a workspace that held something else, with one idle row."""
    rows, workspace = random_rows(count, vocabulary, CPU, seed), draw_workspace(count + 1, CPU).fill_(-9)
    for step in range(2):
        logits = random_logits(count + 1, vocabulary, seed + 100 * step)
        tokens, adjusted, after = expected(logits, rows, count + 1)
        assert torch.equal(drawn(logits, rows, workspace, span=1 + step), tokens), (seed, step)
        assert torch.equal(logits[:count], adjusted[:count])
        check_cells(rows, after)


def check_extremes() -> None:
    inf = torch.inf
    logits = torch.tensor(
        [
            [0.0, torch.nan, 3, 1],
            [0, inf, 3, 1],
            [-inf] * 4,
            [-torch.nan, 0, 0, 0],
            [-0.0, 0.0, -1, -inf],
            [-1e30, 3, 4, 1],
            [-3e38, 3e38, 3e38, -inf],
            [5, 5, 5, 5],
            [-0.0, 0.0, -1, -inf],
        ]
    )
    tiny = DrawRow(5e-324, uniform=0.999)
    rows = [
        *[DrawRow(temperature) for temperature in (0.0, 1.0, 1.0, 0.0, 0.0)],
        tiny,
        DrawRow(1.0, uniform=0.7),
        DrawRow(1.0, top_k=1, top_p=1e-12, min_p=1.0, uniform=0.8),  # equals stay together
        DrawRow(1.0, top_k=1, uniform=0.6),  # so do zeros of both signs
    ]
    tokens = drawn(logits, rows, draw_workspace(len(rows), CPU)).tolist()
    assert tokens == [-1, -1, -1, -1, 0, 2, 2, 3, 1], tokens


def check_neighbours() -> None:
    """A border between two adjacent float32, and one at equals, near 0 and far from it."""
    rows, lists, right = [], [], []
    for x in (-3000.0, 16.0, 0.01, -7.5):
        under = float(torch.nextafter(torch.tensor(x), torch.tensor(-torch.inf)))
        for limits, token in (((2, 1.0), 1), ((3, 1.0), 3), ((0, 0.85), 0), ((0, 0.9), 1), ((0, 0.92), 3)):
            lists.append([x + 3, x, under, under, x - 9])
            rows.append(DrawRow(1.0, *limits, uniform=1 - 2**-53))
            right.append(token)
    assert drawn(torch.tensor(lists), rows, draw_workspace(len(rows), CPU)).tolist() == right


def part(index: int, logits: Tensor, rows: list[DrawRow], workspace: Tensor, tokens: Tensor, launch: Any) -> None:
    """What program `index` of each row does."""
    from triton.runtime.interpreter import interpreter_builder

    place = interpreter_builder.set_grid_idx

    def moved(x: int, y: int, z: int) -> None:
        interpreter_builder.set_grid_dim(launch.parts, len(rows), 1)
        place(x + index, y, z)

    interpreter_builder.set_grid_idx = moved  # type: ignore[method-assign]
    table = DrawTable(len(rows), CPU)
    table.fill(rows)
    draw: Any = kernels.draw
    draw[(1, len(rows))](
        logits, table.floats, table.ints, tokens, workspace, logits.shape[1], logits.stride(0), workspace.stride(0),
        1, launch.segments, launch.span, launch.parts, launch.each, ONE=launch.one_bits, SEGMENTS=MOST_SEGMENTS,
        BLOCK=launch.block,
    )  # fmt: skip


def check_together(vocabulary: int) -> None:
    """Three programs a row, at once."""
    rows = random_rows(12, vocabulary, CPU, seed=9, adjusted=False)
    logits = random_logits(len(rows), vocabulary, 9).share_memory_()
    workspace, launch = draw_workspace(len(rows), CPU).share_memory_(), launch_of(vocabulary, 3)
    assert launch.parts == 3
    table = DrawTable(len(rows), CPU)
    table.fill(rows)
    adjust: Any = kernels.adjust
    adjust[(launch.segments, len(rows))](
        logits, table.floats, table.ints, workspace, vocabulary, logits.stride(0), workspace.stride(0), launch.span,
        SEGMENTS=MOST_SEGMENTS, BLOCK=launch.block,
    )  # fmt: skip
    tokens = torch.full((len(rows),), -7).share_memory_()
    forked = multiprocessing.get_context("fork")
    programs = [
        forked.Process(target=part, args=(index, logits, rows, workspace, tokens, launch)) for index in range(3)
    ]
    for program in programs:
        program.start()
    try:
        for program in programs:
            program.join(100)
    finally:
        for program in programs:
            program.kill()
    assert [program.exitcode for program in programs] == [0, 0, 0]
    assert torch.equal(tokens, expected(logits, on(rows, CPU), len(rows))[0])


def main() -> None:
    torch.set_num_threads(1)
    check_extremes()
    check_neighbours()
    for vocabulary, seed in ((1, 1), (2, 2), (97, 3), (230, 4)):
        check(12, vocabulary, seed)
    check_together(150)
    print("all right")


if __name__ == "__main__":
    main()
