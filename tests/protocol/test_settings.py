"""Settings: every type, every kind of bad value, and the page that is generated from them."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from services.cli import configuration
from services.cli.config import UpConfig
from services.engine.config import EngineConfig
from services.gateway.config import GatewayConfig
from services.kvstore.config import KvStoreConfig
from services.settings import ByteSize, SettingsError, describe, load, table, variable

CONFIGS = (UpConfig, GatewayConfig, EngineConfig, KvStoreConfig)


class Sample(Struct, frozen=True, kw_only=True):
    text: Annotated[str, describe("Any text.")] = "default"
    name: Annotated[str, describe("A short name.", pattern="^[a-z]{1,8}$")] = "abc"
    count: Annotated[int, describe("A count.", ge=1, le=10)] = 5
    limit: Annotated[int, describe("A limit.", ge=1)] = 9
    seconds: Annotated[float, describe("A time.", gt=0)] = 1.5
    on: Annotated[bool, describe("A switch.")] = False
    kind: Annotated[Literal["red", "blue"], describe("A colour.")] = "red"
    size: Annotated[ByteSize, describe("A size.")] = ByteSize(2**20)
    items: Annotated[tuple[str, ...], describe("A list.")] = ("x", "y")


class Required(Struct, frozen=True, kw_only=True):
    path: Annotated[str, describe("A path.")]


class Compared(Struct, frozen=True, kw_only=True):
    least: Annotated[int, describe("The least.")] = 0
    most: Annotated[int, describe("The most.")] = 10

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError("SAMOVAR_LEAST must not exceed SAMOVAR_MOST")


def test_nothing_set_gives_the_defaults() -> None:
    assert load(Sample, {}) == Sample()
    assert load(Sample, {"SAMOVAR_COUNT": "", "SAMOVAR_ITEMS": "", "COUNT": "7"}) == Sample()


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("text", "7", "7"),
        ("text", " as it is ", " as it is "),
        ("text", "null", "null"),
        ("name", "abcdefgh", "abcdefgh"),
        ("count", "10", 10),
        ("count", " 3\n", 3),
        ("limit", "2", 2),
        ("seconds", "0.25", 0.25),
        ("seconds", "3", 3.0),
        ("seconds", "1e3", 1000.0),
        *[("on", text, True) for text in ("1", "true", "True", "YES", "on")],
        *[("on", text, False) for text in ("0", "false", "no", "OFF")],
        ("kind", "blue", "blue"),
        ("size", "4GiB", 4 * 2**30),
        ("items", "a", ("a",)),
        ("items", " a, b ,,c,", ("a", "b", "c")),
        ("items", ",", ()),
    ],
)
def test_a_variable_of_each_type(field: str, text: str, value: Any) -> None:
    got = getattr(load(Sample, {variable(field): text}), field)
    assert got == value
    assert type(got) is ByteSize if field == "size" else type(got) is type(value)


@pytest.mark.parametrize(
    ("field", "text", "wanted"),
    [
        ("name", "Abc", "text that matches ^[a-z]{1,8}$"),
        ("count", "0", "a whole number from 1 to 10"),
        ("count", "11", "a whole number from 1 to 10"),
        ("count", "1.5", "a whole number from 1 to 10"),
        ("count", "many", "a whole number from 1 to 10"),
        ("limit", "0", "a whole number of at least 1"),
        ("seconds", "0", "a number above 0"),
        ("seconds", "nan", "a number above 0"),
        ("seconds", "inf", "a number above 0"),
        ("seconds", "1 s", "a number above 0"),
        ("on", "maybe", "one of yes, no"),
        ("kind", "green", "one of red, blue"),
        ("size", "big", "a size like 4GiB, 512MiB or 1048576"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_to_write(field: str, text: str, wanted: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load(Sample, {variable(field): text})
    assert str(raised.value) == f"{variable(field)}={text!r}: write {wanted}"


def test_overrides_win_and_are_checked_too() -> None:
    environ = {"SAMOVAR_COUNT": "2", "SAMOVAR_SIZE": "1KiB"}
    config = load(Sample, environ, count=3, seconds=2, items=["p"], size=ByteSize(7), on=None, text=None)
    assert config == Sample(count=3, seconds=2.0, items=("p",), size=ByteSize(7))
    assert load(Sample, environ, count="4", items="p,q", size=4096) == Sample(
        count=4, items=("p", "q"), size=ByteSize(4096)
    )
    with pytest.raises(SettingsError, match="SAMOVAR_COUNT=99"):
        load(Sample, environ, count=99)


def test_a_setting_without_default_must_be_set() -> None:
    assert load(Required, {"SAMOVAR_PATH": "/x"}).path == "/x"
    with pytest.raises(SettingsError, match="SAMOVAR_PATH is not set: write text"):
        load(Required, {})


def test_fields_that_contradict_each_other() -> None:
    assert load(Compared, {"SAMOVAR_LEAST": "10"}).least == 10
    with pytest.raises(SettingsError, match="SAMOVAR_LEAST must not exceed SAMOVAR_MOST"):
        load(Compared, {"SAMOVAR_LEAST": "11"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1048576", 2**20),
        ("12B", 12),
        ("1K", 2**10),
        ("1Ki", 2**10),
        ("1KiB", 2**10),
        ("1KB", 1000),
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("4gib", 4 * 2**30),
        (" 4 GiB ", 4 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("1TiB", 2**40),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert ByteSize.parse(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e3", "nan", "inf", "4XiB", "4 GiB 2", "1,5GiB", "0x10", "٤GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 4GiB"):
        ByteSize.parse(text)


@given(st.integers(0, 2**60))
def test_a_size_reads_back_what_it_writes(size: int) -> None:
    assert ByteSize.parse(str(ByteSize(size))) == size


def test_the_table_says_what_the_annotations_say() -> None:
    assert table(Sample) == [
        ("SAMOVAR_TEXT", "text", "default", "Any text."),
        ("SAMOVAR_NAME", "text", "abc", "A short name."),
        ("SAMOVAR_COUNT", "whole number from 1 to 10", "5", "A count."),
        ("SAMOVAR_LIMIT", "whole number of at least 1", "9", "A limit."),
        ("SAMOVAR_SECONDS", "number above 0", "1.5", "A time."),
        ("SAMOVAR_ON", "yes | no", "no", "A switch."),
        ("SAMOVAR_KIND", "red | blue", "red", "A colour."),
        ("SAMOVAR_SIZE", "size", "1MiB", "A size."),
        ("SAMOVAR_ITEMS", "list", "x,y", "A list."),
    ]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_of_a_service_is_described_and_takes_its_own_default(config: type[Struct]) -> None:
    assert load(config, {}) == config()
    for name, kind, default, text in table(config):
        assert kind
        assert text.endswith("."), name
        if default:
            assert load(config, {name: default}) == config()


def test_settings_of_the_same_name_have_the_same_type() -> None:
    seen: dict[str, str] = {}
    for config in CONFIGS:
        for name, kind, _, _ in table(config):
            assert seen.setdefault(name, kind) == kind


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    page = (root / configuration.PAGE).read_text(encoding="utf-8")
    assert page == configuration.page(), "run `make docs`"
    for config in CONFIGS:
        assert all(f"| `{name}` |" in page for name, *_ in table(config))
    rows = [line.replace(r"\|", "") for line in page.splitlines() if line.startswith("|")]
    assert all(row.count("|") == 5 for row in rows), "a bar in a cell would break the table"

    written = tmp_path / "page.md"
    subprocess.run([sys.executable, "-m", "services.cli.configuration", str(written)], cwd=root, check=True, timeout=60)
    assert written.read_text(encoding="utf-8") == page
