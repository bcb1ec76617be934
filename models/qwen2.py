"""Qwen2 and Qwen2.5 (arXiv:2412.15115): queries, keys and values have a bias.

Long contexts use YaRN, which config.json asks for (`rope_scaling`); factor 4 of 32,768 positions is 131,072.
Models that let some layers see a window only (`use_sliding_window`) are refused.
"""

from metagym.models import tensors
from metagym.models.config import Family

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed={"hidden_act": "silu", "use_sliding_window": False},
    read=lambda raw: {"qkv_bias": True},
    recipes=tensors.dense,
)
