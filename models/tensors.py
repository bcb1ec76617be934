"""How parameters are made of Hugging Face tensors, and the parts that families share."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from metagym.models.config import ModelConfig

Index = tuple[slice, ...]
Read = Callable[[str, Index], np.ndarray]  # (tensor, part of it)


class Recipe(NamedTuple):
    """Between one parameter and its Hugging Face tensors. `names` are the tensors of one layer ("{}" is its
    number). `join` makes the layer's parameter, or a part of it, of the tensors' parts that `cut` says;
    `split` undoes it. Not stacked: one tensor, as it is. With `experts`, names hold a second "{}", the
    expert's number, and the parameter a second axis."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layers: int = 0
    join: Callable[..., np.ndarray] | None = None
    split: Callable[[np.ndarray], Sequence[np.ndarray]] | None = None
    cut: Callable[..., Sequence[Index]] | None = None  # (slice of each axis) -> part of each tensor
    experts: int = 0

    def read(self, read: Read, index: Index, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """The part `index` of the parameter of this shape. Holds no more than that, and what one layer (or
        expert) adds to it."""
        index = tuple(slice(*s.indices(n)) for s, n in zip(index, shape, strict=True))
        out = _aligned(tuple(s.stop - s.start for s in index), dtype)
        if self.join is None or self.cut is None:
            out[...] = read(self.names[0], index)
            return out
        stacked = index[: 2 if self.experts else 1]
        parts = self.cut(*index[len(stacked) :])
        for at in np.ndindex(out.shape[: len(stacked)]):
            numbers = [s.start + i for s, i in zip(stacked, at, strict=True)]
            out[at] = self.join(
                *(read(n.format(*numbers), p) for n, p in zip(self.names, parts, strict=True))
            )
        return out

    def numbers(self) -> list[tuple[int, ...]]:
        """The stacked indices: () of one that is not stacked, (layer,) or (layer, expert)."""
        if not self.layers:
            return [()]
        return list(np.ndindex(self.layers, self.experts) if self.experts else np.ndindex(self.layers))


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An empty array that starts where JAX can take it over without a copy, on the CPU."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def stacked(c: ModelConfig, names: str | Sequence[str], shapes, join, split, cut, *, experts: int = 0):
    """A recipe of `model.layers.{}.<name>`."""
    names = (names,) if isinstance(names, str) else names
    full = tuple(f"model.layers.{{}}.{n}" for n in names)
    return Recipe(full, shapes, c.num_hidden_layers, join, split, cut, experts)


def vector(c: ModelConfig, name: str, size: int) -> Recipe:
    return stacked(c, name, ((size,),), lambda w: w, lambda w: [w], lambda i: [(i,)])


def matrix(c: ModelConfig, name: str, rows: int, columns: int, *, experts: int = 0) -> Recipe:
    """A parameter [rows, columns], which Hugging Face keeps transposed."""
    shapes = ((columns, rows),)
    return stacked(c, name, shapes, lambda w: w.T, lambda w: [w.T], lambda r, k: [(k, r)], experts=experts)


def _times(s: slice, n: int) -> slice:
    return slice(s.start * n, s.stop * n)


def attention(c: ModelConfig) -> dict[str, Recipe]:
    """Embedding, norms, attention and head: what every family has."""
    D, V, h = c.hidden_size, c.vocab_size, c.head_dim
    H, K, G = c.num_attention_heads, c.num_key_value_heads, c.groups
    qkv = tuple(f"self_attn.{x}_proj" for x in "qkv")
    cuts = (G * h, h, h)  # of each key head: rows of q, k and v

    def join_qkv(*parts: np.ndarray) -> np.ndarray:
        heads = parts[1].shape[0] // h
        return np.concatenate([x.T.reshape(x.shape[1], heads, -1) for x in parts], axis=-1)

    def split_qkv(w: np.ndarray) -> list[np.ndarray]:
        return [x.reshape(D, -1).T for x in np.split(w, [G * h, (G + 1) * h], axis=-1)]

    recipes = {
        "embed": Recipe(("model.embed_tokens.weight",), ((V, D),)),
        "layers.attn_norm": vector(c, "input_layernorm.weight", D),
        "layers.qkv": stacked(
            c,
            [f"{n}.weight" for n in qkv],
            ((H * h, D), (K * h, D), (K * h, D)),
            join_qkv,
            split_qkv,
            lambda d, k, _: [(_times(k, n), d) for n in cuts],
        ),
        "layers.out": stacked(
            c,
            "self_attn.o_proj.weight",
            ((D, H * h),),
            lambda w: w.T.reshape(-1, G * h, w.shape[0]),
            lambda w: [w.reshape(H * h, D).T],
            lambda k, _, d: [(d, _times(k, G * h))],
        ),
        "layers.mlp_norm": vector(c, "post_attention_layernorm.weight", D),
        "norm": Recipe(("model.norm.weight",), ((D,),)),
    }
    if c.qkv_bias:
        recipes["layers.qkv_bias"] = stacked(
            c,
            [f"{n}.bias" for n in qkv],
            ((H * h,), (K * h,), (K * h,)),
            lambda *parts: np.concatenate([x.reshape(len(parts[1]) // h, -1) for x in parts], axis=-1),
            lambda b: [x.reshape(-1) for x in np.split(b, [G * h, (G + 1) * h], axis=-1)],
            lambda k, _: [(_times(k, n),) for n in cuts],
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
            lambda d, _, f: [(f, d), (f, d)],
            experts=experts,
        ),
        "layers.down": matrix(c, f"{prefix}.down_proj.weight", F, D, experts=experts),
    }


def dense(c: ModelConfig) -> dict[str, Recipe]:
    """All tensors of a dense model."""
    return {**attention(c), **mlp(c)}
