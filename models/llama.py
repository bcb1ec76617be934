"""The Llama family: SmolLM2, Llama 2 and 3. The decoder as it is; Llama 3 scales its rotation."""

from metagym.models import tensors
from metagym.models.config import Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    read=lambda raw: {},
    recipes=tensors.dense,
)
