"""Random matrices quantized in groups, of all kinds of layout."""

import torch
from torch import Tensor

from kernels.linear.grouped.form import Grouped, Layout

TABLE = (-128, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)
LAYOUTS = {
    # rows, columns, layout, sub-scales, mins
    "4 bits": (67, 160, Layout(4, 32, 32, zero=8), False, False),
    "4 bits, mins in super-blocks": (3, 1024, Layout(4, 32, 256), True, True),
    "5 bits, last super-block cut": (5, 384, Layout(5, 32, 256), True, True),
    "6 bits": (5, 512, Layout(6, 16, 256, zero=32), True, False),
    "3 bits, columns end in a group": (3, 152, Layout(3, 16, 16), False, True),
    "8 bits, columns end in a group": (4, 300, Layout(8, 128, 128, zero=128), False, False),
    "8 bits, zero points": (4, 256, Layout(8, 64, 64), True, True),
    "2 bits, one group of two blocks": (9, 200, Layout(2, 256, 256, zero=1), False, False),
    "1 bit, one group of many blocks": (9, 900, Layout(1, 1024, 1024), True, True),
    "2 bits, groups of two blocks": (9, 512, Layout(2, 256, 256), True, True),
    "table of 16": (65, 100, Layout(4, 16, 16, table=TABLE), False, False),
    "table of 8, scales for a block": (4, 512, Layout(3, 64, 128, table=TABLE[::2]), True, True),
    "table of 4, one odd group": (3, 100, Layout(2, 100, 100, table=(-3, 5, 7, -128)), False, True),
    "table of 2": (3, 257, Layout(1, 32, 32, table=(-7, 9)), False, False),
}


def random_grouped(name: str, seed: int = 0, dtype: torch.dtype = torch.float16) -> Grouped:
    rows, columns, layout, subs, mins = LAYOUTS[name]
    generator = torch.Generator().manual_seed(seed)

    def floats() -> Tensor:
        return (torch.randn(rows, -(-columns // layout.span), generator=generator) * 0.1).to(dtype)

    def steps() -> Tensor:
        shape = (rows, -(-columns // layout.group))
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)

    codes = torch.randint(0, 2**layout.bits, (rows, columns), generator=generator, dtype=torch.uint8)
    return Grouped(
        layout,
        codes,
        floats(),
        steps() if subs else None,
        floats() if mins else None,
        steps() if subs and mins else None,
    )
