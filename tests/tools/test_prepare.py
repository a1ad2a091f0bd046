import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from tests.tools.corpus import SHIPPED, make_data, write_corpus
from tools.train.data.corpus import ENGLISH, PYTHON, Selection, gather, is_held_out, is_usable
from tools.train.data.dataset import Dataset
from tools.train.data.page_text import read_text
from tools.train.data.prepare import prepare
from tools.train.data.vocabulary import ADDED_TOKENS, check_tokenizer, train_tokenizer


def test_html_becomes_its_visible_text(tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text(
        "<html><head><title>no</title></head><body><nav>menu</nav><h1>Title</h1><p>One\n   two &amp; three</p>"
        "<pre>a\n   b</pre><script>x()</script></body></html>"
    )
    assert read_text(page) == "Title\n\nOne two & three\n\na\n   b"


def test_gather_takes_distinct_usable_files_within_its_bounds(tmp_path: Path):
    text = "A sentence of plain text. " * 20
    for name in ("a/one.md", "a/two.md", "b/three.md", "tests/four.md", "c/five.bin"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name + text)
    (tmp_path / "b" / "copy.md").write_text("b/three.md" + text)
    (tmp_path / "b" / "short.md").write_text("short")
    (tmp_path / "b" / "wide.md").write_text("x" * 3000)
    (tmp_path / "b" / "foreign.md").write_text("ж" * 300)
    found = gather([tmp_path], ENGLISH)
    assert sorted(t.split("A")[0] for t in found) == ["a/one.md", "a/two.md", "b/three.md"]
    bounded = gather([tmp_path], Selection((".md",), 250, 250, 10_000, 1))
    assert len(bounded) == 2  # one of each folder
    assert all(len(t) == 250 for t in bounded)


def test_gather_does_not_depend_on_where_the_folder_lies(tmp_path: Path):
    first, _ = write_corpus(tmp_path / "x")
    second, _ = write_corpus(tmp_path / "elsewhere" / "y")
    assert gather([first], PYTHON) == gather([second], PYTHON)


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        gather([tmp_path / "nowhere"], PYTHON)


def test_non_ascii_and_long_lines_are_unusable():
    assert is_usable("plain text\n" * 30)
    assert not is_usable("short")
    assert not is_usable("é" * 10 + "plain text\n" * 30)
    assert not is_usable("x" * 2001)


def test_the_same_files_give_the_same_bytes(data: Path, tmp_path: Path):
    again = make_data(tmp_path / "corpus", tmp_path / "data")
    names = sorted(path.name for path in data.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (data / name).read_bytes() == (again / name).read_bytes(), name


def test_token_files_hold_the_texts_of_their_split(data: Path, tmp_path: Path):
    _, english = write_corpus(tmp_path)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    pages = [read_text(path) for path in english.iterdir()]
    for split in ("train", "held"):
        ids = np.load(data / f"english.{split}.npy")
        end = tokenizer.token_to_id("<|endoftext|>")
        texts = [tokenizer.decode(part[:-1].tolist()) for part in np.split(ids, np.flatnonzero(ids == end) + 1)[:-1]]
        assert sorted(texts) == sorted(page for page in pages if is_held_out(page) == (split == "held"))
        size = json.loads((data / "sizes.json").read_text())[f"english.{split}"]
        assert size == {"tokens": len(ids), "bytes": sum(len(t.encode()) for t in texts)}
        assert texts


def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path):
    python, english = write_corpus(tmp_path / "corpus")
    with pytest.raises(ValueError, match="has 4096 ids, the model has 4000"):
        prepare([python], [english], tmp_path / "out", SHIPPED / "tokenizer.json", 4000, 100_000)


def test_too_little_text_is_refused(tmp_path: Path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "only.py").write_text("x = 1\n" * 100)
    with pytest.raises(ValueError, match="give more folders"):
        prepare([folder], [folder], tmp_path / "out", SHIPPED / "tokenizer.json", 4096, 100_000)


def test_a_new_tokenizer_has_the_family_s_shape():
    text = "def read(path):\n    return 1234 + 56\n" * 3 + "The quick brown fox, naïve 日本語 🙂\r\n"
    tokenizer = train_tokenizer([text, "some other words for merges"], 300)
    check_tokenizer(tokenizer, 300)
    ids = tokenizer.encode(text + "<|im_end|><think>", add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text + "<|im_end|><think>"
    assert tokenizer.decode(ids) == text + "<think>"  # only the first three added tokens are special
    assert len(tokenizer.encode("1234", add_special_tokens=False).ids) == 4  # single digits


def test_the_shipped_tokenizer_is_of_this_shape_and_round_trips():
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    check_tokenizer(tokenizer, 4096)
    text = "for i in range(10):\n\tprint(i)  # naïve 日本語 🙂\n" + "".join(ADDED_TOKENS)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_added_tokens_must_be_the_last_ids():
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(20)}))
    with pytest.raises(ValueError, match="the id None, expected 11"):
        check_tokenizer(tokenizer, 20)


def test_a_dataset_reads_what_prepare_wrote(data: Path):
    dataset = Dataset(data, "held")
    assert dataset.vocab_size == 4096
    assert dataset.ordinary_ids == 4087
    assert dataset.token_id("<|im_end|>") == 4089
    assert dataset.decode(dataset.encode("Hello <think>").tolist()) == "Hello <think>"
    with pytest.raises(ValueError, match="no token <nope>"):
        dataset.token_id("<nope>")
    with pytest.raises(FileNotFoundError):
        Dataset(data / "missing", "train")
