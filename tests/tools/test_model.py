import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tools.corpus import SHIPPED
from tools.train.checkpoint import initial_parameters, load_model, save_model, stored
from tools.train.delta_rule import chunked, delta_rule, gradient_errors, recurrent
from tools.train.hopper import chunk_gradients
from tools.train.model import MTP_LOSS_WEIGHT, TrainModel
from tools.train.optimizer import Optimizer, is_muon, orthogonalised
from tools.train.shape import ModelShape

CPU = torch.device("cpu")
TOY = ModelShape(vocab_size=96, hidden_size=64, layers=4, intermediate_size=96, head_dim=16, delta_head_dim=16)


def random_rows(shape: ModelShape, rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, shape.vocab_size, (rows, length), generator=torch.Generator().manual_seed(3))


def delta_inputs(length: int, rows: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    n = rows * length
    q, k = (torch.randn(n, 2, 16, generator=generator) for _ in range(2))
    v = torch.randn(n, 4, 8, generator=generator)
    g = -torch.rand(n, 4, generator=generator)
    return [q, k, v, g, torch.rand(n, 4, generator=generator)]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_the_chunked_rule_and_its_gradients_equal_the_recurrence(length: int):
    upstream = torch.randn(2 * length, 4, 8, generator=torch.Generator().manual_seed(0))
    results = []
    for rule in (chunked, recurrent):
        leaves = [t.clone().requires_grad_() for t in delta_inputs(length)]
        q, k, v, g, beta = leaves
        o = rule(q, k, v, g, beta, length)
        o.backward(upstream)
        results.append([o, *(leaf.grad for leaf in leaves)])
    for fast, exact in zip(*results, strict=True):
        torch.testing.assert_close(fast, exact, rtol=1e-4, atol=1e-5)


def test_strong_decay_neither_overflows_nor_disturbs():
    q, k, v, g, beta = delta_inputs(128)
    assert torch.isfinite(chunked(q, k, v, g * 500, beta, 128)).all()
    torch.testing.assert_close(
        chunked(q, k, v, g * 20, beta, 128), recurrent(q, k, v, g * 20, beta, 128), rtol=1e-3, atol=1e-4
    )


def test_rows_do_not_see_each_other():
    q, k, v, g, beta = delta_inputs(70)
    both = delta_rule(q, k, v, g, beta, 70)
    second = delta_rule(q[70:], k[70:], v[70:], g[70:], beta[70:], 70)
    torch.testing.assert_close(both[70:], second)


def test_gradient_errors_compares_all_inputs():
    errors = gradient_errors(CPU, tokens=128, row_length=64)
    assert list(errors) == ["o", "q", "k", "v", "g", "beta"]
    assert 0 < max(errors.values()) < 0.02  # bf16 inputs, float32 inside


def test_the_replacement_gradient_equals_autograd_within_a_chunk():
    """`chunk_gradients` for one chunk with a state before it, against autograd of masked attention + state."""
    generator = torch.Generator().manual_seed(5)
    heads, value_heads, key_dim, value_dim = 2, 4, 8, 16

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float32)

    q, k = normal(1, 64, heads, key_dim), normal(1, 64, heads, key_dim)
    u, do, du = (normal(1, 64, value_heads, value_dim) for _ in range(3))
    state, d_next = normal(1, 1, value_heads, key_dim, value_dim), normal(1, 1, value_heads, key_dim, value_dim)
    total = -torch.rand(1, 64, value_heads, generator=generator).cumsum(1) * 0.1
    scale = key_dim**-0.5
    leaves = [t.clone().requires_grad_() for t in (q, k, total)]
    w = normal(1, 64, value_heads, key_dim).requires_grad_()

    def outputs(q: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """The scalar whose gradients are wanted: <do, o> + <d_next, next state> + <du, u - w state> of one chunk."""
        qh, kh = (t[0].repeat_interleave(2, 1).transpose(0, 1) for t in (q, k))
        uh, doh = u[0].transpose(0, 1), do[0].transpose(0, 1)
        gh = total[0].T
        mask = torch.ones(64, 64).tril().bool()
        decay = torch.exp2((gh[:, :, None] - gh[:, None, :]).masked_fill(~mask, float("-inf")))
        o = scale * (torch.exp2(gh)[..., None] * (qh @ state[0, 0]) + (decay * (qh @ kh.mT)) @ uh)
        last = gh[:, -1:]
        following = torch.exp2(last)[..., None] * state[0, 0] + (torch.exp2(last - gh)[..., None] * kh).mT @ uh
        corrected = -(w[0].transpose(0, 1) @ state[0, 0])
        return (doh * o).sum() + (d_next[0, 0] * following).sum() + (du[0].transpose(0, 1) * corrected).sum()

    outputs(*leaves).backward()
    dq, dk, dw, dg = chunk_gradients(q, k, u, do, state, d_next, w.detach(), total, du, scale)
    torch.testing.assert_close(dq, leaves[0].grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dk, leaves[1].grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dw, w.grad, rtol=1e-4, atol=1e-4)
    # the library takes the gradient for log decays in base e summed in base 2: d/dg = ln 2 * (its dg)
    torch.testing.assert_close(dg * math.log(2), leaves[2].grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "shape",
    [
        ModelShape(vocab_size=128, hidden_size=64, layers=4, intermediate_size=96, head_dim=32, delta_head_dim=16),
        ModelShape(
            vocab_size=96,
            hidden_size=48,
            layers=5,
            intermediate_size=64,
            heads=2,
            kv_heads=2,
            head_dim=16,
            key_heads=1,
            value_heads=3,
            delta_head_dim=8,
            rope_theta=1e4,
        ),
    ],
    ids=["grouped", "odd"],
)
def test_logits_equal_transformers(shape: ModelShape, tmp_path: Path):
    parameters = initial_parameters(shape, 7)
    save_model(
        tmp_path, shape, {name: value + 0.05 * torch.randn_like(value) for name, value in parameters.items()}, SHIPPED
    )
    compare_with_transformers(tmp_path, length=70)


def test_the_shipped_model_equals_transformers():
    compare_with_transformers(SHIPPED, length=100)


@torch.no_grad()
def compare_with_transformers(folder: Path, length: int) -> None:
    from tests.engine.hybrid_models import Qwen3_5ForCausalLM  # it hides flash-linear-attention

    shape, parameters = load_model(folder)
    model = TrainModel(shape, parameters, CPU)
    oracle = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = random_rows(shape, 2, length)
    ours = model.logits(model.normed(model.body(ids))).view(2, length, -1)
    theirs = oracle(ids).logits
    assert ((ours - theirs).norm() / theirs.norm()).item() <= 1e-4


def test_a_model_folder_round_trips(tmp_path: Path):
    parameters = initial_parameters(TOY, 1)
    save_model(tmp_path, TOY, parameters, SHIPPED)
    shape, loaded = load_model(tmp_path)
    assert shape == TOY
    assert loaded.keys() == parameters.keys()
    for name, value in loaded.items():
        assert torch.equal(value, stored(name, parameters[name]).float())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in SHIPPED.iterdir()} - {"README.md"}
    save_model(tmp_path, TOY, loaded, tmp_path)  # onto itself
    assert load_model(tmp_path)[0] == TOY


