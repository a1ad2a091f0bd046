"""The text side of the family's small model in this repository, as an engine would hand it to the gateway."""

from functools import cache
from pathlib import Path

from msgspec.structs import replace
from tokenizers import Tokenizer

from services.engine.weights.tokenizer import read_bundle
from services.protocol.events import ModelCard, TokenizerBundle
from tests.gateway.fake_engines import FakeEngines, card

FOLDER = Path(__file__).parents[2] / "models" / "samovar-tiny"


@cache
def tiny_bundle() -> TokenizerBundle:
    return read_bundle(FOLDER, {})


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tiny_bundle().tokenizer_json)


def encode(text: str) -> list[int]:
    return _tokenizer().encode(text, add_special_tokens=False).ids


def decode(ids: list[int]) -> str:
    return _tokenizer().decode(ids, skip_special_tokens=False)


def tiny_card() -> ModelCard:
    return replace(card("samovar-tiny"), vocab_size=4096)


def tiny_engines() -> FakeEngines:
    """Engines of that model; what they say is the test's."""
    return FakeEngines([tiny_card()], tiny_bundle())
