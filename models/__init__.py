"""Flax models, how they lie on a mesh, and where their weights come from. Imports nothing else of MetaGym."""

from metagym.models.attention import BLOCK as EXACT_ALIGNMENT
from metagym.models.errors import ModelError
from metagym.models.llama import Cache, Llama, ModelConfig, init_cache, make_policy
from metagym.models.loading import load, save
from metagym.models.sharding import batch_sharding, make_mesh, param_shardings
from metagym.models.tiled import make_tiled_policy

__all__ = [
    "EXACT_ALIGNMENT",
    "Cache",
    "Llama",
    "ModelConfig",
    "ModelError",
    "batch_sharding",
    "init_cache",
    "load",
    "make_mesh",
    "make_policy",
    "make_tiled_policy",
    "param_shardings",
    "save",
]
