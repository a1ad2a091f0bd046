"""Models that are packed when they are first asked for, and found again afterwards."""

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from services.engine.model.config import ModelError
from services.engine.weights import hub, recipes
from services.engine.weights.artifact import manifest
from services.engine.weights.artifact.writer import Job, Progress
from services.engine.weights.fingerprint import content_hash
from services.engine.weights.opening import open_model
from services.engine.weights.resolve import Located, hub_id, resolve

_WAIT_SECONDS = 0.5
_PACKING = 0.99


def pack_folder(setting: str) -> Path:
    """Where packed models are kept: SAMOVAR_PACK_DIR, or the user's cache where it is empty."""
    if setting:
        return Path(setting).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "samovar" / "packed"


def packed_model(spec: str, recipe_name: str, folder: Path, device: torch.device, progress: Progress) -> Located:
    """The model `spec` (as in `resolve`), packed by a recipe into a folder of its own within `folder`. A model of the
    hub that was packed once is not looked for on the hub again: remove its folder to have it anew. Of several processes
    one packs, the others wait. Raises ModelError."""
    recipe = recipes.load(recipe_name)
    named = hub_id(spec) if spec and not Path(spec).expanduser().exists() else None
    name = spec
    if named:
        name = f"hf:{named[0]}@{named[1]}" if named[1] else f"hf:{named[0]}"
        if known := _remembered(name, recipe.digest(), folder):
            return Located("artifact", known, named[0])
    progress(0.0, f"finding {spec or 'the model'}")
    located = resolve(spec)
    if located.kind == "artifact":
        packed_by = manifest.read(located.path).provenance.recipe_digest
        if not recipe.rules or packed_by == recipe.digest():
            return located
    source = open_model(located)
    source_hash = content_hash(source)
    key = hashlib.blake2b(f"{manifest.VERSION} {source_hash} {recipe.digest()}".encode(), digest_size=6).hexdigest()
    out = folder / f"{_plain(located.name)}-{_plain(Path(recipe_name).stem)}-{key}"
    with _alone(out, progress):
        if not (out / manifest.FILE).exists():
            progress(0.0, f"checking {located.name}")
            hub.verify(located.path)
            job = Job(source, name or located.name, source_hash, recipe, recipe_name, out, device)
            job.run(lambda share, what: progress(_PACKING * share, f"packing {what}"))
    return Located("artifact", out, located.name)


def _remembered(spec: str, recipe_digest: str, folder: Path) -> Path | None:
    for path in sorted(folder.glob(f"*/{manifest.FILE}")):
        try:
            provenance = manifest.read(path.parent).provenance
        except ModelError:  # of a newer version: whoever can read it packed it
            continue
        if (provenance.source, provenance.recipe_digest) == (spec, recipe_digest):
            return path.parent
    return None


@contextmanager
def _alone(out: Path, progress: Progress) -> Generator[None]:
    """Wait until no other process packs into `out`."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = out.with_name(f"{out.name}.lock").open("wb")
    except OSError as error:
        raise ModelError(f"{out.parent} cannot hold packed models: {error.strerror}") from None
    with lock:
        waited = 0.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(0.0, f"another process is packing this model ({waited:.0f} s)")
                time.sleep(_WAIT_SECONDS)
                waited += _WAIT_SECONDS
        yield


def _plain(name: str) -> str:
    """For the name of a folder."""
    return re.sub(r"[^\w.-]+", "--", name)
