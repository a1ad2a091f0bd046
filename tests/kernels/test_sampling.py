"""The sampler's kernels against the reference in float64."""

import pytest
import torch
from torch import Tensor

from kernels.sampling import DrawRow, DrawTable, cells_of, draw_rows, draw_workspace
from kernels.sampling import triton as kernels
from kernels.sampling.device import draw_rows as draw_on_device
from kernels.sampling.launch import MOST_SEGMENTS, DrawLaunch, draw_launch
from tests.kernels.compiled import SHARED_LIMIT, ahead_of_time, run_interpreted, usage
from tests.kernels.drawn_rows import CPU, check_cells, expected, on, random_logits, random_rows

VOCAB = 248320


def test_interpreted() -> None:
    run_interpreted("tests.kernels.interpreted_sampling")


@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_compiled_ahead_of_time(capability: int) -> None:
    """Two programs of `draw` fit into a multiprocessor, and one is sure of its place there."""
    pointers = {"logits_ptr": "*fp32", "floats_ptr": "*fp64", "tokens_ptr": "*i64", "ints_ptr": "*i64"}
    pointers["work_ptr"] = "*i64"
    launch = draw_launch(1, VOCAB, 132)
    shapes = {"SEGMENTS": MOST_SEGMENTS, "BLOCK": launch.block}
    draw = ahead_of_time(
        kernels.draw, {"ONE": launch.one_bits, **shapes}, pointers, capability, launch.warps, enable_fp_fusion=False
    )
    adjust = ahead_of_time(kernels.adjust, shapes, pointers, capability, 4, enable_fp_fusion=False)
    for used in (usage(draw), usage(adjust)):
        assert used["LOCAL"] == 0
        assert used["STACK"] <= 64
        assert used["SHARED"] <= SHARED_LIMIT // 2
    assert launch.warps * 32 * usage(draw)["REG"] <= 2**16 // 2


def test_launches() -> None:
    """All programs at once on the device, every logit in one, and twice the sum of all weights is an int64."""
    for rows in (1, 2, 7, 64, 200):
        for vocabulary in (1, 40, 1025, 151936, VOCAB, 300001):
            launch = draw_launch(rows, vocabulary, 132)
            assert launch.parts * rows <= 2 * 132 or launch.parts == 1
            assert (launch.parts - 1) * launch.each < launch.segments <= launch.parts * launch.each
            segment = launch.span * launch.block
            assert (launch.segments - 1) * segment < vocabulary <= launch.segments * segment
            assert launch.segments <= MOST_SEGMENTS
            assert vocabulary << launch.one_bits < 2**62
            assert launch.one_bits >= 40
    assert draw_launch(1, VOCAB, 132).parts > 120


def test_counts_saturate() -> None:
    cells = cells_of([2, 2], [1] * 40000 + [2], 4, CPU)
    assert cells.tolist() == [0, 32767, 1 - 32768, 0]


def test_what_does_not_fit_together() -> None:
    table = DrawTable(2, CPU)
    with pytest.raises(ValueError, match="3 rows for a table of 2"):
        table.fill([DrawRow(0.0)] * 3)
    tokens, workspace = torch.zeros(3, dtype=torch.int64), draw_workspace(3, CPU)
    with pytest.raises(ValueError, match="3 rows, of which 2"):
        draw_on_device(torch.zeros(3, 8), table, workspace, tokens, DrawLaunch(1, 1, 1, 1, 40))
    with pytest.raises(ValueError, match="float16"):
        draw_on_device(torch.zeros(1, 8, dtype=torch.float16), table, workspace, tokens, DrawLaunch(1, 1, 1, 1, 40))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnGpu:
    cuda = torch.device("cuda")

    def drawn(self, logits: Tensor, rows: list[DrawRow], launch: DrawLaunch | None = None) -> Tensor:
        count = len(logits)
        table, tokens = DrawTable(count, self.cuda), torch.full((count,), -7, device=self.cuda)
        table.fill(rows)
        draw_on_device(logits, table, draw_workspace(count, self.cuda), tokens, launch)
        return tokens.cpu()

    @pytest.mark.parametrize(("count", "vocabulary"), [(1, VOCAB), (3, VOCAB), (64, VOCAB), (200, 50257), (9, 97)])
    def test_near_the_reference(self, count: int, vocabulary: int) -> None:
        """Where kernel and reference differ it is by a rounding, so hardly ever."""
        logits = random_logits(count, vocabulary, seed=count)
        rows = on(random_rows(count, vocabulary, CPU, seed=count), self.cuda)
        tokens, adjusted, after = expected(logits, rows, count)
        device = logits.to(self.cuda)
        assert torch.equal(self.drawn(device, rows), tokens)
        assert torch.equal(device.cpu(), adjusted)
        check_cells(rows, after)

    def test_flat_and_tied(self) -> None:
        """What takes a search all its steps: equals everywhere, or next to nothing between the tokens."""
        near = 1 + torch.arange(VOCAB) % 1000 * 2.0**-23
        logits = torch.stack([torch.zeros(VOCAB), near, torch.linspace(0, 1e-3, VOCAB)])
        rows = [DrawRow(100.0, top_k=77000, top_p=0.9, uniform=0.61)] * 3
        assert torch.equal(self.drawn(logits.to(self.cuda), rows), expected(logits, rows, 3)[0])

    def test_neither_batch_nor_launch_changes_a_draw(self) -> None:
        rows = random_rows(16, VOCAB, CPU, seed=3, adjusted=False)
        logits = random_logits(16, VOCAB, seed=3).to(self.cuda)
        together = self.drawn(logits, rows)
        one = draw_launch(16, VOCAB, 8)
        assert one.parts == 1
        assert torch.equal(self.drawn(logits, rows, one), together)
        for index, row in enumerate(rows):
            assert self.drawn(logits[index : index + 1], [row]).tolist() == [together[index]]

    @pytest.mark.parametrize("count", [1, 8, 64])
    def test_captured(self, count: int) -> None:
        """Captured with idle rows, replayed with others, penalties that grow among them."""
        table, workspace = DrawTable(count, self.cuda), draw_workspace(count, self.cuda)
        tokens, logits = torch.zeros(count, dtype=torch.int64, device=self.cuda), torch.zeros(count, VOCAB).cuda()
        table.fill([])
        draw_rows(logits, table, workspace, tokens)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            draw_rows(logits, table, workspace, tokens)
        rows = on(random_rows(count, VOCAB, CPU, seed=count + 1), self.cuda)
        for step in range(4):
            new = random_logits(count, VOCAB, seed=50 + step)
            exact, adjusted, after = expected(new, rows, count)
            logits.copy_(new)
            table.fill(rows)
            graph.replay()
            assert torch.equal(tokens.cpu(), exact)
            assert torch.equal(logits.cpu(), adjusted)
            check_cells(rows, after)

    def test_broken_rows_are_alone(self) -> None:
        logits = torch.zeros(4, VOCAB)
        logits[0, 9], logits[1, 200000] = torch.nan, torch.inf
        logits[2] = -torch.inf
        logits[3, 1234] = 60
        for temperature in (0.0, 1.0):
            tokens = self.drawn(logits.to(self.cuda), [DrawRow(temperature, uniform=0.5)] * 4)
            assert tokens.tolist() == [-1, -1, -1, 1234]
