"""Random matrices in every format of `kernels.linear.quantized`."""

import torch

from kernels.linear.quantized import FORMATS, Quantized


def random_quantized(
    format: str, rows: int, columns: int, device: str = "cpu", seed: int = 0, scale_dtype: torch.dtype = torch.bfloat16
) -> Quantized:
    """Every code occurs, NaN does not; nvfp4 has subnormal scales too, and a few zero ones with codes of zero."""
    generator = torch.Generator().manual_seed(seed)
    form = FORMATS[format]
    groups = -(-columns // form.group) if form.group else 0

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    scales = row_scale = None
    if form.integer:
        half = 1 << (form.bits - 1)
        codes = whole(-half, half, rows, columns).to(torch.int8)
        scales = (torch.rand(rows, groups, generator=generator) + 0.1).to(scale_dtype)
    elif format == "nvfp4":
        bits = whole(0, 0x7F, rows, groups).to(torch.uint8)
        codes = whole(0, 16, rows, columns).to(torch.uint8)
        codes[(bits == 0).repeat_interleave(form.group, dim=1)[:, :columns]] = 0
        scales = bits.view(torch.float8_e4m3fn)
    else:
        codes = whole(0, 256, rows, columns).to(torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0
        if format == "fp8-block":
            scales = torch.rand(-(-rows // 128), groups, generator=generator) + 0.1
    if format in ("fp8", "nvfp4"):
        row_scale = torch.rand(rows, generator=generator) + 0.1
    parts = (None if part is None else part.to(device) for part in (codes, scales, row_scale))
    return Quantized(format, *parts)  # type: ignore[arg-type]
