"""The MTP head and its drafts, against the formula in plain torch (design section 6), in float64."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from bench.acceptance import Dialog, draft_acceptance, hidden_states
from services.engine.cache.pages import KvPages
from services.engine.model.mtp import DraftRow, MtpHead, draft
from services.engine.model.qwen3_5 import HybridDecoder
from tests.devices import DEVICES
from tests.engine.hybrid_models import hybrid_oracle
from tests.engine.tiny_models import decoder, random_ids


def head_of(device: torch.device, shape: str = "dense", seed: int = 0) -> tuple[MtpHead, dict[str, Tensor]]:
    """A head with random weights on a random decoder; the weights by their names, float64."""
    body = decoder(hybrid_oracle(shape), device)
    assert isinstance(body, HybridDecoder)
    head = MtpHead(body)
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for slot in head.slots():
        value = torch.randn(slot.target.shape, generator=generator) * 0.15
        slot.target.copy_(value)
        weights[slot.name] = value.double()
    weights |= {slot.name: slot.target.double().cpu() for slot in body.slots()}
    return head, weights


class Formula:
    """Of the shape "dense": 6 query and 2 KV heads of 16 dims, 4 of which rotate."""

    def __init__(self, weights: Mapping[str, Tensor], ids: list[int], hidden: Tensor) -> None:
        self._w = weights
        self._ids = ids
        self._hidden = hidden.double().cpu()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + self._w[name])

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """x [heads, 16]: dims 0, 2 and 1, 3 are pairs."""
        angle = position * torch.tensor([1.0, 10_000.0**-0.5], dtype=torch.float64)
        a, b = x[:, :2], x[:, 2:4]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), x[:, 4:]), dim=1)

    def inputs(self, token: int, hidden: Tensor) -> Tensor:
        embedded = self.norm(self._w["model.embed_tokens.weight"][token], "mtp.pre_fc_norm_embedding.weight")
        return self._w["mtp.fc.weight"] @ torch.cat((embedded, self.norm(hidden, "mtp.pre_fc_norm_hidden.weight")))

    def keys(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        h = self.norm(x, "mtp.layers.0.input_layernorm.weight")
        k = (self._w["mtp.layers.0.self_attn.k_proj.weight"] @ h).view(2, 16)
        v = (self._w["mtp.layers.0.self_attn.v_proj.weight"] @ h).view(2, 16)
        return self.rotate(self.norm(k, "mtp.layers.0.self_attn.k_norm.weight"), position), v

    def layer(self, x: Tensor, position: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        h = self.norm(x, "mtp.layers.0.input_layernorm.weight")
        wide = (self._w["mtp.layers.0.self_attn.q_proj.weight"] @ h).view(6, 32)
        q = self.rotate(self.norm(wide[:, :16], "mtp.layers.0.self_attn.q_norm.weight"), position)
        out = []
        for number in range(6):
            keys = torch.stack([k[number // 3] for k, _ in seen])
            values = torch.stack([v[number // 3] for _, v in seen])
            out.append((keys @ q[number] / 4).softmax(0) @ values * wide[number, 16:].sigmoid())
        x = x + self._w["mtp.layers.0.self_attn.o_proj.weight"] @ torch.cat(out)
        h = self.norm(x, "mtp.layers.0.post_attention_layernorm.weight")
        gate = self._w["mtp.layers.0.mlp.gate_proj.weight"] @ h
        up = self._w["mtp.layers.0.mlp.up_proj.weight"] @ h
        return x + self._w["mtp.layers.0.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def drafts(self, at: int, count: int) -> list[int]:
        """Behind token at + 1 of the ids."""
        firsts = [self.inputs(self._ids[s + 1], self._hidden[s]) for s in range(at + 1)]
        seen = [self.keys(x, position) for position, x in enumerate(firsts)]
        x = firsts[-1]
        tokens: list[int] = []
        while True:
            position = at + len(tokens)
            hidden = self.norm(self.layer(x, position, seen), "mtp.norm.weight")
            tokens.append(int((self._w["lm_head.weight"] @ hidden).argmax()))
            if len(tokens) == count:
                return tokens
            x = self.inputs(tokens[-1], hidden)
            seen = [*seen, self.keys(x, position + 1)]


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_against_the_formula(device: torch.device) -> None:
    """Two sequences side by side: a prompt, then one token a step, then some at once as after accepted drafts. The keys
    of abandoned drafts lie where the next step writes, over a page's border too."""
    head, weights = head_of(device)
    ids = [random_ids(80, seed=1), random_ids(75, seed=2)]
    with torch.inference_mode():
        hidden = [hidden_states(head.decoder, each) for each in ids]
        formulas = [Formula(weights, each, h) for each, h in zip(ids, hidden, strict=True)]
        pages = KvPages(head.kv_layout, 4, device)
        pages.tensor[: pages.count] = 0xFF  # NaNs
        tables = ([2, 0], [1, 3])
        start = [0, 0]
        for steps in ((60, 20), (1, 40), (1, 1), (3, 1), (1, 2), (2, 1)):
            rows = []
            for n, size in enumerate(steps):
                end = start[n] + size
                rows.append(DraftRow(start[n], hidden[n][start[n] : end], ids[n][start[n] + 1 : end + 1], tables[n]))
                start[n] = end
            got = draft(head, pages, rows, 4)
            assert got.tolist() == [formula.drafts(end - 1, 4) for formula, end in zip(formulas, start, strict=True)]


def test_acceptance_counts_agreement_with_the_model() -> None:
    """Against the formula's drafts and the model's own choices, position by position."""
    head, weights = head_of(torch.device("cpu"))
    # Only tokens 0 to 3 ever win, so that drafts agree by chance now and then.
    slots = {slot.name: slot.target for slot in head.decoder.slots()}
    slots["lm_head.weight"][3:] = 0
    weights["lm_head.weight"][3:] = 0
    dialogs = []
    expected, counted = [0, 0], 0
    for seed in range(2):
        prompt = random_ids(10 + seed, seed)
        ids = list(prompt)
        for _ in range(12):
            with torch.inference_mode():
                ids.append(int(head.decoder.logits(hidden_states(head.decoder, ids)[-1:]).argmax()))
        dialogs.append(Dialog(prompt, ids[len(prompt) :]))
        with torch.inference_mode():
            hidden = hidden_states(head.decoder, ids)
        formula = Formula(weights, ids, hidden)
        for at in range(len(prompt) - 1, len(ids) - 3):
            counted += 1
            drafts = formula.drafts(at, 2)
            expected[0] += drafts[0] == ids[at + 2]
            expected[1] += drafts == ids[at + 2 : at + 4]
    assert 0 < expected[1] < expected[0] < counted
    assert draft_acceptance(head, dialogs, 2) == [each / counted for each in expected]


def test_experts_in_the_head() -> None:
    head, _ = head_of(torch.device("cpu"), "moe")
    names = {slot.name for slot in head.slots()}
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in names
    ids = random_ids(20, seed=3)
    with torch.inference_mode():
        pages = KvPages(head.kv_layout, 1, torch.device("cpu"))
        hidden = hidden_states(head.decoder, ids)
        whole = draft(head, pages, [DraftRow(0, hidden[:19], ids[1:], [0])], 2)
        draft(head, pages, [DraftRow(0, hidden[:9], ids[1:10], [0])], 2)
        assert torch.equal(draft(head, pages, [DraftRow(9, hidden[9:19], ids[10:], [0])], 2), whole)
