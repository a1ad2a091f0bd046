"""Which layout the tensors of a matrix are in. The tensors decide; the config is a check."""

from collections.abc import Sequence

from services.engine.weights.readers.awq import Awq
from services.engine.weights.readers.compressed_ints import PackedInts, PlainInts
from services.engine.weights.readers.encoding import Encoding
from services.engine.weights.readers.float8 import Float8
from services.engine.weights.readers.gptq import Gptq
from services.engine.weights.readers.integer import IntegerMatrix
from services.engine.weights.readers.nvfp4 import Nvfp4
from services.engine.weights.readers.parts import Matrix
from services.engine.weights.readers.scheme import Declaration, Scheme


def open_encoding(matrix: Matrix, declaration: Declaration) -> tuple[Encoding, bool]:
    """How to read a matrix, and whether the config names it too. Raises ModelError when the tensors do not fit each
    other, or the config says otherwise."""
    declared = declaration.schemes(matrix.module)
    encoding = _encoding(matrix, declared, declaration)
    if declared and not any(scheme.fits(encoding.scheme) for scheme in declared):
        raise next(iter(matrix.parts.values())).error(
            f"is of {encoding.scheme}; the quantization_config says {' or '.join(str(scheme) for scheme in declared)}"
        )
    return encoding, bool(declared)


def _encoding(matrix: Matrix, declared: Sequence[Scheme], declaration: Declaration) -> Encoding:
    zeros = "weight_zero_point" in matrix.parts
    kinds = [scheme for scheme in declared if scheme.kind == "int"]
    integers = next((scheme for scheme in kinds if zeros or scheme.symmetric is not False), kinds[0] if kinds else None)
    if "qweight" in matrix.parts:
        if _packed_along_outputs(matrix):
            return IntegerMatrix(Awq(matrix, integers))
        return IntegerMatrix(Gptq(matrix, integers, declaration.zeros_less_one))
    if "weight_packed" in matrix.parts:
        kind = matrix.parts["weight_packed"].kind
        return Nvfp4(matrix) if kind == "U8" else IntegerMatrix(PackedInts(matrix, integers))
    weight = matrix.part("weight")
    if weight.kind == "F8_E4M3":
        return Float8(matrix, declared)
    if weight.kind == "I8":
        return IntegerMatrix(PlainInts(matrix, integers))
    if weight.kind == "U8" and "weight_scale_2" in matrix.parts:
        return Nvfp4(matrix)
    others = ", ".join(sorted(matrix.parts.keys() - {"weight"}))
    raise weight.error(
        f"is of the type {weight.kind}{f', with {others} beside it' if others else ''}: no quantization known here"
    )


def _packed_along_outputs(matrix: Matrix) -> bool:
    """AWQ packs [K, N] along N, GPTQ along K."""
    codes, scales = matrix.part("qweight").shape, matrix.part("scales").shape
    if len(codes) != 2 or len(scales) != 2:
        raise matrix.part("qweight").error(f"has the shape {list(codes)}, its scales {list(scales)}; expected matrices")
    return codes[1] != scales[1]
