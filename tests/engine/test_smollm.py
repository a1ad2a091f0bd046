"""The default model decodes greedily what transformers decodes from the same dequantized weights."""

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from services.engine.batch import Row, SampleSpec
from services.engine.config import EngineConfig
from services.engine.weights.loader import load_model
from services.engine.weights.resolve import resolve
from tests.engine.gguf_files import dequantized
from tests.engine.tiny_models import GREEDY, Bench

PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Why is the sky blue? Explain it to a child.",
    "Translate to German: The weather is nice today.",
    "List three prime numbers above 100, and say how you know.",
)
TOKENS = 64


def reference() -> LlamaForCausalLM:
    """Config by hand from the model's published one, weights read by the gguf package's reader."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    return dequantized(resolve("").path, model)


def test_greedy_decoding_equals_transformers() -> None:
    loaded = load_model(EngineConfig(device="cpu", dtype="float32"), lambda share, what: None)
    tokenizer = Tokenizer.from_str(loaded.bundle.tokenizer_json)
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids
        for prompt in PROMPTS
    ]
    bench = Bench(loaded.model, pages=2 * len(prompts))
    outputs: list[list[int]] = [[] for _ in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in range(TOKENS):
        rows = []
        for n, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            ids = [*prompt, *output]
            start = 0 if step == 0 else len(ids) - 1
            pages = [2 * n, 2 * n + 1][: -(-len(ids) // 64)]
            rows.append(Row(str(n), ids[start:], start, pages, start, SampleSpec(GREEDY, prompt, output)))
        values = bench.run(*rows)
        for n in range(len(prompts)):
            logits[n].append(values[n])
            outputs[n] += bench.output.sampled[str(n)].tokens

    oracle = reference()
    assert "Paris" in tokenizer.decode(outputs[0])
    for prompt, output, ours in zip(prompts, outputs, logits, strict=True):
        # The reference's logits behind each of our tokens: where all of its maxima are our tokens, it would have
        # decoded the same, each token from the same ones before it.
        with torch.no_grad():
            theirs = oracle(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(ours), theirs, atol=1e-3, rtol=0)
        for position in (theirs.argmax(-1) != torch.tensor(output)).nonzero()[:, 0].tolist():
            best, second = theirs[position].topk(2).values.tolist()
            assert best - second < 1e-3, f"token {position}: no tie"
