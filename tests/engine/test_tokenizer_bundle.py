"""Tokenizers out of GGUF metadata, against those that transformers makes of the same files."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer

from services.engine.model.config import ModelError
from services.engine.weights.gguf_file import GgufFile
from services.engine.weights.gguf_tokenizer import read_bundle
from services.engine.weights.resolve import resolve
from tests.engine import gguf_files

MIXED = (
    (Path(__file__).parent / "mixed.txt").read_text(encoding="utf-8")
    # What an editor would not keep.
    + "CR LF\r\n\r\na lone CR\rend \r\n decomposed e\u0301 A\u030a, no-break\u00a0\u202fspaces\n"
)
texts = st.text() | st.text(alphabet=st.sampled_from(list("aAzZ09 \n\t\r.,'sStT-_éß中😀‍▁Ġ½<|>")), max_size=40)


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.from_str(read_bundle(GgufFile(resolve("").path).metadata).tokenizer_json)


@pytest.fixture(scope="module")
def smollm_oracle() -> PreTrainedTokenizerBase:
    path = resolve("").path
    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers does not know the pre-tokenizer `smollm` of GGUF and takes GPT-2's, which keeps digits together.
    oracle.backend_tokenizer.pre_tokenizer = SPLITS["smollm"]
    return oracle


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_smollm_on_mixed_text(smollm: Tokenizer, smollm_oracle: PreTrainedTokenizerBase) -> None:
    chat = f"<|im_start|>user\n{MIXED}<|im_end|>\n<|im_start|>assistant\n"
    for text in (MIXED, chat, *MIXED.splitlines(keepends=True)):
        assert ids(smollm, text) == smollm_oracle.encode(text, add_special_tokens=False)
        assert smollm.decode(ids(smollm, text), skip_special_tokens=False) == text
    assert smollm.decode(ids(smollm, "a<|im_end|>b")) == "ab"
    assert ids(smollm, "1234") == [smollm.token_to_id(digit) for digit in "1234"]


@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_smollm_on_any_text(smollm: Tokenizer, smollm_oracle: PreTrainedTokenizerBase, text: str) -> None:
    assert ids(smollm, text) == smollm_oracle.encode(text, add_special_tokens=False)


def test_smollm_text_side() -> None:
    bundle = read_bundle(GgufFile(resolve("").path).metadata)
    assert bundle.special.stop_ids == (0, 2)
    assert (bundle.special.bos_id, bundle.special.add_bos) == (1, False)
    assert bundle.special.tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in bundle.chat_template
    assert bundle.generation_defaults == {}


def metadata(tmp_path: Path, **entries: Any) -> tuple[dict[str, Any], Path]:
    """The entries after a round trip through a file, and the file."""
    path = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in entries.items():
        gguf_files.add(writer, f"tokenizer.{key.replace('__', '.')}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path).metadata, path


def train(split: pre_tokenizers.PreTokenizer, size: int = 700) -> Tokenizer:
    """A byte-level tokenizer over the mixed text, cut as `split` cuts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(MIXED.splitlines(keepends=True) * 2, trainer)
    tokenizer.add_tokens(["<think>", "a raw token"])
    return tokenizer


def entries_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    return {
        "ggml__model": "gpt2",
        "ggml__pre": pre,
        "ggml__tokens": tokens,
        "ggml__token_type": [3, 3, *[1] * (len(tokens) - 4), 4, 4],
        "ggml__merges": [" ".join(merge) for merge in model["merges"]],
        "ggml__eos_token_id": 1,
    }


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    # As in the tokenizer.json of SmolLM, GPT-2, Llama 3.
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "default": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
    "qwen2": Qwen2Tokenizer().backend_tokenizer.pre_tokenizer,
}


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_families(tmp_path: Path, pre: str) -> None:
    """Trained with the family's own pre-tokenizer; rebuilt from what a GGUF file keeps of it."""
    trained = train(SPLITS[pre])
    if pre == "qwen2":  # composed characters
        trained.normalizer = Qwen2Tokenizer().backend_tokenizer.normalizer
    read, _ = metadata(tmp_path, **entries_of(trained, pre))
    ours = Tokenizer.from_str(read_bundle(read).tokenizer_json)
    assert ours.get_vocab() == trained.get_vocab()
    for text in (MIXED, *MIXED.splitlines(), "x<think>y<|im_end|>z", "this is a raw token here", "", " ", "\n"):
        assert ids(ours, text) == ids(trained, text)
    assert ours.decode(ids(ours, "<think>b<|im_end|>")) == "<think>b"  # user-defined tokens are no special ones
    assert read_bundle(read).special.stop_ids == (0, 1)


