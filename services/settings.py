"""How every service reads its settings: frozen structs from `SAMOVAR_*` environment variables.

A config class is a frozen `msgspec.Struct`. The setting of field `kv_arena` is the variable `SAMOVAR_KV_ARENA`;
its type, bounds and description are those of the field's annotation, so that validation, the error message and the
generated page `docs/configuration.md` cannot disagree.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

PREFIX = "SAMOVAR_"

_UNITS = {
    "": 1,
    "B": 1,
    "K": 2**10,
    "KIB": 2**10,
    "M": 2**20,
    "MIB": 2**20,
    "G": 2**30,
    "GIB": 2**30,
    "T": 2**40,
    "TIB": 2**40,
}
_DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class SettingsError(ValueError):
    """A setting that cannot be used; the message names the variable, the value and what to write instead."""


class ByteSize(int):
    """A number of bytes, written `4GiB`, `512MiB`, `2GB` or plainly `1048576`."""

    @classmethod
    def parse(cls, text: str) -> "ByteSize":
        number = text.strip().rstrip("BKMGTibkmgtI ")
        unit = text.strip()[len(number) :].strip().upper()
        scale = _UNITS.get(unit) or _DECIMAL_UNITS.get(unit)
        try:
            value = float(number) * (scale or 0)
        except ValueError:
            value = -1.0
        if scale is None or value < 0:
            raise ValueError(f"{text!r} is no size: write it like 4GiB, 512MiB or 1048576")
        return cls(value)

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


def _decode(kind: type, value: Any) -> Any:
    if kind is ByteSize:
        return ByteSize.parse(str(value))
    raise TypeError(f"no setting may have the type {kind}")


def load(config: type[Config], environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
    """Read a config from the environment; `overrides` (from CLI flags, None = not given) win.

    An empty variable counts as not set. Raises SettingsError naming the variable at the first bad value.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for field in config.__struct_fields__:
        raw = overrides.get(field)
        if raw is None:
            raw = environ.get(variable(field)) or None
        if raw is not None:
            values[field] = raw if not isinstance(raw, str) or not _is_tuple(config, field) else _split(raw)
    for field, value in values.items():
        try:
            msgspec.convert({field: value}, _single(config, field), strict=False, dec_hook=_decode)
        except (msgspec.ValidationError, ValueError) as error:
            reason = str(error).replace(f" - at `$.{field}`", "")
            raise SettingsError(f"{variable(field)}={value!r}: {reason}") from None
    try:
        return msgspec.convert(values, config, strict=False, dec_hook=_decode)
    except msgspec.ValidationError as error:  # a __post_init__ that compares fields
        raise SettingsError(str(error)) from None


def _is_tuple(config: type[Struct], field: str) -> bool:
    kind = get_type_hints(config)[field]
    return get_origin(kind) is tuple


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _single(config: type[Struct], field: str) -> type[Struct]:
    kind = get_type_hints(config, include_extras=True)[field]
    return msgspec.defstruct("One", [(field, kind)])


def table(config: type[Struct]) -> list[tuple[str, str, str, str]]:
    """Rows (variable, type, default, description) of a config, for the generated page."""
    hints = get_type_hints(config, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(config):
        kind = hints[field.name]
        text = next((m.description for m in get_args(kind)[1:] if isinstance(m, Meta) and m.description), "")
        plain = get_type_hints(config)[field.name]
        default = "" if field.default in (msgspec.NODEFAULT, None, "", ()) else field.default
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        rows.append((variable(field.name), _type_name(plain), str(default), text))
    return rows


def _type_name(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return "list"
    args = [a for a in get_args(kind) if a is not type(None)]
    if args and all(isinstance(a, str) for a in args):
        return " | ".join(args)
    if args:
        return _type_name(args[0])
    return {"ByteSize": "size", "str": "text", "int": "number", "float": "number", "bool": "yes/no"}[kind.__name__]
