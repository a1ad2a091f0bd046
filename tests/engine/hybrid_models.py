"""Small random models of the Qwen3.5 family in `transformers`, as oracles."""

import sys
from typing import Any

import torch
from transformers import PreTrainedModel

# Where flash-linear-attention is installed, transformers would use it, on a machine without a GPU too; and an oracle
# should not share a kernel with what it judges.
_hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "fla" or name.startswith("fla.")}
sys.modules["fla"] = None  # type: ignore[assignment]
try:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig
    from transformers.models.qwen3_5 import modeling_qwen3_5 as _dense  # noqa: F401 (binds its kernels now)
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as _moe  # noqa: F401
finally:
    del sys.modules["fla"]
    sys.modules.update(_hidden)

_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_ODD: dict[str, Any] = {
    "hidden_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "tie_word_embeddings": True,
}
_THREE: dict[str, Any] = {
    # Three value heads a key head and a narrower convolution; half of the dims rotate.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"intermediate_size": 80},
    "dense-odd": {"intermediate_size": 70, **_ODD},
    "dense-three": {"intermediate_size": 80, **_THREE},
    "moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "moe-odd": {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 15,
        "shared_expert_intermediate_size": 22,
        **_ODD,
    },
    "moe-three": {
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 40,
        **_THREE,
    },
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}


def hybrid_oracle(shape: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model of one of SHAPES, with no weight left at an initial value that would hide a mistake."""
    values = {"rope_parameters": dict(_ROPE), **_BASE, **SHAPES[shape], **changes}
    torch.manual_seed(seed)
    if shape.startswith("moe"):
        # Its grouped product wants rows of a multiple of 16 bytes.
        config = Qwen3_5MoeTextConfig(**values, experts_implementation="eager")
        model: PreTrainedModel = Qwen3_5MoeForCausalLM(config)
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**values))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # A decay of a few percent a token, so that the state remembers over chunks.
            offset = {"A_log": -3.0, "linear_attn.norm.weight": 1.0}
            weight.copy_(torch.randn_like(weight) * 0.15 + next((v for k, v in offset.items() if name.endswith(k)), 0))
    return model.eval()