def test_bos(tmp_path: Path) -> None:
    tokenizer = train(SPLITS["gpt-2"], size=300)
    for pre, said, expected in (
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
    ):
        entries = {**entries_of(tokenizer, pre), "ggml__bos_token_id": 0, "ggml__add_bos_token": said}
        special = read_bundle(metadata(tmp_path, **entries)[0]).special
        assert (special.bos_id, special.add_bos) == (0, expected)
    without = read_bundle(metadata(tmp_path, **entries_of(tokenizer, "llama-bpe"))[0]).special
    assert (without.bos_id, without.add_bos) == (None, False)


def sentencepiece_entries(**changes: Any) -> dict[str, Any]:
    """A vocabulary as Llama 2's: unknown, control, 256 bytes, pieces with falling scores, then single characters."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, limit_alphabet=80)
    trained.train_from_iterator(MIXED.splitlines() * 2, trainer)
    vocabulary = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    pieces = [piece for piece in vocabulary if len(piece) > 1] + [piece for piece in vocabulary if len(piece) == 1]
    specials = ["<unk>", "<s>", "</s>"]
    tokens = [*specials, *(f"<0x{n:02X}>" for n in range(256)), *pieces, "<|user|>"]
    return {
        "ggml__model": "llama",
        "ggml__tokens": tokens,
        "ggml__scores": [0.0] * 259 + [-float(n) for n in range(len(pieces))] + [0.0],
        "ggml__token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4],
        "ggml__bos_token_id": 1,
        "ggml__eos_token_id": 2,
        "ggml__unknown_token_id": 0,
        **changes,
    }


def test_sentencepiece(tmp_path: Path) -> None:
    read, path = metadata(tmp_path, **sentencepiece_entries())
    bundle = read_bundle(read)
    ours = Tokenizer.from_str(bundle.tokenizer_json)
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    # transformers adds no space before a text that has one, and none behind a special token; llama.cpp does.
    for text in (MIXED, *(line for line in MIXED.splitlines() if not line.startswith((" ", "\t"))), "😀"):
        assert ids(ours, text) == oracle.encode(text, add_special_tokens=False), text
        # The space sign itself is read as a space, as sentencepiece does.
        assert ours.decode(ids(ours, text), skip_special_tokens=False) == text.replace("▁", " ")
    assert len(ids(ours, "😀")) == 5  # the space, and four bytes
    assert ours.encode("a<|user|>b", add_special_tokens=False).tokens == ["▁a", "<|user|>", "▁", "b"]
    assert (bundle.special.bos_id, bundle.special.add_bos, bundle.special.stop_ids) == (1, True, (2,))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_sentencepiece_keeps_any_text(sentencepiece: Tokenizer, text: str) -> None:
    assert sentencepiece.decode(ids(sentencepiece, text), skip_special_tokens=False) == text.replace("▁", " ")


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    read, _ = metadata(tmp_path_factory.mktemp("spm"), **sentencepiece_entries())
    return Tokenizer.from_str(read_bundle(read).tokenizer_json)


def test_sentencepiece_without_prefix_space(tmp_path: Path) -> None:
    read, _ = metadata(tmp_path, **sentencepiece_entries(ggml__add_space_prefix=False))
    ours = Tokenizer.from_str(read_bundle(read).tokenizer_json)
    assert ours.encode("a", add_special_tokens=False).tokens == ["a"]
    assert ours.decode(ids(ours, " a b")) == " a b"


def test_sampling_defaults(tmp_path: Path) -> None:
    read, _ = metadata(tmp_path, **entries_of(train(SPLITS["gpt-2"], size=300), "gpt-2"))
    read |= {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    assert read_bundle(read).generation_defaults == {"temperature": 0.5, "top_k": 20.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml__scores": [1.0]}, "scores has 1 entries for"),
        ({"ggml__model": "unigram"}, "tokenizer.ggml.model 'unigram'"),
        ({"ggml__model": "gpt2", "ggml__merges": ["a", "b"]}, "merges holds 'a'"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    read, _ = metadata(tmp_path, **sentencepiece_entries(**changes))
    with pytest.raises(ModelError, match=message):
        read_bundle(read)
