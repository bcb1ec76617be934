"""Qwen3, dense (arXiv:2505.09388): no biases; every query and key head is normalised before its rotation."""

from metagym.models import tensors
from metagym.models.config import Family

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    read=lambda raw: {"qk_norm": True, "head_dim": raw.get("head_dim") or 128},
    recipes=tensors.dense,
)
