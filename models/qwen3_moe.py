"""Qwen3's mixtures of experts (arXiv:2505.09388), Qwen3-30B-A3B and 235B-A22B: Qwen3's attention, and in
every layer a router that sends each token to a few of many gated MLPs (`experts.py` computes them).

The published models have experts in every layer; others (`decoder_sparse_step`, `mlp_only_layers`) are
refused. No auxiliary loss: reinforcement learning trains these models without one.
"""

from collections.abc import Mapping
from typing import Any

from metagym.models import tensors
from metagym.models.config import Family, ModelConfig

FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    given = {"norm_topk_prob": False, **raw}
    if "num_experts" not in given and "num_local_experts" in given:  # as newer files have it
        given["num_experts"] = given["num_local_experts"]
    return {"qk_norm": True, **{k: given[k] for k in FIELDS}}


def recipes(c: ModelConfig) -> dict[str, tensors.Recipe]:
    E, D = c.num_experts, c.hidden_size
    return {
        **tensors.attention(c),
        "layers.router": tensors.matrix(c, "mlp.gate.weight", D, E),
        **tensors.mlp(c, "mlp.experts.{}", hidden=c.moe_intermediate_size, experts=E),
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    read=read,
    recipes=recipes,
    fields=FIELDS,
)