def test_the_shipped_folder_is_of_this_shape():
    shape, parameters = load_model(SHIPPED)
    assert shape == ModelShape()
    assert sum(value.numel() for value in parameters.values()) == 7_993_648
    config = json.loads((SHIPPED / "config.json").read_text())
    assert config == shape.hf_config()
    assert (SHIPPED / "model.safetensors").stat().st_size < 16 * 2**20


def test_a_wrong_folder_is_refused(tmp_path: Path):
    save_model(tmp_path, TOY, initial_parameters(TOY, 0), SHIPPED)
    config = TOY.hf_config()
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type is 'llama'"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: stored(name, value) for name, value in initial_parameters(TOY, 0).items()}
    save_file({k: v for k, v in tensors.items() if k != "mtp.fc.weight"}, str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match=r"mtp\.fc\.weight has shape None, expected \(64, 128\)"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "missing")


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiple"):
        ModelShape(heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="head_dim is 20"):
        ModelShape(head_dim=20)


def test_fresh_parameters_depend_on_the_seed_only():
    one, two, other = initial_parameters(TOY, 1), initial_parameters(TOY, 1), initial_parameters(TOY, 2)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@torch.no_grad()
def test_weights_say_which_predictions_count():
    """The losses against their definition, token by token."""
    model = TrainModel(TOY, initial_parameters(TOY, 0), CPU)
    ids = random_rows(TOY, 2, 64)
    weights = torch.zeros(2, 64)
    weights[0, 10], weights[1, 63], weights[1, 0] = 2.0, 0.5, 7.0  # nothing predicts the first token
    losses = model.losses(ids, weights, draft_steps=2)
    hidden = model.normed(model.body(ids))
    logs = model.logits(hidden).log_softmax(-1).view(2, 64, -1)
    expected = -2.0 * logs[0, 9, ids[0, 10]] - 0.5 * logs[1, 62, ids[1, 63]]
    torch.testing.assert_close(losses.main, expected)
    following = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    first = model.draft_normed(model.mtp(hidden, following))
    logs = model.logits(first).log_softmax(-1).view(2, 64, -1)
    torch.testing.assert_close(losses.drafts[0], -2.0 * logs[0, 8, ids[0, 10]] - 0.5 * logs[1, 61, ids[1, 63]])
    following = torch.nn.functional.pad(ids[:, 2:], (0, 2))
    logs = model.logits(model.draft_normed(model.mtp(first, following))).log_softmax(-1).view(2, 64, -1)
    torch.testing.assert_close(losses.drafts[1], -2.0 * logs[0, 7, ids[0, 10]] - 0.5 * logs[1, 60, ids[1, 63]])
    torch.testing.assert_close(losses.total, losses.main + MTP_LOSS_WEIGHT * sum(losses.drafts))
    assert losses.weight == 9.5
    assert model.losses(ids, weights, draft_steps=0).drafts == ()


