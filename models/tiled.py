"""The policy of training, computed as a deterministic engine generates: tile by tile, through the cache.

A row's segments are read in tiles of `page_size` tokens from `rows` rows, with `extend`, each tile after the
ones before it; the head sees one token of each of the `rows` rows at a time. An engine whose tile has the
same shape and the same context computes the same sums in the same order, so in f32 on the CPU log-probs are
its own bit for bit. Gradients are those of the model, to rounding.

Slower than `make_policy`, and it keeps the cache once per tile for the backward pass.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from metagym.models.decoder import Cache, Decoder, HasTokens, Policy, init_cache


def make_tiled_policy(
    graphdef: Any, *, rows: int, page_size: int, context: int, compute_dtype: Any = jnp.float32
) -> Policy:
    """`policy(params, batch) -> (logprobs, entropy)`, f32 `[B, L]`, as `make_policy` makes them.

    rows, page_size: shape of a tile. context: most tokens of a segment. Segments start at multiples of
    `page_size` (nobody checks); for one device.
    """

    def policy(params: Any, batch: HasTokens) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, params)
        B, L = batch.tokens.shape
        tiles, n = -(-B // rows), -(-L // page_size)
        pad = ((0, tiles * rows - B), (0, n * page_size - L))

        def cut(x: Any, fill: int = 0) -> jax.Array:  # [B, L] -> [tiles, n, rows, page_size]
            x = jnp.pad(jnp.asarray(x), pad, constant_values=fill)
            return x.reshape(tiles, rows, n, page_size).swapaxes(1, 2)

        positions = jnp.where(jnp.asarray(batch.segments) > 0, jnp.asarray(batch.positions), -1)
        inputs = cut(batch.tokens), cut(batch.targets), cut(positions, -1)
        out = lax.map(lambda x: _rows(model, x, page_size, -(-context // page_size), compute_dtype), inputs)
        logprobs, entropy = (x.swapaxes(1, 2).reshape(tiles * rows, n * page_size)[:B, :L] for x in out)
        return logprobs, entropy

    return policy


def _rows(model: Decoder, inputs: Any, page_size: int, pages: int, dtype: Any):
    """Log-probs and entropies `[n, rows, page_size]` of tokens, targets and positions of that shape."""
    n, rows, _ = inputs[0].shape
    own = 1 + jnp.arange(rows)[:, None] * n  # a row's pages lie one behind the other; page 0 is scratch

    @jax.checkpoint
    def tile(cache: Cache, x: Any):
        i, tokens, targets, positions = x
        first = i - jnp.maximum(positions[:, :1], 0) // page_size  # page of the segment's start
        table = own + jnp.minimum(first + jnp.arange(pages), n - 1)
        hidden, cache = model.extend(cache, tokens, positions, table, compute_dtype=dtype)

        def head(x: Any) -> tuple[jax.Array, jax.Array]:  # one token of each row, as it is sampled
            h, y = x
            z = model.logits(h, compute_dtype=dtype)
            z = z - z.max(-1, keepdims=True)
            chosen = jnp.take_along_axis(z, y[:, None], axis=-1, mode="clip")[:, 0]
            e = jnp.exp(z)
            total = e.sum(-1)
            return chosen - jnp.log(total), jnp.log(total) - (e * z).sum(-1) / total

        out = lax.map(jax.checkpoint(head), (hidden.swapaxes(0, 1), targets.swapaxes(0, 1)))
        return cache, tuple(x.swapaxes(0, 1) for x in out)

    cache = init_cache(model.config, 1 + rows * n, page_size, dtype)
    return lax.scan(tile, cache, (jnp.arange(n), *inputs))[1]
