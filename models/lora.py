"""LoRA (Hu et al. 2021, arXiv:2106.09685): matrices W of a frozen model become W + (alpha / rank) A B.

A model whose config has a `lora` holds A `[N, in, rank]` and B `[N, rank, out]` of each target beside its
weights. Everything computes with the sum, which is made layer by layer; gradients of all else are zero
(`frozen`), and `trainable` tells an optimizer what to keep moments of. B starts at zero: a new adapter
changes nothing.

`save_adapter` writes what PEFT's `PeftModel.from_pretrained` loads, `load_adapter` reads such files;
`merge` gives the model without an adapter, its weights added up.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from metagym.models.config import TARGETS, Lora, ModelConfig
from metagym.models.errors import ModelError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def sizes(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of each target of the config's adapter; none for a model without. Raises ModelError for one
    that the model does not have."""
    D, F, h = c.hidden_size, c.intermediate_size, c.head_dim
    H, K = c.num_attention_heads * h, c.num_key_value_heads * h
    known = {"q_proj": (D, H), "k_proj": (D, K), "v_proj": (D, K), "o_proj": (H, D)}
    if not c.num_experts:
        known |= {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}
    if c.lora is None:
        return {}
    if odd := [t for t in c.lora.targets if t not in known]:
        raise ModelError(f"LoRA of {odd[0]!r} is not supported in this model; known: {', '.join(known)}")
    if c.lora.rank < 1:
        raise ModelError(f"a LoRA's rank is at least 1, not {c.lora.rank}")
    return {t: known[t] for t in TARGETS if t in c.lora.targets}


