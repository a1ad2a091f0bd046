"""`samovar pack`, the hub's cache, and packing on first use."""

import fcntl
import hashlib
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.config import EngineConfig
from services.engine.model.config import ModelError
from services.engine.weights import hub, pack
from services.engine.weights.artifact import manifest
from services.engine.weights.artifact.reader import ArtifactCheckpoint
from services.engine.weights.loader import LoadedModel, load_model
from services.engine.weights.packed import pack_folder, packed_model
from services.engine.weights.resolve import Located, hub_id, resolve
from tests.engine.tiny_models import Bench, random_ids, row
from tests.engine.weights.random_folders import random_folder

CPU = torch.device("cpu")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_folder(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """The hub's cache as its client leaves it, of owner/name at main; without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / COMMIT
    for path in (repository / "blobs", repository / "refs", snapshot):
        path.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for path in folder.iterdir():
        large = path.suffix == ".safetensors"
        blob = repository / "blobs" / (hashlib.sha256 if large else hashlib.sha1)(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    return repository


def test_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert pack.main([str(folder), "--recipe", "nvfp4-mixed", "-o", str(out), "--device", "cpu"]) == pack.OK
    printed = capsys.readouterr().out
    lines = {tuple(line.split()[:2]): line.split() for line in printed.splitlines() if line}
    # 3 layers of 2 matrices; 4.5 bits and the tensor's scale in each row.
    assert lines["mlp", "nvfp4"][2:4] == ["6", str(f"{3 * 3 * 192 * 128:,}")]
    assert 4.5 < float(lines["mlp", "nvfp4"][4]) < 4.8
    assert 7 < float(lines["mlp", "nvfp4"][6].rstrip("%")) < 10
    assert 2 < float(lines["mlp", "fp8"][6].rstrip("%")) < 3
    assert lines["embedding", "fp8"][2] == "1"
    assert "samovar up --model" in printed
    provenance = manifest.read(out).provenance
    assert (provenance.source, provenance.recipe) == (str(folder), "nvfp4-mixed")
    assert pack.main([str(out), "--verify"]) == pack.OK
    shard = next(out.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert pack.main([str(out), "--verify"]) == pack.DAMAGED
    assert "its checksum differs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["SOURCE"], "name the folder to write: -o FOLDER"),
        (["SOURCE", "-o", "OUT", "--recipe", "int9"], "recipe 'int9' is neither a TOML file nor one of"),
        (["/nowhere", "-o", "OUT"], "/nowhere: no such file or folder, and no hub id"),
        (["SOURCE", "--verify"], "samovar.json cannot be read"),
    ],
)
def test_what_cannot_be_used(
    folder: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"SOURCE": str(folder), "OUT": str(tmp_path / "out")}
    assert pack.main([names.get(argument, argument) for argument in arguments]) == pack.UNUSABLE
    assert message in capsys.readouterr().err


def load(**settings: str) -> LoadedModel:
    return load_model(EngineConfig(device="cpu", **settings), lambda share, what: None)  # type: ignore[arg-type]


def test_served(folder: Path, tmp_path: Path) -> None:
    """A packed model computes what a plain one with its decoded weights computes; another recipe is another model."""
    assert pack.main([str(folder), "--recipe", "int4", "-o", str(tmp_path / "out"), "--device", "cpu"]) == pack.OK
    loaded = load(model=str(tmp_path / "out"))
    assert loaded.name == "out"
    assert loaded.mtp is not None
    packed = ArtifactCheckpoint(tmp_path / "out")
    decoded = load_file(folder / "model.safetensors")
    for name, weight in decoded.items():
        decoded[name] = torch.empty(weight.shape)
        packed.read(name, decoded[name])
    save_file(decoded, folder / "model.safetensors")
    plain = load(model=str(folder))
    ids = random_ids(40, seed=1)
    logits = [Bench(model.model).run(row(ids, 0, 40, [0], state=0)) for model in (loaded, plain)]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)
    assert loaded.fingerprint != plain.fingerprint
    assert loaded.bundle == plain.bundle


def test_packed_on_first_use(folder: Path, tmp_path: Path) -> None:
    settings = {"model": str(folder), "recipe": "fp8", "pack_dir": str(tmp_path / "packed")}
    first = load(**settings)
    (out,) = [path for path in (tmp_path / "packed").iterdir() if path.is_dir()]
    written = (out / manifest.FILE).stat().st_mtime_ns
    assert first.name == "source"
    assert first.fingerprint == load(**settings).fingerprint
    assert (out / manifest.FILE).stat().st_mtime_ns == written
    # Another recipe and other weights are other models.
    assert load(**{**settings, "recipe": "int4"}).fingerprint != first.fingerprint
    random_folder(folder, hidden_size=64)
    assert load(**settings).fingerprint != first.fingerprint
    assert len([path for path in (tmp_path / "packed").iterdir() if path.is_dir()]) == 3
    # What is packed by the recipe already is served as it is.
    assert resolve(str(out)) == packed_model(str(out), "fp8", tmp_path / "packed", CPU, lambda share, what: None)


def test_the_hub_is_asked_once(cache: Path, tmp_path: Path) -> None:
    def located(spec: str) -> Located:
        return packed_model(spec, "fp8", tmp_path / "packed", CPU, lambda share, what: None)

    first = located("hf:owner/name@main")
    assert (first.kind, first.name) == ("artifact", "owner/name")
    assert manifest.read(first.path).provenance.source == "hf:owner/name@main"
    shutil.rmtree(cache)
    assert located("hf:owner/name@main") == located("owner/name@main") == first
    with pytest.raises(ModelError, match="owner/name: the hub cannot be reached"):
        located("hf:owner/name@other")


def test_one_packs_while_others_wait(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    waiting, found = threading.Event(), []

    def progress(share: float, what: str) -> None:
        said.append(what)
        if what.startswith("another process is packing"):
            waiting.set()

    def located() -> Located:
        return packed_model(str(folder), "fp8", tmp_path / "packed", CPU, progress)

    out = located().path
    shutil.rmtree(out)
    with out.with_name(f"{out.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: found.append(located()))
        thread.start()
        assert waiting.wait(60)
        assert not out.exists()
    thread.join(60)
    assert found[0].path == out
    assert (out / manifest.FILE).exists()


def test_where_packed_models_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert pack_folder("") == tmp_path / "samovar" / "packed"
    assert pack_folder("/models") == Path("/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pack_folder("") == tmp_path / ".cache" / "samovar" / "packed"


def test_hub_ids(cache: Path) -> None:
    assert hub_id("hf:owner/name@refs/pr/3") == ("owner/name", "refs/pr/3")
    assert hub_id("owner/name") == ("owner/name", None)
    assert hub_id("owner/name.gguf") is None
    for spec in ("owner/name", "hf:owner/name", "hf:owner/name@main", f"hf:owner/name@{COMMIT}"):
        assert resolve(spec) == Located("folder", cache / "snapshots" / COMMIT, "owner/name")


def test_without_the_hub(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack.main(["hf:other/name@v2", "-o", str(tmp_path / "out")]) == pack.UNUSABLE
    said = capsys.readouterr().err
    assert "fetch from huggingface.co/other/name/tree/v2 into a folder, and give its path" in said
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model*.safetensors"):
        assert name in said


def test_a_gguf_file_of_the_hub(cache: Path) -> None:
    snapshot = cache / "snapshots" / COMMIT
    (snapshot / "tiers").mkdir()
    (snapshot / "tiers" / "model-Q4_K.gguf").write_bytes(b"GGUF")
    for spec in ("hf:owner/name/tiers/model-Q4_K.gguf", f"hf:owner/name/tiers/model-Q4_K.gguf@{COMMIT}"):
        assert resolve(spec) == Located("gguf", snapshot / "tiers" / "model-Q4_K.gguf", "model")
    with pytest.raises(ModelError, match="owner/name: the hub cannot be reached"):
        resolve("hf:owner/name/none.gguf")


def test_a_damaged_download(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = cache / "snapshots" / COMMIT
    assert list(hub.checksums(snapshot)) == [snapshot / "model.safetensors"]
    assert hub.checksums(snapshot / "model.safetensors") == hub.checksums(snapshot)
    assert hub.checksums(snapshot.resolve().parent) == {}
    arguments = ["hf:owner/name", "--recipe", "keep", "-o", str(tmp_path / "out"), "--device", "cpu"]
    assert pack.main(arguments) == pack.OK
    blob = (snapshot / "model.safetensors").resolve()
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    assert pack.main([*arguments[:-3], str(tmp_path / "again")]) == pack.UNUSABLE
    assert f"model.safetensors is damaged: remove {blob}" in capsys.readouterr().err
