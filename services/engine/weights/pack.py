"""`python -m services.engine.weights.pack SOURCE -o FOLDER`: writes a model into a folder of ours (`samovar pack`).

Exit codes: 0, 1 when what was written cannot be read again or a folder to verify is damaged, 2 when source, recipe or
folder cannot be used, 130 after Ctrl-C; the same command then goes on where it was.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from services.engine.model.config import ModelError
from services.engine.weights import hub, recipes
from services.engine.weights.artifact.reader import ArtifactCheckpoint
from services.engine.weights.artifact.writer import Job
from services.engine.weights.fingerprint import content_hash
from services.engine.weights.opening import open_model
from services.engine.weights.pack_report import Meter, table
from services.engine.weights.resolve import resolve

OK, DAMAGED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        if arguments.verify:
            return _verify(Path(arguments.source).expanduser())
        return _pack(arguments)
    except ModelError as error:
        print(f"samovar pack: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("samovar pack: interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samovar pack",
        description="Write a model into a folder of Samovar's own, with its weights in the formats of a recipe.",
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="a GGUF file, a folder of safetensors, hf:NAME or hf:NAME@REVISION"
    )
    parser.add_argument(
        "--recipe", default="keep", help=f"{', '.join(recipes.names())}, or a TOML file (default: keep)"
    )
    parser.add_argument("-o", "--output", metavar="FOLDER", help="where to; made if it is missing")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="that encodes")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; 0 takes all cores")
    parser.add_argument(
        "--verify", action="store_true", help="only compare the checksums of SOURCE, a folder that was packed"
    )
    return parser


def _pack(arguments: argparse.Namespace) -> int:
    if arguments.output is None:
        raise ModelError("name the folder to write: -o FOLDER")
    recipe = recipes.load(arguments.recipe)
    device = _device(arguments.device)
    located = resolve(arguments.source)
    if hub.checksums(located.path):
        print(f"samovar pack: comparing {located.path} with its checksums", file=sys.stderr)
        hub.verify(located.path)
    source = open_model(located)
    job = Job(
        source=source,
        name=arguments.source or located.name,
        source_hash=content_hash(source),
        recipe=recipe,
        recipe_name=arguments.recipe,
        out=Path(arguments.output).expanduser(),
        device=device,
    )
    with Meter() as meter:
        manifest = job.run(meter)
    print(table(manifest))
    print(f"{job.out} is packed and verified; serve it with: samovar up --model {job.out}")
    return OK


def _verify(folder: Path) -> int:
    checkpoint = ArtifactCheckpoint(folder)
    try:
        checkpoint.verify()
    except ModelError as error:
        print(f"samovar pack: {error}", file=sys.stderr)
        return DAMAGED
    print(f"{folder}: {len(checkpoint.manifest.shards)} files are as they were written")
    return OK


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda, but torch finds no CUDA device here; cpu and auto work")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    sys.exit(main())