def draw(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """A new adapter's part, f32: N(0, 1 / in) for A `[N, in, rank]`, zeros for B."""
    if name.endswith("_b"):
        return np.zeros(shape, np.float32)
    rng = np.random.default_rng([seed, *name.encode()])
    return (rng.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32)


def merged(c: ModelConfig, w: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The weights of one layer with its adapter added."""
    own = {k: v for k, v in w.items() if not k.endswith(("_proj_a", "_proj_b"))}
    if c.lora is None:
        return own
    D, K = c.hidden_size, c.num_key_value_heads
    scale = c.lora.scale

    def delta(name: str, *shape: int) -> jax.Array:
        a, b = w.get(f"{name}_proj_a"), w.get(f"{name}_proj_b")
        if a is None or b is None:
            return jnp.zeros(shape, jnp.float32)
        product = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
        return (scale * product).reshape(shape)

    def add(name: str, more: jax.Array) -> None:
        own[name] = (own[name].astype(jnp.float32) + more).astype(own[name].dtype)

    h = c.head_dim
    if {"q_proj", "k_proj", "v_proj"} & set(c.lora.targets):
        parts = [delta("q", D, K, c.groups * h), delta("k", D, K, h), delta("v", D, K, h)]
        add("qkv", jnp.concatenate(parts, axis=-1))
    if "o_proj" in c.lora.targets:
        add("out", delta("o", K, c.groups * h, D))
    if {"gate_proj", "up_proj"} & set(c.lora.targets):
        F = c.intermediate_size
        add("gate_up", jnp.stack([delta("gate", D, F), delta("up", D, F)], axis=1))
    if "down_proj" in c.lora.targets:
        add("down", delta("down", c.intermediate_size, D))
    return own


def trainable(params: Any) -> Any:
    """A tree of bools in the structure of a model's parameters: with an adapter, its parts; else all."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    adapter = [_is_adapter(path) for path, _ in paths]
    return jax.tree.unflatten(jax.tree.structure(params), adapter if any(adapter) else [True] * len(adapter))


def frozen(params: Any) -> Any:
    """The parameters, with no gradient to those that are not trained."""
    return jax.tree.map(lambda x, own: x if own else jax.lax.stop_gradient(x), params, trainable(params))


def _is_adapter(path: Any) -> bool:
    return any(str(getattr(k, "key", "")).endswith(("_proj_a", "_proj_b")) for k in path)


def merge(model: Any) -> Any:
    """The model without an adapter: its weights are the sums."""
    c = model.config
    if c.lora is None:
        return model
    plain = nnx.eval_shape(lambda: type(model)(dataclasses.replace(c, lora=None)))
    graphdef, state = nnx.split(plain)
    layers = model._stacked()
    flat = dict(nnx.to_flat_state(nnx.state(model)))

    def leaf(path: Any, variable: Any) -> Any:
        names = tuple(str(k.key) for k in path)
        value = layers[names[-1]] if names[0] == "layers" else flat[names].get_value()
        return variable.replace(value)

    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(leaf, state, is_leaf=is_variable))


# PEFT's files


def _names(c: ModelConfig, target: str) -> str:
    part = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"base_model.model.model.layers.{{}}.{part}.{target}.lora_{{}}.weight"


def save_adapter(model: Any, directory: str | Path, *, base: str = "") -> Path:
    """Writes the adapter of `model` as PEFT does, into a new directory. `base` names the frozen model."""
    from safetensors.numpy import save_file

    c, target = model.config, Path(directory)
    if c.lora is None:
        raise ModelError("the model has no adapter to save")
    target.mkdir(parents=True)
    stacked = {k: np.asarray(v) for k, v in model._own().items()}
    tensors = {
        _names(c, t).format(i, letter): np.ascontiguousarray(stacked[f"{t}_{letter.lower()}"][i].T)
        for t in sizes(c)
        for i in range(c.num_hidden_layers)
        for letter in "AB"
    }
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": c.lora.rank,
        "lora_alpha": c.lora.alpha,
        "target_modules": list(sizes(c)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (target / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
    return target


def adapter_config(directory: str | Path) -> Lora:
    """What a directory of PEFT's says about its adapter. Raises ModelError for one that is no plain LoRA."""
    path = Path(directory) / CONFIG
    try:
        raw = json.loads(path.read_text())
        odd = {
            k: raw.get(k) for k in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern") if raw.get(k)
        }
        if raw["peft_type"] != "LORA" or raw.get("bias", "none") != "none" or odd:
            raise ModelError(f"{path}: only a plain LoRA is supported, not {odd or raw['peft_type']}")
        return Lora(raw["r"], raw["lora_alpha"], tuple(raw["target_modules"]))
    except (OSError, ValueError, KeyError, TypeError) as e:
        if isinstance(e, ModelError):
            raise
        raise ModelError(f"{path} is not PEFT's record of an adapter: {e!r}") from e


def load_adapter(model: Any, directory: str | Path) -> None:
    """Puts the adapter of a directory into `model`, whose config has a `lora` of the same shape. Raises
    ModelError if it is another's."""
    from safetensors.numpy import load_file

    c, wanted = model.config, adapter_config(directory)
    if c.lora is None or (wanted.rank, wanted.scale, set(wanted.targets)) != (
        c.lora.rank,
        c.lora.scale,
        set(c.lora.targets),
    ):
        raise ModelError(f"{directory} holds {wanted}; the model has {c.lora}")
    try:
        tensors = load_file(Path(directory) / WEIGHTS)
    except OSError as e:
        raise ModelError(f"{Path(directory) / WEIGHTS} cannot be read: {e}") from e
    for t in sizes(c):
        for letter in "AB":
            names = [_names(c, t).format(i, letter) for i in range(c.num_hidden_layers)]
            if missing := [n for n in names if n not in tensors]:
                raise ModelError(f"{directory}: the tensor {missing[0]!r} is missing")
            param = getattr(model.layers, f"{t}_{letter.lower()}")
            value = np.stack([tensors[n].T for n in names]).astype(np.float32)
            if value.shape != param[...].shape:
                raise ModelError(
                    f"{directory}: {names[0]!r} has shape {value.shape[:0:-1]}, not {param[...].shape[:0:-1]}"
                )
            param.set_value(jax.device_put(value, param[...].sharding))
