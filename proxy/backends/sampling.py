"""Sampling one token per row, inside jit.

Letters in shapes: S rows, V vocabulary. The order of the filters is min_p, then top_k, then top_p of what is
left, each on the distribution at the row's temperature; vLLM applies them in this order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_BLOCK = 256  # tokens


class Rows(NamedTuple):
    """How to sample each row: arrays `[S]`."""

    seed: jax.Array | np.ndarray  # u32[S, 2]: low and high half
    step: jax.Array | np.ndarray  # i32, which token of its reply this is
    temperature: jax.Array | np.ndarray  # f32, 0: greedy
    top_p: jax.Array | np.ndarray  # f32
    top_k: jax.Array | np.ndarray  # i32, 0: off
    min_p: jax.Array | np.ndarray  # f32


def sample(logits: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Draws one token per row of logits f32 `[S, V]`: (token i32 `[S]`, log-prob f32 `[S]`).

    The random numbers of a row depend on its seed and step only, not on the batch that it is in. The
    log-prob is that of the distribution the token was drawn from: the full softmax at temperature 1 without
    filters; renormalised with them. For greedy rows (temperature 0), which draw from nothing, filters are off
    and it is that of the full softmax at temperature 1.
    """
    assert logits.ndim == 2, logits.shape
    greedy = rows.temperature <= 0
    filters = ~greedy & ((rows.top_p < 1) | (rows.top_k > 0) | (rows.min_p > 0))

    def scores(filter: bool) -> jax.Array:
        x = logits / jnp.where(greedy, 1.0, rows.temperature)[:, None]
        if filter:
            x = jnp.where(filters[:, None], _filter(x, rows), x)
        # As log-softmax does it, not x - logsumexp(x): that rounds to above 0 for a nearly certain token.
        return x - x.max(-1, keepdims=True)

    # Sorting a vocabulary is slow, and training never needs it; nor the index of the highest.
    x = lax.cond(filters.any(), lambda: scores(True), lambda: scores(False))
    p = jnp.exp(x)
    token = _draw(p, rows)
    token = lax.cond(
        greedy.any(),
        lambda: jnp.where(greedy, jnp.argmax(x, axis=-1).astype(jnp.int32), token),
        lambda: token,
    )
    chosen = jnp.take_along_axis(x, token[:, None], axis=-1)[:, 0]
    return token, chosen - jnp.log(p.sum(-1))


def _draw(p: jax.Array, rows: Rows) -> jax.Array:
    """Draws from weights p f32 `[S, V]`: a block of the vocabulary first, then a token in it, so that two
    random numbers do where Gumbel noise takes V, and none is too coarse for a rare token."""

    def uniform(seed: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed[0]), seed[1]), step)
        return jax.random.uniform(key, (2,), jnp.float32)

    u = jax.vmap(uniform)(jnp.asarray(rows.seed), jnp.asarray(rows.step))
    blocks = jnp.pad(p, ((0, 0), (0, -p.shape[1] % _BLOCK))).reshape(p.shape[0], -1, _BLOCK)
    block = _pick(blocks.sum(-1), u[:, :1])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * _BLOCK + _pick(inside, u[:, 1:])).astype(jnp.int32)


def _pick(weights: jax.Array, u: jax.Array) -> jax.Array:
    """The first index whose cumulative weight exceeds the share u `[S, 1]` of all; never one of weight 0."""
    total = jnp.cumsum(weights, axis=-1)
    there = (total > u * total[:, -1:]) & (weights > 0)
    return jnp.where(there.any(-1), jnp.argmax(there, axis=-1), jnp.argmax(weights, axis=-1))


def _filter(x: jax.Array, rows: Rows) -> jax.Array:
    """x with -inf where min_p, top_k or top_p of its row excludes the token."""
    x = jnp.where(jnp.exp(x - x.max(-1, keepdims=True)) < jnp.asarray(rows.min_p)[:, None], -jnp.inf, x)
    order = jnp.argsort(-x, axis=-1)
    top = jnp.take_along_axis(x, order, axis=-1)
    k = jnp.where(rows.top_k > 0, rows.top_k, x.shape[-1])
    keep = jnp.arange(x.shape[-1]) < k[:, None]
    p = jax.nn.softmax(jnp.where(keep, top, -jnp.inf), axis=-1)
    keep &= jnp.cumsum(p, axis=-1) - p < jnp.asarray(rows.top_p)[:, None]
    return jnp.where(jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1), x, -jnp.inf)
