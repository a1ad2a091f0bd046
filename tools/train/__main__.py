"""The command line: `python -m tools.train prepare | train | eval | draft-prompts`."""

import argparse
import os
import sys
import sysconfig
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
SHIPPED = HERE / "models" / "samovar-tiny"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.train", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_prepare(commands.add_parser("prepare", help="text folders -> a data folder"))
    add_train(commands.add_parser("train", help="a data folder -> a model folder"))
    add_eval(commands.add_parser("eval", help="measure a model folder"))
    add_draft_prompts(
        commands.add_parser("draft-prompts", help="a data folder -> prompts for `python -m bench tiny tiny-drafts`")
    )
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--python",
        type=Path,
        nargs="+",
        default=[Path(sysconfig.get_path("stdlib"))],
        help="folders with permissively licensed *.py files; default: this Python's library",
    )
    parser.add_argument(
        "--english",
        type=Path,
        nargs="+",
        required=True,
        help="folders with permissively licensed documentation (html, rst, md, txt)",
    )
    parser.add_argument("--megabytes", type=float, default=18.0, help="at most, of each of the two kinds (default 18)")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=SHIPPED / "tokenizer.json",
        help="default: the shipped model's, so that its weights can be trained on",
    )
    parser.add_argument("--new-tokenizer", action="store_true", help="train another one; fits no model that exists")
    parser.set_defaults(run=run_prepare)


def run_prepare(arguments: argparse.Namespace) -> None:
    from tools.train.data.prepare import prepare
    from tools.train.shape import ModelShape

    prepare(
        arguments.python,
        arguments.english,
        arguments.out,
        None if arguments.new_tokenizer else arguments.tokenizer,
        ModelShape().vocab_size,
        int(arguments.megabytes * 1e6),
    )


def add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="what `prepare` wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="a model folder to continue from; default: fresh weights")
    parser.add_argument("--plan", choices=["early", "late"], help="default: late with --start, else early")
    parser.add_argument("--steps", type=int, default=2600, help="of one or two micro-batches (default 2600)")
    parser.add_argument("--tokens", type=int, default=65536, help="of a micro-batch (default 65536)")
    parser.add_argument("--seed", type=int, default=0, help="of data and fresh weights; another one for each run")
    parser.add_argument("--rate", type=float, help="peak learning rate; default 0.02, with --start 0.014")
    parser.add_argument("--fall", type=float, help="last share with a falling rate; default 0.3, with --start 0.65")
    parser.add_argument("--floor", type=float, help="share of the rate at the end; default 0.1, with --start 0.02")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds; the rate falls earlier for it")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3), help="data processes")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.set_defaults(run=run_train)


def run_train(arguments: argparse.Namespace) -> None:
    import torch

    from tools.train.checkpoint import initial_parameters, load_model
    from tools.train.schedule import PLANS, Rate
    from tools.train.shape import ModelShape
    from tools.train.stream import StreamOptions
    from tools.train.trainer import TrainOptions, train

    start: Path | None = arguments.start
    if start:
        shape, parameters = load_model(start)
    else:
        shape = ModelShape()
        parameters = initial_parameters(shape, arguments.seed)
    defaults = Rate(0.014, 0.65, 0.02) if start else Rate(0.02, 0.3, 0.1)
    options = TrainOptions(
        stream=StreamOptions(
            data=arguments.data,
            plan=PLANS[arguments.plan or ("late" if start else "early")],
            steps=arguments.steps,
            tokens=arguments.tokens,
            seed=arguments.seed,
        ),
        rate=Rate(
            defaults.peak if arguments.rate is None else arguments.rate,
            defaults.fall if arguments.fall is None else arguments.fall,
            defaults.floor if arguments.floor is None else arguments.floor,
        ),
        out=arguments.out,
        files_from=start or SHIPPED,
        workers=arguments.workers,
        deadline=arguments.deadline,
    )
    started = time.monotonic()
    train(
        options,
        shape,
        parameters,
        torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")),
        log=lambda line: print(f"[{time.monotonic() - started:6.1f}] {line}", flush=True),
    )


def add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="what `prepare` wrote")
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    parser.add_argument("--lengths", default="2048,8192,32768,65536,131072,250000", help="of the needle prompts")
    parser.add_argument("--salts", type=int, default=20, help="needle prompts of each length")
    parser.add_argument("--cases", type=int, default=100, help="tool prompts in each line of the table")
    parser.add_argument("--decoded", type=int, default=200, help="prompts decoded token by token; 0: none")
    parser.add_argument("--text-rows", type=int, help="of 2048 tokens, of each kind of text; default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.set_defaults(run=run_eval)


def run_eval(arguments: argparse.Namespace) -> None:
    import torch

    from tools.train import hopper
    from tools.train.checkpoint import load_model
    from tools.train.data.dataset import Dataset
    from tools.train.evaluation.report import EvalOptions, evaluate
    from tools.train.model import TrainModel

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        hopper.prepare()
    shape, parameters = load_model(arguments.model)
    options = EvalOptions(
        lengths=tuple(int(length) for length in arguments.lengths.split(",") if length),
        salts=arguments.salts,
        tool_cases=arguments.cases,
        decoded=arguments.decoded,
        text_rows=arguments.text_rows,
    )
    report = evaluate(
        TrainModel(shape, parameters, device),
        Dataset(arguments.data, "held"),
        options,
        log=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(report.markdown())
    if report.missed_probes:
        print("\nprobes missed:", *report.missed_probes, sep="\n- ")
    if arguments.out:
        report.save(arguments.out)


def add_draft_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="what `prepare` wrote")
    parser.add_argument("--out", type=Path, required=True, help="a file of JSON lines")
    parser.add_argument("--count", type=int, default=96, help="prompts of each kind (default 96)")
    parser.add_argument("--seed", default="draft-prompts", help="any text")
    parser.add_argument(
        "--windows", action="store_true", help="code and English only, evenly over the held-out text: nothing is drawn"
    )
    parser.set_defaults(run=run_draft_prompts)


def run_draft_prompts(arguments: argparse.Namespace) -> None:
    from tools.train.data.dataset import Dataset
    from tools.train.evaluation.draft_prompts import draft_prompts, save_prompts, text_windows
    from tools.train.tasks.source import Source

    dataset = Dataset(arguments.data, "held")
    if arguments.windows:
        save_prompts(arguments.out, text_windows(dataset, arguments.count))
    else:
        save_prompts(arguments.out, draft_prompts(Source(dataset, arguments.seed), arguments.count))


if __name__ == "__main__":
    main()
