"""Which tensors get which format: read from TOML, our own ones lie in this folder.

    description = "NVFP4 for most MLPs, FP8 for the rest"

    [[rules]]
    tensors = ["model.layers.*.mlp.*"]
    format = "fp8"
    last = 0.125                 # only in the last eighth of the layers
    scales = "float16"           # of integer formats and fp8-block; left out: bfloat16, float32

The first rule that fits a matrix decides. What no rule names, and all that is no matrix of `matrices.is_matrix`, stays
as the source has it.
"""

import fnmatch
import hashlib
import importlib.resources
import math
import re
import tomllib
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from kernels.linear.quantized import FORMATS
from services.engine.model.config import ModelError
from services.engine.weights.source import DENSE

KEEP = "keep"
"""The format of a tensor that stays as the source has it."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Rule(Struct, frozen=True, forbid_unknown_fields=True):
    tensors: tuple[str, ...]
    """Patterns of names as in `fnmatch`: `*` is any text, dots too."""
    format: str
    """A key of FORMATS, one of DENSE, or KEEP."""
    last: float | None = None
    """Only of the last layers of the body: this share of them, rounded up."""
    scales: Literal["float16", "bfloat16", "float32"] | None = None

    def fits(self, name: str, layers: int) -> bool:
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.tensors):
            return False
        if self.last is None:
            return True
        layer = _LAYER.match(name)
        return layer is not None and int(layer[1]) >= layers - math.ceil(self.last * layers)


class Recipe(Struct, frozen=True, forbid_unknown_fields=True):
    description: str
    rules: tuple[Rule, ...]

    def rule(self, name: str, layers: int) -> Rule:
        """Of the matrix `name` in a model of so many layers."""
        return next((rule for rule in self.rules if rule.fits(name, layers)), Rule((), KEEP))

    def digest(self) -> str:
        """Equal for recipes that do the same."""
        return hashlib.blake2b(msgspec.json.encode(self.rules), digest_size=8).hexdigest()


def names() -> list[str]:
    """Of our own recipes."""
    folder = importlib.resources.files(__name__)
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load(name: str) -> Recipe:
    """One of `names`, or the path of a TOML file. Raises ModelError naming what cannot be used."""
    own = names()
    if name in own:
        return parse(importlib.resources.files(__name__).joinpath(f"{name}.toml").read_text("utf-8"), name)
    path = Path(name).expanduser()
    try:
        return parse(path.read_text("utf-8"), str(path))
    except OSError:
        raise ModelError(f"recipe {name!r} is neither a TOML file nor one of {', '.join(own)}") from None


def parse(text: str, name: str) -> Recipe:
    """`name` is for messages. Raises ModelError."""
    try:
        recipe = msgspec.toml.decode(text, type=Recipe)
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError) as error:
        raise ModelError(f"recipe {name}: {error}") from None
    for number, rule in enumerate(recipe.rules, 1):
        where = f"recipe {name}: rule {number}"
        known = (*FORMATS, *DENSE, KEEP)
        if rule.format not in known:
            raise ModelError(f"{where}: format {rule.format!r} is unknown; known: {', '.join(known)}")
        if rule.last is not None and not 0 < rule.last <= 1:
            raise ModelError(f"{where}: last is {rule.last}; expected a share above 0, at most 1")
        if not rule.tensors:
            raise ModelError(f"{where}: tensors is empty; expected patterns of names")
        if rule.scales is not None and not _may_scale(rule.format, rule.scales):
            raise ModelError(f"{where}: format {rule.format} has no scales in {rule.scales}")
    return recipe


def _may_scale(format: str, scales: str) -> bool:
    if format == "fp8-block":
        return scales in ("bfloat16", "float32")
    return format in FORMATS and FORMATS[format].integer and scales in ("bfloat16", "float16")
