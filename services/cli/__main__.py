"""The command `samovar` (also `python -m services.cli`)."""

import argparse
import sys
from collections.abc import Sequence

from services.cli import cache, engine_tool, up
from services.cli.release import release
from services.settings import PREFIX, variable


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for a failure, 2 for options or settings that cannot be used."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.run not in (_pack, _plan):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return arguments.run(arguments, rest)
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="samovar", description="A local LLM serving stack for coding agents.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands)
    packer = commands.add_parser("pack", help="write a model with quantized weights into a folder", add_help=False)
    packer.set_defaults(run=_pack)
    planner = commands.add_parser("plan", help="show what a model takes on a GPU, and what fits", add_help=False)
    planner.set_defaults(run=_plan)
    _add_cache(commands)
    told = commands.add_parser("version", help="print the version")
    told.set_defaults(run=_version)
    return parser


def _add_up(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "up",
        help="start the whole stack on this machine",
        description="Start NATS, kvstore, engines and gateway on this machine, and keep them running until Ctrl-C.",
        epilog="Each option sets an environment variable of the services; docs/configuration.md lists all of them.",
    )
    parser.set_defaults(run=_up)

    def option(flag: str, field: str, help: str, metavar: str) -> None:
        parser.add_argument(flag, dest=variable(field), help=f"{help} ({variable(field)})", metavar=metavar)

    option("--model", "model", "a GGUF file, a folder of safetensors, a hub id, or scripted:FILE.jsonl", "MODEL")
    option("--recipe", "recipe", "pack the model by this recipe on first use, and serve that", "RECIPE")
    option("--model-name", "model_name", "the name that clients send as `model`", "NAME")
    option("--device", "device", "cpu, cuda or auto", "DEVICE")
    option("--engines", "engines", "how many engines to start", "N")
    option("--host", "host", "address to serve on", "ADDRESS")
    option("--port", "port", "port to serve on; 0 takes a free one", "PORT")
    option("--nats-port", "nats_port", "loopback port of NATS; 0 takes a free one", "PORT")
    option("--max-model-len", "max_model_len", "longest prompt + output in tokens", "TOKENS")
    option("--vram", "vram", "device memory for all that an engine takes, like 16GiB", "SIZE")
    option("--kv-format", "kv_format", "how K and V are stored; docs/kv-formats.md", "FORMAT")
    option(
        "--state-dtype", "state_dtype", "of recurrent states as they are stored: float32, float16, bfloat16", "DTYPE"
    )
    option("--kv-pages", "kv_pages", "device pages of 64 tokens", "N")
    option("--kv-size", "kv_arena", "host memory for cache blocks, like 4GiB", "SIZE")
    option("--kv-disk", "kv_disk", "disk below that memory, like /var/lib/samovar/kv:64GiB", "FOLDER:SIZE")
    parser.add_argument(
        "--no-kvstore",
        dest=variable("kvstore"),
        action="store_const",
        const="false",
        help=f"run without a cache in host memory ({variable('kvstore')})",
    )
    parser.add_argument(
        "--verbose",
        dest=variable("verbose"),
        action="store_const",
        const="true",
        help=f"show all log lines of the services ({variable('verbose')})",
    )


def _add_cache(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "cache",
        help="show which contexts the engines have cached",
        description="Show the tree of contexts that the engines of a running stack have cached.",
        epilog="docs/cache.md says how to read it.",
    )
    parser.add_argument("--url", help="of the gateway; else the stack that runs on this machine", metavar="URL")
    parser.add_argument("--key", help=f"an API key of it; else the first of {variable('api_keys')}", metavar="KEY")
    parser.add_argument("--json", action="store_true", help="print what the gateway answers, for programs")
    parser.set_defaults(run=_cache)


def _up(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    return up.run(
        {name: text for name, text in vars(arguments).items() if name.startswith(PREFIX) and text is not None}
    )


def _cache(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    return cache.run(arguments.url, arguments.key, arguments.json)


def _pack(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    return engine_tool.run("pack", rest)  # whose options are the child's


def _plan(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    return engine_tool.run("plan", rest)


def _version(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    print(release())
    return 0


if __name__ == "__main__":
    sys.exit(main())
