"""How every service reads its settings: frozen structs from `SAMOVAR_*` environment variables.

A config class is a frozen `msgspec.Struct`. The setting of field `kv_arena` is the variable `SAMOVAR_KV_ARENA`;
its type, bounds and description are those of the field's annotation, so that validation, the error message and the
generated page `docs/configuration.md` cannot disagree.
"""

import math
import os
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

PREFIX = "SAMOVAR_"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", re.IGNORECASE | re.ASCII)
_LETTERS = "KMGT"
_UNITS = {
    "": 1,
    "B": 1,
    # `4G`, `4Gi` (Kubernetes) and `4GiB` are the same, `4GB` is decimal.
    **{letter + end: 2 ** (10 * power) for power, letter in enumerate(_LETTERS, 1) for end in ("", "I", "IB")},
    **{letter + "B": 10 ** (3 * power) for power, letter in enumerate(_LETTERS, 1)},
}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_SIZE_EXAMPLE = "like 4GiB, 512MiB or 1048576"


class SettingsError(ValueError):
    """A setting that cannot be used; the message names the variable, the value and what to write instead."""


class ByteSize(int):
    """A number of bytes, written `4GiB`, `512MiB`, `2GB` or plainly `1048576`."""

    @classmethod
    def parse(cls, text: str) -> "ByteSize":
        """Raises ValueError that says how to write a size."""
        match = _SIZE.fullmatch(text.strip())
        scale = _UNITS.get(match[2].upper()) if match else None
        if match is None or scale is None:
            raise ValueError(f"{text!r} is no size: write it {_SIZE_EXAMPLE}")
        return cls(Decimal(match[1]) * scale)

    def __str__(self) -> str:
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            scale = _UNITS[unit.upper()]
            if self >= scale and self % scale == 0:
                return f"{int(self) // scale}{unit}"
        return f"{int(self)}B"


Config = TypeVar("Config", bound=Struct)


def describe(text: str, **bounds: Any) -> Meta:
    """The description of a setting, and its bounds (`ge`, `le`, `pattern`, ... as in `msgspec.Meta`)."""
    return Meta(description=text, **bounds)


NatsUrl = Annotated[str, describe("NATS server; user and password may be part of it.")]
MetricsPort = Annotated[int, describe("Port of /metrics; 0 serves none.", ge=0, le=65535)]
MetricsHost = Annotated[str, describe("Address of /metrics.")]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], describe("Least level that is logged.")]
DrainTimeout = Annotated[float, describe("Seconds that open streams get to finish on SIGTERM.", ge=0)]


def variable(field: str) -> str:
    """The environment variable that holds a field: `kv_arena` -> `SAMOVAR_KV_ARENA`."""
    return PREFIX + field.upper()


def load(config: type[Config], environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
    """Read a config from the environment; `overrides` (from CLI flags, None = not given) win.

    An empty variable counts as not set. Raises SettingsError naming the variable at the first bad value.
    """
    environ = os.environ if environ is None else environ
    hints = get_type_hints(config, include_extras=True)
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(config):
        name, kind = variable(field.name), hints[field.name]
        value = overrides.get(field.name)
        if value is None:
            value = environ.get(name) or None
        if value is not None:
            try:
                values[field.name] = _convert(value, kind)
            except (ValueError, msgspec.ValidationError):
                raise SettingsError(f"{name}={value!r}: write {_expected(kind)}") from None
        elif field.required:
            raise SettingsError(f"{name} is not set: write {_expected(kind)}")
    try:
        return config(**values)
    except ValueError as error:  # of a __post_init__ that compares fields
        raise SettingsError(str(error)) from None


def table(config: type[Struct]) -> list[tuple[str, str, str, str]]:
    """Rows (variable, type and bounds, default, description) of a config, for the generated page."""
    hints = get_type_hints(config, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(config):
        kind = hints[field.name]
        text = next((meta.description for meta in _metas(kind) if meta.description), "")
        rows.append((variable(field.name), _short(kind), _default(field.default), text))
    return rows


def _convert(value: Any, kind: Any) -> Any:
    """A variable's text, or an override of any type, as the annotation wants it. Raises ValueError or
    msgspec.ValidationError."""
    plain = _plain(kind)
    if plain is ByteSize:
        return value if isinstance(value, ByteSize) else ByteSize.parse(str(value))
    if isinstance(value, str):
        if get_origin(plain) is tuple:
            value = tuple(part.strip() for part in value.split(",") if part.strip())
        elif plain is not str:
            value = value.strip()
            if plain is bool:
                value = _BOOLEANS.get(value.lower(), value)
    value = msgspec.convert(value, kind, strict=False)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not finite")
    return value


def _plain(kind: Any) -> Any:
    """The type within Annotated."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _metas(kind: Any) -> list[Meta]:
    if get_origin(kind) is not Annotated:
        return []
    return [meta for meta in get_args(kind)[1:] if isinstance(meta, Meta)]


def _name(plain: Any) -> str:
    if get_origin(plain) is tuple:
        return "list"
    if get_origin(plain) is Literal:
        return " | ".join(map(str, get_args(plain)))
    return {ByteSize: "size", str: "text", int: "whole number", float: "number", bool: "yes | no"}[plain]


def _bounds(kind: Any) -> str:
    """` from 0 to 65535`, ` above 0`, ... or nothing."""
    words = []
    for meta in _metas(kind):
        if meta.ge is not None and meta.le is not None:
            words.append(f" from {meta.ge} to {meta.le}")
            continue
        bounds = (("of at least", meta.ge), ("above", meta.gt), ("of at most", meta.le), ("below", meta.lt))
        words += [f" {word} {bound}" for word, bound in bounds if bound is not None]
    return "".join(words)


def _short(kind: Any) -> str:
    """The type of a setting in the table."""
    return _name(_plain(kind)) + _bounds(kind)


def _expected(kind: Any) -> str:
    """What to write, for an error message."""
    plain = _plain(kind)
    if plain is ByteSize:
        return f"a size {_SIZE_EXAMPLE}"
    if plain is bool or get_origin(plain) is Literal:
        return "one of " + _name(plain).replace(" | ", ", ")
    patterns = [f" that matches {meta.pattern}" for meta in _metas(kind) if meta.pattern]
    article = "" if plain is str else "a "
    return f"{article}{_name(plain)}{_bounds(kind)}{''.join(patterns)}"


def _default(value: Any) -> str:
    """A field's default as one would write it; empty where there is none."""
    if value is None or value is msgspec.NODEFAULT:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
