"""Which stored tensors belong together."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.weights.readers.parts import Matrix, Part
from services.engine.weights.safetensors_checkpoint import SafetensorsCheckpoint

_ROLES = frozenset(
    {
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_global_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
    }
)
_UNUSED = frozenset(
    {
        "input_scale",
        "input_global_scale",
        "input_zero_point",
        "activation_scale",
        "output_scale",
        "q_scale",
        "k_scale",
        "v_scale",
        "k_zero_point",
        "v_zero_point",
    }
)
"""How others quantize activations and the KV cache; the weights do not depend on it."""
_STACKED = re.compile(r"(.+\.experts\.(?:gate_up_proj|down_proj))(?:[._](.+))?")
"""All experts in one tensor, whose name has no `.weight`."""


@dataclass(frozen=True, slots=True)
class Contents:
    quantized: Sequence[Matrix]
    plain: Sequence[str]
    unused: Sequence[str]
    """Scales that play no role here."""


def contents(checkpoint: SafetensorsCheckpoint) -> Contents:
    """What the files hold; that the parts of a matrix fit each other is not checked."""
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    stacked: set[str] = set()
    plain, unused = [], []
    for name in checkpoint.names():
        if match := _STACKED.fullmatch(name):
            module, role = match[1], match[2] or "weight"
            role = role if role in _ROLES | _UNUSED else f"weight_{role}"
            stacked.add(module)
        else:
            module, _, role = name.rpartition(".")
        if role in _UNUSED:
            unused.append(name)
        elif role in _ROLES:
            modules[module][role] = name
        else:
            plain.append(name)
    quantized = []
    for module, roles in modules.items():
        if roles.keys() == {"weight"} and checkpoint.kind(roles["weight"]) in checkpoint.READABLE:
            plain.append(roles["weight"])
        else:
            parts = {role: Part(checkpoint, name) for role, name in roles.items()}
            quantized.append(Matrix(module if module in stacked else f"{module}.weight", module, parts))
    return Contents(quantized, plain, unused)
