"""What the formats of weights cost in quality, on a CPU.

samovar-tiny and the default model (SmolLM2, whose file is Q4_1 already) are packed into each format and recipe, and
read decoded in float32, so that nothing but the weights differs. The text is what samovar-tiny was never trained on
(data/draft_prompts.jsonl): passages of code and of English, one behind the other in a single pass, so that a state that
drifts is seen. Tool calls (data/tiny_tools.jsonl) and needles count as exact when every token of the right answer is
the model's greedy choice behind those before it.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench import results
from bench.results import Entry
from bench.scoring import Score, is_greedy, log_probabilities
from kernels.linear.quantized import FORMATS
from services.engine.config import EngineConfig
from services.engine.weights import recipes
from services.engine.weights.artifact.manifest import Manifest
from services.engine.weights.artifact.names import is_matrix
from services.engine.weights.artifact.reader import ArtifactCheckpoint
from services.engine.weights.artifact.writer import Job
from services.engine.weights.fingerprint import content_hash
from services.engine.weights.loader import LoadedModel, load_checkpoint
from services.engine.weights.opening import open_model
from services.engine.weights.recipes import Recipe, Rule
from services.engine.weights.resolve import resolve
from services.gateway.prompt.template import ChatTemplate
from tools.train.data.vocabulary import END_OF_TURN
from tools.train.evaluation.draft_prompts import DraftKind, load_prompts
from tools.train.evaluation.needles import needle_case
from tools.train.tasks.tools.schema import Call, render_calls

DATA = Path(__file__).with_name("data")
TINY = str(Path(__file__).parents[1] / "models" / "samovar-tiny")
MODELS = {"samovar-tiny": TINY, "smollm2-135m": ""}
"""As SAMOVAR_MODEL."""
KINDS: tuple[DraftKind, ...] = ("code", "English")
PASSAGES = 8
"""Of each kind, of about 630 characters."""
TOOL_CASES = 50
NEEDLES = {2048: 6}
"""Salts by prompt length in tokens."""
AS_IT_IS = "as it is"
RECIPES = ("nvfp4-mixed", "int4", "gsq3")


def main() -> None:
    entries = [entry for name in MODELS for entry in measure(name)]
    print(f"written to {results.write_entries('formats-cpu', entries)}")


def measure(name: str) -> list[Entry]:
    """The model as it is first, then each format and recipe of ours."""
    entries: list[Entry] = []
    base: dict[str, Score] = {}
    for label, recipe in variants():
        with tempfile.TemporaryDirectory() as folder:
            manifest, model = packed(MODELS[name], recipe, Path(folder))
            found = [Entry(f"bits/{name}/{label}", round(bits(manifest), 3), "bits a weight of the matrices")]
            for kind, ids in texts(model).items():
                score = Score.of(log_probabilities(model.model, ids), ids)
                first = base.setdefault(kind, score)
                ratio = round(score.perplexity / first.perplexity, 5)
                found.append(
                    Entry(f"perplexity/{name}/{label}/{kind}", round(score.perplexity, 4), "perplexity", ratio)
                )
                divergence = round(score.divergence_from(first), 6)
                found.append(Entry(f"divergence/{name}/{label}/{kind}", divergence, "nats a token"))
            if MODELS[name] == TINY:
                found += answers(model, f"{name}/{label}")
        for entry in found:
            print(f"{entry.name}: {entry.value} {entry.unit}", flush=True)
        entries += found
    return entries


def variants() -> Iterator[tuple[str, Recipe]]:
    yield AS_IT_IS, recipes.load("keep")
    for format in FORMATS:
        yield format, Recipe(f"{format} throughout", (Rule(("*",), format),))
    for name in RECIPES:
        yield f"recipe {name}", recipes.load(name)


def packed(spec: str, recipe: Recipe, folder: Path) -> tuple[Manifest, LoadedModel]:
    located = resolve(spec)
    source = open_model(located)
    job = Job(source, located.name, content_hash(source), recipe, "bench", folder, torch.device("cpu"))
    manifest = job.run(lambda share, what: None)
    config = EngineConfig(device="cpu", dtype="float32", weights="dense")
    return manifest, load_checkpoint(ArtifactCheckpoint(folder), located.name, config, lambda share, what: None)


def bits(manifest: Manifest) -> float:
    """Codes and scales, of a weight of the matrices."""
    matrices = [group for group in manifest.groups if is_matrix(group.parts[0].name)]
    return 8 * sum(group.nbytes for group in matrices) / sum(group.rows * group.columns for group in matrices)


def texts(model: LoadedModel) -> dict[DraftKind, Sequence[int]]:
    passages = load_prompts(DATA / "draft_prompts.jsonl")
    tokenizer = Tokenizer.from_str(model.bundle.tokenizer_json)
    joined = {kind: "\n\n".join([p.text for p in passages if p.kind == kind][:PASSAGES]) for kind in KINDS}
    return {kind: tokenizer.encode(text, add_special_tokens=False).ids for kind, text in joined.items()}


def answers(model: LoadedModel, name: str) -> list[Entry]:
    tokenizer = Tokenizer.from_str(model.bundle.tokenizer_json)

    def exact(cases: Sequence[tuple[str, str]]) -> float:
        """Of prompts and their right answers."""
        encoded = [
            [tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, answer + END_OF_TURN)]
            for prompt, answer in cases
        ]
        return round(sum(is_greedy(model.model, prompt, answer) for prompt, answer in encoded) / len(cases), 4)

    found = [Entry(f"tool-calls/{name}", exact(tool_cases(model)), "share exact")]
    for length, salts in NEEDLES.items():
        cases = [needle_case(tokenizer, length, salt) for salt in range(salts)]
        found.append(Entry(f"needles/{name}/{length}", exact(cases), "share exact"))
    return found


def tool_cases(model: LoadedModel) -> list[tuple[str, str]]:
    template = ChatTemplate(model.bundle.chat_template, model.bundle.special.tokens)
    cases = []
    for line in (DATA / "tiny_tools.jsonl").read_text("utf-8").splitlines()[:TOOL_CASES]:
        case = json.loads(line)
        prompt = template.render(case["messages"], case["tools"], {"enable_thinking": False})
        calls = [Call(call["name"], tuple(call["arguments"].items())) for call in case["calls"]]
        cases.append((prompt, render_calls(calls)))
    return cases
