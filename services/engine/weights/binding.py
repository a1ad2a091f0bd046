"""From a checkpoint into a model's memory: tensor by tensor, decoded, or packed as they are stored."""

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kernels.linear import weight
from kernels.linear.grouped import weight as grouped
from kernels.linear.grouped.form import Grouped
from kernels.linear.quantized import Quantized
from services.engine.model.config import ModelError
from services.engine.model.matrix import Block, Matrix, MatrixSlot, Place, joined
from services.engine.model.slot import Slot
from services.engine.weights.artifact.form import moved, pieces
from services.engine.weights.checkpoint import expect, fill
from services.engine.weights.source import DENSE, QuantizedSource

log = logging.getLogger(__name__)

_PIECE = 2**25
"""Elements of a tensor that are on their way at once: one byte each, and some temporaries of the packing."""


def bind(
    places: Sequence[Place],
    source: QuantizedSource,
    packed: bool,
    device: torch.device,
    progress: Callable[[float, str], None],
) -> None:
    """Fill all places of a model on `device`. With `packed`, matrices that the checkpoint has quantized keep its codes
    and scales, in the kernels' order, and never take memory in another form; else they are decoded.

    Host memory is bounded by a piece of a tensor. `progress`: 0 to 1, and a tensor's name. Raises ModelError when a
    tensor is missing, has another shape, or holds values that are not finite.
    """
    slots: dict[Matrix, list[MatrixSlot]] = {}
    total = done = 0
    for place in places:
        total += _size(place)
        if isinstance(place, MatrixSlot):
            slots.setdefault(place.matrix, []).append(place)
    for place in places:
        if isinstance(place, Slot):
            fill(source, place.name, place.target)
            done += _size(place)
            progress(done / total, place.name)
    for matrix, parts in slots.items():
        for part in parts:
            expect(source, part.name, part.shape)
        quantized = packed and any(source.format(part.name) not in DENSE for part in parts)
        if not (quantized and _keep(matrix, parts, source, device)):
            for part in parts:
                fill(source, part.name, part.target)
        done += sum(map(_size, parts))
        progress(done / total, parts[0].name)


def _size(place: Place) -> int:
    return place.target.numel() if isinstance(place, Slot) else place.rows * place.matrix.columns


def _keep(matrix: Matrix, parts: Sequence[MatrixSlot], source: QuantizedSource, device: torch.device) -> bool:
    """False, and nothing done, for a matrix that must be whole and is not of one format."""
    blocks: list[Block] = []
    for part in sorted(parts, key=lambda part: part.first):
        if source.format(part.name) in DENSE:
            plain = matrix.plain(part.rows)
            fill(source, part.name, plain.view(part.shape))
            blocks.append(plain)
        else:
            blocks += _pieces(part, source, device)
    blocks = joined(blocks)
    if matrix.whole and len(blocks) > 1:
        log.info("%s and its neighbours are of several formats: they are decoded", parts[0].name)
        return False
    matrix.bind(blocks)
    return True


def _pieces(part: MatrixSlot, source: QuantizedSource, device: torch.device) -> Iterator[Block]:
    for first, last in pieces(part.rows, part.matrix.columns, _PIECE):
        natural = moved(source.encoded(part.name, first, last), device)
        assert not isinstance(natural, Tensor)
        if not _finite(natural):
            place = source.place(part.name)
            raise ModelError(f"{source.path}: {place} holds values that are not finite; expected numbers")
        yield weight.pack(natural) if isinstance(natural, Quantized) else grouped.pack(natural)


def _finite(natural: Quantized | Grouped) -> bool:
    if isinstance(natural, Grouped):
        scales = (natural.scales, natural.mins)
    else:
        scales = (natural.scales, natural.row_scale)
        if natural.format in ("fp8", "fp8-block") and bool((natural.codes & 0x7F == 0x7F).any()):
            return False  # the NaNs of e4m3
    return all(bool(tensor.float().isfinite().all()) for tensor in scales if tensor is not None)
