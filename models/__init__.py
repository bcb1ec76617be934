"""Flax models, how they lie on a mesh, and where their weights come from. Imports nothing else of MetaGym."""

from metagym.models.attention import BLOCK as EXACT_ALIGNMENT
from metagym.models.config import Llama3Rope, Lora, ModelConfig, YarnRope, stretched
from metagym.models.decoder import Cache, Decoder, init_cache, make_policy
from metagym.models.errors import ModelError
from metagym.models.loading import load, named_tensors, resolve, save
from metagym.models.lora import load_adapter, save_adapter, trainable
from metagym.models.sharding import batch_sharding, make_mesh, param_shardings
from metagym.models.tiled import make_tiled_policy

Llama = Decoder

__all__ = [
    "EXACT_ALIGNMENT",
    "Cache",
    "Decoder",
    "Llama",
    "Llama3Rope",
    "Lora",
    "ModelConfig",
    "ModelError",
    "YarnRope",
    "batch_sharding",
    "init_cache",
    "load",
    "load_adapter",
    "make_mesh",
    "make_policy",
    "make_tiled_policy",
    "named_tensors",
    "param_shardings",
    "resolve",
    "save",
    "save_adapter",
    "stretched",
    "trainable",
]
