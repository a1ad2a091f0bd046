"""The formats of K and V by name."""

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.kv_codec.e8 import E8Rows
from kernels.kv_codec.floats import Fp8Rows, Nvfp4Rows
from kernels.kv_codec.hadamard import GROUP
from kernels.kv_codec.integers import Int4Rows, Int8Rows
from kernels.kv_codec.rows import PlainRows, RowCodec

KvFormat = Literal["auto", "bf16", "fp8", "int8", "rk8v4", "nvfp4", "rk4v4", "rk4v4-e8", "rk2v4-e8"]


@dataclass(frozen=True, slots=True)
class KvForm:
    """How K and V are stored."""

    name: str
    version: int
    """To be raised when the same values would be stored as other bytes, or the same bytes read as other values."""
    keys: RowCodec
    values: RowCodec
    rotated: bool = False
    """K and V are rotated before they are encoded (`rotate`). So queries must be rotated as well, and the attention's
    output once again."""

    @property
    def multiple(self) -> int:
        """The head's dims must be a multiple of it."""
        return max(self.keys.multiple, self.values.multiple)

    def row_bytes(self, dim: int) -> int:
        """Of a token and KV head in one layer, K and V, codes and scales."""
        return sum(
            rows.code_count(dim) * rows.code_dtype.itemsize + rows.scale_count(dim) * rows.scale_dtype.itemsize
            for rows in (self.keys, self.values)
        )


_INT4 = Int4Rows(64)
_E8 = E8Rows(4, 64)
_FORMS = {
    form.name: form
    for form in (
        KvForm("fp8", 1, Fp8Rows(), Fp8Rows()),
        KvForm("int8", 1, Int8Rows(64), Int8Rows(64)),
        KvForm("rk8v4", 1, Int8Rows(64), Int4Rows(32), rotated=True),
        KvForm("nvfp4", 1, Nvfp4Rows(), Nvfp4Rows()),
        KvForm("rk4v4", 1, _INT4, _INT4, rotated=True),
        KvForm("rk4v4-e8", 1, _E8, _E8, rotated=True),
        KvForm("rk2v4-e8", 1, E8Rows(2, GROUP), _E8, rotated=True),
    )
}
_PLAIN = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def plain_form(dtype: torch.dtype) -> KvForm:
    """K and V as they are. Raises KeyError for a dtype that is not bfloat16, float16 or float32."""
    return KvForm(_PLAIN[dtype], 1, PlainRows(dtype), PlainRows(dtype))


def kv_form(format: KvFormat, dtype: torch.dtype) -> KvForm:
    """`dtype`: the model's, which "auto" stands for."""
    if format == "auto":
        return plain_form(dtype)
    return plain_form(torch.bfloat16) if format == "bf16" else _FORMS[format]


def kernels_take(head_dim: int) -> bool:
    """Whether the Triton kernels write and read heads of so many dims; torch does others."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0
