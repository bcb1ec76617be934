"""How parameters are made of Hugging Face tensors, and the parts that families share."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from metagym.models.config import ModelConfig

Index = tuple[slice, ...]
Read = Callable[[str, Index], np.ndarray]  # (tensor, part of it)


class Recipe(NamedTuple):
    """Between one parameter and its Hugging Face tensors. `names` are the tensors of one layer ("{}" is its
    number); `join` makes the layer's parameter of them, `split` undoes it. Not stacked: one tensor, as it
    is. With `experts`, names hold a second "{}", the expert's number, and the parameter a second axis."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layers: int = 0
    join: Callable[..., np.ndarray] | None = None
    split: Callable[[np.ndarray], Sequence[np.ndarray]] | None = None
    experts: int = 0

    def read(self, read: Read, index: Index) -> np.ndarray:
        """The part `index` of the parameter; reads one layer (or expert) at a time."""
        if self.join is None:
            return read(self.names[0], index)
        stacked = [range(self.layers)[index[0]]] + ([range(self.experts)[index[1]]] if self.experts else [])
        out = None
        for at in np.ndindex(*map(len, stacked)):
            numbers = [r[i] for r, i in zip(stacked, at, strict=True)]
            part = self.join(*(read(n.format(*numbers), ()) for n in self.names))[index[len(stacked) :]]
            if out is None:
                out = np.empty((*map(len, stacked), *part.shape), part.dtype)
            out[at] = part
        assert out is not None
        return out

    def numbers(self) -> list[tuple[int, ...]]:
        """The stacked indices: () of one that is not stacked, (layer,) or (layer, expert)."""
        if not self.layers:
            return [()]
        return list(np.ndindex(self.layers, self.experts) if self.experts else np.ndindex(self.layers))


def stacked(c: ModelConfig, names: str | Sequence[str], shapes, join, split, *, experts: int = 0) -> Recipe:
    """A recipe of `model.layers.{}.<name>`."""
    names = (names,) if isinstance(names, str) else names
    return Recipe(
        tuple(f"model.layers.{{}}.{n}" for n in names), shapes, c.num_hidden_layers, join, split, experts
    )


def vector(c: ModelConfig, name: str, size: int) -> Recipe:
    return stacked(c, name, ((size,),), lambda w: w, lambda w: [w])


def attention(c: ModelConfig) -> dict[str, Recipe]:
    """Embedding, norms, attention and head: what every family has."""
    D, V, h = c.hidden_size, c.vocab_size, c.head_dim
    H, K, G = c.num_attention_heads, c.num_key_value_heads, c.groups
    qkv = tuple(f"self_attn.{x}_proj" for x in "qkv")

    def join_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return np.concatenate([x.T.reshape(D, K, -1) for x in (q, k, v)], axis=-1)

    def split_qkv(w: np.ndarray) -> list[np.ndarray]:
        return [x.reshape(D, -1).T for x in np.split(w, [G * h, (G + 1) * h], axis=-1)]

    recipes = {
        "embed": Recipe(("model.embed_tokens.weight",), ((V, D),)),
        "layers.attn_norm": vector(c, "input_layernorm.weight", D),
        "layers.qkv": stacked(
            c, [f"{n}.weight" for n in qkv], ((H * h, D), (K * h, D), (K * h, D)), join_qkv, split_qkv
        ),
        "layers.out": stacked(
            c,
            "self_attn.o_proj.weight",
            ((D, H * h),),
            lambda w: w.T.reshape(K, G * h, D),
            lambda w: [w.reshape(H * h, D).T],
        ),
        "layers.mlp_norm": vector(c, "post_attention_layernorm.weight", D),
        "norm": Recipe(("model.norm.weight",), ((D,),)),
    }
    if c.qkv_bias:
        recipes["layers.qkv_bias"] = stacked(
            c,
            [f"{n}.bias" for n in qkv],
            ((H * h,), (K * h,), (K * h,)),
            lambda *parts: np.concatenate([x.reshape(K, -1) for x in parts], axis=-1),
            lambda b: [x.reshape(-1) for x in np.split(b, [G * h, (G + 1) * h], axis=-1)],
        )
    if c.qk_norm:
        recipes["layers.q_norm"] = vector(c, "self_attn.q_norm.weight", h)
        recipes["layers.k_norm"] = vector(c, "self_attn.k_norm.weight", h)
    if not c.tie_word_embeddings:
        recipes["head"] = Recipe(("lm_head.weight",), ((V, D),))
    return recipes


def mlp(c: ModelConfig, prefix: str = "mlp", *, hidden: int = 0, experts: int = 0) -> dict[str, Recipe]:
    """The gated MLP: of every layer, or of each expert."""
    D, F = c.hidden_size, hidden or c.intermediate_size
    return {
        "layers.gate_up": stacked(
            c,
            (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"),
            ((F, D), (F, D)),
            lambda gate, up: np.stack([gate.T, up.T], axis=1),
            lambda w: [w[:, 0].T, w[:, 1].T],
            experts=experts,
        ),
        "layers.down": stacked(
            c, f"{prefix}.down_proj.weight", ((D, F),), lambda w: w.T, lambda w: [w.T], experts=experts
        ),
    }


def dense(c: ModelConfig) -> dict[str, Recipe]:
    """All tensors of a dense model."""
    return {**attention(c), **mlp(c)}
