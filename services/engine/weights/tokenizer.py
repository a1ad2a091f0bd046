"""The text side of a model folder as `transformers` writes it, as a `TokenizerBundle`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.engine.model.config import ModelError
from services.protocol.events import SpecialTokens, TokenizerBundle

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>")
"""Special tokens that end an answer in every model that has them, whatever its files say."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelError when the file is missing or holds no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def read_bundle(folder: Path, config: Mapping[str, Any]) -> TokenizerBundle:
    """`config`: the folder's config.json. Raises ModelError naming the file that is missing or broken."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(
            f"{path} is missing: only tokenizers of that format are supported "
            "(transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it)"
        )
    tokenizer = read_json(path)
    settings = _optional(folder / "tokenizer_config.json")
    generation = _optional(folder / "generation_config.json")
    ids = _added_ids(tokenizer)
    texts = {key: text for key in _NAMED if (text := _token_text(settings.get(key))) is not None}
    vocabulary = tokenizer.get("model", {}).get("vocab", {})

    def token_id(text: str | None) -> int | None:
        return None if text is None else ids.get(text, vocabulary.get(text) if isinstance(vocabulary, dict) else None)

    stops = {token_id(texts.get("eos_token"))}
    for source in (generation, config):
        value = source.get("eos_token_id")
        stops |= set(value) if isinstance(value, list) else {value}
    stops |= {ids.get(text) for text in END_OF_TURN}
    bos_id = token_id(texts.get("bos_token"))
    return TokenizerBundle(
        tokenizer_json=path.read_text(encoding="utf-8"),
        chat_template=_chat_template(folder, settings),
        special=SpecialTokens(
            bos_id=bos_id,
            add_bos=bos_id is not None and _adds_bos(settings, tokenizer, texts["bos_token"]),
            stop_ids=tuple(sorted(stop for stop in stops if isinstance(stop, int))),
            tokens=texts,
        ),
        generation_defaults=_sampling_defaults(generation),
    )


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """`do_sample: false` is greedy, whatever temperature stands beside it, as `transformers` reads it."""
    values = {
        key: float(generation[key])
        for key in _SAMPLING
        if isinstance(generation.get(key), (int, float)) and not isinstance(generation[key], bool)
    }
    return values | {"temperature": 0.0} if generation.get("do_sample") is False else values


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _added_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Of the special added tokens."""
    return {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or () if token.get("special")}


def _token_text(value: Any) -> str | None:
    """A token as tokenizer_config.json names it: the text, or an object with it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _adds_bos(settings: Mapping[str, Any], tokenizer: Mapping[str, Any], bos: str) -> bool:
    """tokenizer_config.json says so, or the tokenizer's own template begins with it."""
    if isinstance(settings.get("add_bos_token"), bool):
        return settings["add_bos_token"]
    processor = tokenizer.get("post_processor") or {}
    for step in processor.get("processors") or [processor]:
        first = next(iter(step.get("single") or ()), {}) if step.get("type") == "TemplateProcessing" else {}
        if first.get("SpecialToken", {}).get("id") == bos:
            return True
    return False


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template", "")
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template", "") for item in template}
        return named.get("default") or next(iter(named.values()), "")
    return template or ""
