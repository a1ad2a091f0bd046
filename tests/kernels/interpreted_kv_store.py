"""The kernel that stores K and V on CPU tensors, in Triton's interpreter: a process of its own, since TRITON_INTERPRET
is read when the kernels are defined. It cuts bfloat16 off instead of rounding: these rows are float32 and float16."""

from typing import get_args

import torch

from kernels.kv_codec import KvFormat
from tests.kernels.stored_rows import StoredRows, extreme_rows, stored_rows

FORMATS = tuple(format for format in get_args(KvFormat) if format != "bf16")


def check_exactly(rows: StoredRows, format: KvFormat) -> None:
    """Without a norm every bit is torch's."""
    q, k = rows.turned()
    pages = rows.blank(format)
    found = rows.store(pages)
    assert torch.equal(found, q), format
    rows.assert_stored(pages, format, k)


def check(rows: StoredRows, formats: tuple[KvFormat, ...]) -> None:
    """With one, q and k are near, and given these all is torch's to the last bit."""
    q, k = rows.stored_plain(2e-6 if rows.q.dtype == torch.float32 else 2e-3)
    for format in formats:
        pages = rows.blank(format)
        assert torch.equal(rows.store(pages), q), format
        rows.assert_stored(pages, format, k)


def main() -> None:
    for format in FORMATS:
        if format != "rk4v4-e8":  # of which rk2v4-e8 has the values
            check_exactly(extreme_rows(64, format.startswith("r")), format)
    check_exactly(stored_rows(2, 1, 2, 16, 8, torch.float16, None), "fp8")
    check(stored_rows(3, 2, 1, 256, 64, torch.float32, "centred"), FORMATS)
    check(stored_rows(5, 2, 1, 64, 64, torch.float16, "centred", seed=1), ("rk4v4",))
    check(stored_rows(1, 1, 1, 128, 20, torch.float16, "plain", seed=2), ("rk4v4-e8",))
    print("all right")


if __name__ == "__main__":
    main()