@torch.no_grad()
def test_rows_of_a_batch_are_independent_and_causal():
    model = TrainModel(TOY, initial_parameters(TOY, 0), CPU)
    ids = random_rows(TOY, 3, 64)
    both = model.body(ids).view(3, 64, -1)
    torch.testing.assert_close(model.body(ids[1:2]), both[1], rtol=1e-4, atol=1e-5)
    changed = ids.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % TOY.vocab_size
    after = model.body(changed).view(3, 64, -1)
    torch.testing.assert_close(after[:, :40], both[:, :40], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(after[:, 40:], both[:, 40:])


def test_training_leaves_the_given_parameters_alone():
    parameters = initial_parameters(TOY, 0)
    before = {name: value.clone() for name, value in parameters.items()}
    model = TrainModel(TOY, parameters, CPU)
    ids = random_rows(TOY, 1, 64)
    model.losses(ids, torch.ones(1, 64), 1).total.backward()
    Optimizer(model.parameters, rate=0.1).step(1.0)
    assert all(torch.equal(parameters[name], before[name]) for name in before)
    assert not torch.equal(model.parameters["mtp.fc.weight"], before["mtp.fc.weight"])
    assert all(parameter.grad is None for parameter in model.parameters.values())


def test_every_parameter_gets_a_gradient():
    model = TrainModel(TOY, initial_parameters(TOY, 0), CPU)
    model.losses(random_rows(TOY, 1, 64), torch.ones(1, 64), 2).total.backward()
    assert [name for name, value in model.parameters.items() if value.grad is None or not value.grad.any()] == []


@pytest.mark.parametrize("size", [(2, 32, 64), (1, 96, 40), (3, 40, 96)])
def test_orthogonalised_singular_values_are_near_one(size: tuple[int, int, int]):
    update = orthogonalised(torch.randn(*size, generator=torch.Generator().manual_seed(2)))
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_muon_takes_the_large_matrices_only():
    muon = {name for name, value in initial_parameters(TOY, 0).items() if is_muon(name, value)}
    assert "mtp.fc.weight" in muon
    assert "model.layers.0.linear_attn.in_proj_qkv.weight" in muon
    assert not any("embed" in name or "norm" in name or "conv1d" in name or "proj_a" in name for name in muon)


def test_a_missing_gradient_is_an_error():
    model = TrainModel(TOY, initial_parameters(TOY, 0), CPU)
    with pytest.raises(ValueError, match="has no gradient"):
        Optimizer(model.parameters, rate=0.1).step(1.0)
