"""Whether the model card's draft acceptance on code and English is one that a sample of its size may have.

The card counted 1,440 tokens of each and names neither prompts nor lengths. So both are fixed here, before any of this
ran: the prompts are data/text_windows.jsonl (`python -m tools.train draft-prompts --windows`: every n-th of the windows
of 200 tokens that follow one another in the held-out text, chosen by no result), an answer has 60 or 120 tokens, a
sample is 24 or 12 prompts. Samples of that size are drawn from what all prompts gave, with replacement and whole
prompts at a time; the interval has 95% of them.

Whether our MTP code is right is asked without the card, too: on the same answers, how many leading drafts agree at each
position by the trainer's own evaluation, which reads all positions at once, without pages.

Written to docs/benchmarks/tiny-drafts.json, which tiny-drafts.md explains.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import results
from bench.acceptance import Dialog, acceptance
from bench.tiny_drafts import CARD, DRAFTS, MODEL, accepted_in, answered, first_tokens, load_small_model
from services.engine.weights.loader import LoadedModel
from tools.train.checkpoint import load_model as load_parameters
from tools.train.evaluation.acceptance import row_acceptance
from tools.train.evaluation.draft_prompts import DraftKind, load_prompts
from tools.train.model import TrainModel

PROMPTS = Path(__file__).with_name("data") / "text_windows.jsonl"
KINDS: tuple[DraftKind, ...] = ("code", "English")
CARD_TOKENS = 1440
LENGTHS = (60, 120)
SAMPLES = 20_000
SEED = 1
QUANTILES = (0.025, 0.5, 0.975)


@dataclass(frozen=True, slots=True)
class SampledShare:
    """Of positions where drafts 1..k all equal the model's greedy choice, for one k, in samples of some prompts."""

    low: float
    median: float
    high: float
    at_least: float
    """Of the samples: with a share that is not below the one asked for."""

    def holds(self, share: float) -> bool:
        """Whether `share` lies between `low` and `high`."""
        return self.low <= share <= self.high


def sampled_shares(
    accepted: Sequence[Sequence[int]], dialogs: int, asked: Sequence[float], samples: int = SAMPLES, seed: int = SEED
) -> list[SampledShare]:
    """For k = 1 to len(asked), in `samples` samples of `dialogs` dialogs each, drawn with replacement from what
    `accepted_drafts` gave; `asked`: the share that `at_least` compares with, for each k. Dialogs without a position are
    not drawn. Raises ValueError where there are fewer than two others."""
    counted = [each for each in accepted if each]
    if len(counted) < 2:
        raise ValueError("at least two dialogs with a position are needed")
    positions = torch.tensor([len(each) for each in counted])
    picked = torch.randint(len(counted), (samples, dialogs), generator=torch.Generator().manual_seed(seed))
    found = []
    for k, share in enumerate(asked, 1):
        agreed = torch.tensor([sum(drafts >= k for drafts in each) for each in counted])
        shares = agreed[picked].sum(1).double() / positions[picked].sum(1)
        low, median, high = torch.quantile(shares, torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
        found.append(SampledShare(low, median, high, (shares >= share).double().mean().item()))
    return found


def main() -> None:
    measured = measure(load_small_model())
    print(f"written to {results.write('tiny-drafts', measured)}")


def measure(model: LoadedModel, prompts: int | None = None) -> dict[str, Any]:
    """With the first `prompts` of each kind, or all."""
    trained = TrainModel(*load_parameters(MODEL), torch.device("cpu"))
    measured: dict[str, Any] = {}
    for kind in KINDS:
        texts = [each.text for each in load_prompts(PROMPTS) if each.kind == kind][:prompts]
        dialogs = answered(model, texts, max(LENGTHS))
        accepted = accepted_in(model, dialogs)
        for length in LENGTHS:
            name = f"{kind}, {length} tokens"
            measured[name] = compared(first_tokens(accepted, length), CARD_TOKENS // length, CARD[kind])
            print(name, measured[name], flush=True)
        name = f"{kind}, positions where the trainer's evaluation differs"
        measured[name] = f"{positions_that_differ(trained, dialogs, accepted)} of {sum(map(len, accepted))}"
        print(name, measured[name], flush=True)
    return measured


def positions_that_differ(trained: TrainModel, dialogs: Sequence[Dialog], accepted: Sequence[Sequence[int]]) -> int:
    """Where the trainer's evaluation counts more or fewer leading drafts than `accepted`, by `accepted_drafts`."""
    differ = 0
    for dialog, ours in zip(dialogs, accepted, strict=True):
        agreed = row_acceptance(trained, torch.tensor([*dialog.prompt, *dialog.output]), DRAFTS)
        first = len(dialog.prompt) - 1
        theirs = agreed[:, first : first + len(ours)].sum(0).tolist()
        differ += sum(a != b for a, b in zip(ours, theirs, strict=True))
    return differ


def compared(accepted: Sequence[Sequence[int]], dialogs: int, card: Sequence[float]) -> dict[str, Any]:
    whole = acceptance(accepted, DRAFTS)
    sampled = sampled_shares(accepted, dialogs, card)
    return {
        "dialogs": whole.dialogs,
        "positions": whole.positions,
        "dialogs a sample": dialogs,
        "drafts": {
            f"1 to {k}" if k > 1 else "1": {
                "accepted": round(whole.shares[k - 1], 4),
                "standard error": round(whole.errors[k - 1], 4),
                "sample: 2.5%, median, 97.5%": [round(x, 4) for x in (each.low, each.median, each.high)],
                "card": share,
                "card in the interval": each.holds(share),
                "samples not below the card": round(each.at_least, 4),
                "agreed in each dialog": " ".join(str(sum(drafts >= k for drafts in dialog)) for dialog in accepted),
            }
            for k, (each, share) in enumerate(zip(sampled, card, strict=True), 1)
        },
    }
