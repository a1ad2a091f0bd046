"""`python -m services.engine.plan`: what a model, its cache and its work take on a GPU (`samovar plan`).

Needs no GPU, and reads the headers of the model's files only. Exit codes: 0, 1 when it does not fit, 2 when the model
or an option cannot be used.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console

from services import settings
from services.engine.config import EngineConfig
from services.engine.memory_advice import DoesNotFit, plan
from services.engine.memory_plan import MemoryPlan
from services.engine.model.config import ModelError
from services.engine.plan_table import show, show_misfit
from services.engine.sizing import alternatives, sizes, total_bytes, wish
from services.engine.weights import recipes
from services.engine.weights.opening import open_model
from services.engine.weights.resolve import resolve
from services.settings import SettingsError, variable

OK, TOO_LARGE, UNUSABLE = 0, 1, 2
_DRAFTS = 5
"""Tokens that a head for multi-token prediction drafts at most."""
_WIDTH = 118
"""Of the table where stdout is no terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    try:
        show(_plan(arguments), console)
    except DoesNotFit as error:
        show_misfit(error, console)
        return TOO_LARGE
    except (ModelError, SettingsError) as error:
        print(f"samovar plan: {error}", file=sys.stderr)
        return UNUSABLE
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samovar plan",
        description="Show how a GPU's memory would be shared out between weights, cache and work. Needs no GPU.",
        epilog="An option with a SAMOVAR_ name sets what the engine reads from its environment, here as there.",
    )

    def option(flag: str, field: str, help: str, metavar: str) -> None:
        parser.add_argument(flag, dest=field, help=f"{help} ({variable(field)})", metavar=metavar)

    option("--model", "model", "a GGUF file, a folder of safetensors or of `samovar pack`, or a hub id", "MODEL")
    option("--recipe", "recipe", "as packed by this recipe; nothing is packed", "RECIPE")
    option("--vram", "vram", "memory of the GPU, like 16GiB; left out: what the one here has free", "SIZE")
    option("--context", "max_model_len", "tokens that each session must hold; left out: as many as fit", "TOKENS")
    option("--kv-format", "kv_format", "how K and V are stored", "FORMAT")
    option("--state-dtype", "state_dtype", "of recurrent states as they are stored", "DTYPE")
    option("--chunk", "max_batch_tokens", "tokens of one step", "TOKENS")
    option("--max-running", "max_running", "requests in a batch", "N")
    option("--device", "device", "cuda or cpu; auto plans for CUDA", "DEVICE")
    option("--dtype", "dtype", "of weights and activations", "DTYPE")
    parser.add_argument("--sessions", type=_positive, default=1, metavar="N", help="that hold their context at once")
    parser.add_argument(
        "--spec", type=_drafts, default=0, metavar="mtp:N", help="N tokens drafted by the model's own head, 1 to 5"
    )
    return parser


def _plan(arguments: argparse.Namespace) -> MemoryPlan:
    """Raises ModelError, and SettingsError (DoesNotFit where only the size is wrong)."""
    given = {name: value for name, value in vars(arguments).items() if name not in ("sessions", "spec")}
    config = settings.load(EngineConfig, **given)
    device = torch.device("cpu" if config.device == "cpu" else "cuda")
    recipe = recipes.load(config.recipe) if config.recipe else None
    source = open_model(resolve(config.model))
    total = int(config.vram)
    if not total:
        if device.type == "cpu" or not torch.cuda.is_available():
            raise SettingsError("how much memory is there? Write --vram 16GiB, or the like")
        total = total_bytes(config, device) or 0
    wanted = replace(
        wish(source, config, device, total),
        sessions=arguments.sessions,
        drafts=arguments.spec,
        must=bool(config.max_model_len),
    )
    drafts = arguments.spec > 0
    measured = sizes(source, config, device, drafts, recipe)
    return plan(measured, wanted, lambda: alternatives(source, config, device, drafts, recipe))


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def _drafts(text: str) -> int:
    kind, _, count = text.partition(":")
    if kind != "mtp" or not 1 <= int(count) <= _DRAFTS:
        raise ValueError
    return int(count)


if __name__ == "__main__":
    sys.exit(main())
