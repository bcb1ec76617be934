"""Several steps of decoding in one program: read a token of each sequence, sample the next, and again.

The pages of each sequence are gathered once, into keys and values that lie as attention reads them; what the
steps add goes into a few columns beside them, and into the pages at the end. The layers are unrolled over
weights of their own: a loop over stacked weights copies each layer before its products, which at a few rows
takes as long as the products. Letters in shapes as in `decoder.py`; M steps, T columns of gathered context.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from metagym.models.attention import MASKED, dot_batched
from metagym.models.decoder import Cache, Decoder, rms_norm, rotary
from metagym.models.matmul import few_rows, from_bits, to_bits

Sample = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Limits(NamedTuple):
    """When decoding ends."""

    steps: jax.Array | np.ndarray  # i32, at most M
    patience: jax.Array | np.ndarray  # i32: after so many steps it ends as soon as any sequence has
    left: jax.Array | np.ndarray  # i32 [S], tokens until a sequence ends
    stop: jax.Array | np.ndarray  # i32 [S, E], tokens that end it; -1: none


class Split(NamedTuple):
    """The weights once more, as `decode` reads them fastest."""

    layers: Sequence[Mapping[str, jax.Array]]  # matrices [N, M] for M inputs, but for those of experts
    head: jax.Array  # [V, D]


def split(model: Decoder, dtype: Any) -> Split:
    """Each layer as arrays of its own, and the head in the type of its products."""
    c, stacked = model.config, model._stacked()
    inputs = {"qkv": c.hidden_size, "out": c.num_attention_heads * c.head_dim}
    if not c.num_experts:
        inputs |= {"gate_up": c.hidden_size, "down": c.intermediate_size}
    for name, size in inputs.items():
        stacked[name] = stacked[name].reshape(c.num_hidden_layers, size, -1).swapaxes(1, 2)
    layers = [{name: x[i] for name, x in stacked.items()} for i in range(c.num_hidden_layers)]
    return Split(layers, model._head().astype(dtype))


def decode(
    model: Decoder,
    weights: Split,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    page_table: jax.Array,
    limits: Limits,
    sample: Sample,
    *,
    most: int,
    compute_dtype: Any = jnp.float32,
    context_dtype: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Cache]:
    """Reads the last token of each of S sequences, samples the next one, and so on, for up to `most` = M
    steps. Returns tokens i32 `[M, S]`, their log-probs f32 `[M, S]`, the number of steps done, and the cache.
    `weights`: from `split`, made before: within the program it would copy them each time.

    tokens, positions: i32 `[S]`, a negative position is padding. page_table i32 `[S, P]` as in
    `Decoder.extend`; what a sequence has no page for goes to the scratch page. `sample(logits f32 [S, V],
    step i32)` gives token and log-prob of each row. Rows that have ended sample on: cut them at their end.
    context_dtype: what the gathered pages are held in, by default as in the cache. A CPU attends in f32 in
    any case: held in f32 they take more memory, and are not converted in every step.
    """
    c, (S, P), layers = model.config, page_table.shape, weights.layers
    page_size, K = cache.k.shape[2], c.num_key_value_heads
    T = P * page_size
    valid = positions >= 0
    old = jnp.arange(T) < positions[:, None]  # [S, T]
    before = jax.tree.map(to_bits, cache)

    def gather(pages: jax.Array) -> jax.Array:  # [pages, page_size, K, h] -> [S, K, T, h]
        x = jnp.moveaxis(pages[page_table].reshape(S, T, K, c.head_dim), 2, 1)
        return from_bits(x).astype(context_dtype or cache.k.dtype)

    # Keys [S K, h, T] and values [S K, T, h], as their products with a query read them in order.
    context = [
        (
            gather(before.k[n]).swapaxes(2, 3).reshape(S * K, c.head_dim, T),
            gather(before.v[n]).reshape(S * K, T, c.head_dim),
        )
        for n in range(len(layers))
    ]
    # And what the steps add, in f32: rounded as in the cache.
    none = [(jnp.zeros((S * K, c.head_dim, most)), jnp.zeros((S * K, most, c.head_dim)))] * len(layers)
    routing = None
    if cache.routing is not None:
        routing = jnp.zeros((len(layers), most, S, cache.routing.shape[-1]), jnp.int32)
    made = (jnp.zeros((most, S), jnp.int32), jnp.zeros((most, S), jnp.float32))

    def going(state: Any) -> jax.Array:
        i, ended = state[:2]
        return (i < limits.steps) & ~ended.all() & ((i < limits.patience) | ~(ended & valid).any())

    def step(state: Any) -> Any:
        i, ended, token, added, routing, made = state
        # Else XLA computes cosines anew in every layer.
        cos, sin = lax.optimization_barrier(rotary(c, (positions + i)[:, None]))
        visible = jnp.concatenate([old, jnp.broadcast_to(jnp.arange(most) <= i, (S, most))], axis=1)
        x, grown, chosen = model._embed(token[:, None]), [], []
        for w, read, (keys, values) in zip(layers, context, added, strict=True):
            q, k, v = model._project(w, x, cos, sin, compute_dtype, few_rows)
            k, v = (x.reshape(S * K, -1).astype(cache.k.dtype).astype(jnp.float32) for x in (k, v))
            k = lax.dynamic_update_slice(keys, k[:, :, None], (0, 0, i))
            v = lax.dynamic_update_slice(values, v[:, None], (0, i, 0))
            grown.append((k, v))
            attended = _attention(q, (read, (k, v)), visible, compute_dtype)
            x, experts = model._finish(w, x, attended, compute_dtype, product=few_rows)
            chosen.append(experts)
        if routing is not None:
            routing = lax.dynamic_update_slice(routing, jnp.stack(chosen)[:, None, :, 0], (0, i, 0, 0))
        x = rms_norm(x, model.norm[...], c.rms_norm_eps)
        token, logprob = sample(few_rows(x[:, 0], weights.head, compute_dtype), i)
        made = tuple(
            lax.dynamic_update_slice(m, y[None], (i, 0)) for m, y in zip(made, (token, logprob), strict=True)
        )
        ended = ended | (token[:, None] == limits.stop).any(1) | (i + 1 >= limits.left)
        return i + 1, ended, token, grown, routing, made

    start = (jnp.zeros((), jnp.int32), ~valid, tokens, none, routing, made)
    done, _, _, added, routing, made = lax.while_loop(going, step, start)

    at = positions[:, None] + jnp.arange(most)  # [S, M]
    write = valid[:, None] & (jnp.arange(most) < done) & (at < T)
    page = jnp.take_along_axis(page_table, jnp.clip(at // page_size, 0, P - 1), axis=1)
    page, slot = jnp.where(write, page, 0), jnp.where(write, at % page_size, 0)

    def new(x: list[jax.Array]) -> jax.Array:  # [S K, M, h] of each layer -> [N, S, M, K, h]
        x = [to_bits(y.astype(cache.k.dtype)) for y in x]
        return jnp.moveaxis(jnp.stack(x).reshape(len(layers), S, K, most, c.head_dim), 2, 3)

    k = new([keys.swapaxes(1, 2) for keys, _ in added])
    v = new([values for _, values in added])

    def put(pages: jax.Array, x: jax.Array) -> jax.Array:
        return from_bits(pages.at[:, page, slot].set(x))

    cache = cache._replace(k=put(before.k, k), v=put(before.v, v))
    if cache.routing is not None and routing is not None:
        cache = cache._replace(routing=put(cache.routing, jnp.moveaxis(routing, 1, 2)))
    return *made, done, cache


def _attention(q: jax.Array, parts: Sequence[tuple[jax.Array, jax.Array]], visible: jax.Array, dtype: Any):
    """q [S, 1, K, G, h] over keys [S K, h, T] and values [S K, T, h] in two parts; visible [S, T of both] ->
    as q. What is f32 is multiplied in f32."""
    S, _, K, G, h = q.shape
    q = (q * h**-0.5).reshape(S * K, G, h)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return dot_batched(a, b, (2, 1), jnp.promote_types(dtype, b.dtype))

    s = jnp.concatenate([product(q, keys) for keys, _ in parts], axis=-1)
    s = jnp.where(visible[:, None, None], s.reshape(S, K, G, -1), MASKED).reshape(s.shape)
    p = jnp.exp(s - s.max(-1, keepdims=True))
    T = parts[0][1].shape[1]
    out = product(p[..., :T], parts[0][1]) + product(p[..., T:], parts[1][1])
    return (out / p.sum(-1, keepdims=True)).reshape(S, 1, K, G, h)
