"""Log-probabilities and entropies of the next token without a `[tokens, vocabulary]` array.

The logits of a chunk of tokens are made, reduced to three numbers a token and dropped; the backward pass
makes them again. Only what is trained is computed: the trained tokens of each row are moved to its front, and
chunks without any are skipped. The chunk cuts along the row, not across rows, so rows may be split over
devices.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from metagym.models import sharding
from metagym.models.matmul import dot

_LEAST = 64  # tokens of a device in a chunk: with fewer, XLA multiplies matrices in another order


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None = None,
    *,
    chunk: int,
    compute_dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`log softmax(hidden @ head.T)[targets]` and the entropy in nats, both f32 `[B, L]`; 0 where `mask` is.

    hidden f32 `[B, L, D]`, head `[V, D]`, targets i32 `[B, L]`, mask `[B, L]` (none: everything counts).
    About `chunk` tokens have logits at one time. Gradients flow to hidden and head from both results.
    """
    B, L, D = hidden.shape
    assert targets.shape == (B, L), (hidden.shape, targets.shape)
    assert head.shape[1] == D, (hidden.shape, head.shape)
    # Tokens of each row in a chunk, and in a chunk where little is trained.
    wide = max(1, min(chunk // B, -(-L // 2)))
    narrow = min(wide, math.ceil(_LEAST * sharding.parts("batch", mesh) / B))
    wide -= wide % narrow
    head = sharding.constrain(head, ("vocab", None), mesh)  # gathered over fsdp once, not in every chunk
    keep = jnp.ones((B, L), bool) if mask is None else jnp.asarray(mask) > 0
    count = keep.sum(1).max()
    order = jnp.argsort(~keep, axis=1, stable=True)

    def front(x: jax.Array) -> jax.Array:  # what is trained first, padded to whole chunks
        if mask is not None:
            x = jnp.take_along_axis(x, order.reshape(B, L, *[1] * (x.ndim - 2)), axis=1)
        return jnp.pad(x, [(0, 0), (0, -L % wide)] + [(0, 0)] * (x.ndim - 2))

    out = _head(front(hidden), head, front(targets), count, jnp.dtype(compute_dtype), (wide, narrow))
    back = jnp.argsort(order, axis=1)
    logprobs, entropy = (x[:, :L] if mask is None else jnp.take_along_axis(x, back, axis=1) for x in out)
    return jnp.where(keep, logprobs, 0.0), jnp.where(keep, entropy, 0.0)


def _logits(x: jax.Array, head: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[B, width, D] -> [B * width, V]"""
    return dot(x.reshape(-1, x.shape[-1]), head, (1, 1), dtype)


def _chunks(
    count: jax.Array, widths: tuple[int, int], one: Callable[[int, jax.Array, Any], Any], carry: Any
) -> Any:
    """Applies `one(width, start, carry)` to the chunks of the first `count` tokens of the rows."""

    def run(width: int) -> Callable[[Any], Any]:
        return lambda c: lax.fori_loop(0, -(-count // width), lambda i, c: one(width, i * width, c), c)

    wide, narrow = widths
    if wide == narrow:
        return run(wide)(carry)
    return lax.cond(2 * count <= wide, run(narrow), run(wide), carry)


def _part(x: jax.Array, start: jax.Array, width: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, width, axis=1)


def _set(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, part, start, axis=1)


def _head_primal(hidden, head, targets, count, dtype, widths) -> tuple[jax.Array, jax.Array]:
    return _head_fwd(hidden, head, targets, count, dtype, widths)[0]


def _head_fwd(hidden, head, targets, count, dtype, widths):
    weights = head.astype(dtype)

    def one(width, start, out):
        x, y = _part(hidden, start, width), _part(targets, start, width)
        z = _logits(x, weights, dtype)
        top = z.max(-1, keepdims=True)
        e = jnp.exp(z - top)
        total = e.sum(-1)
        lse = jnp.log(total) + top[:, 0]
        mean = (e * z).sum(-1) / total  # the expected logit
        chosen = jnp.take_along_axis(z, y.reshape(-1, 1), axis=1, mode="clip")[:, 0]
        made = (chosen - lse, lse - mean, lse)
        return tuple(_set(o, a.reshape(y.shape), start) for o, a in zip(out, made, strict=True))

    zeros = (jnp.zeros(targets.shape, jnp.float32),) * 3
    logprobs, entropy, lse = _chunks(count, widths, one, zeros)
    return (logprobs, entropy), (hidden, head, targets, count, lse, entropy)


def _head_bwd(dtype, widths, residuals, gradients):
    hidden, head, targets, count, lse, entropy = residuals
    weights = head.astype(dtype)
    vocabulary = jnp.arange(head.shape[0])

    def one(width, start, carry):
        d_hidden, d_head = carry
        x = _part(hidden, start, width)
        y, l, h, d_logprob, d_entropy = (
            _part(a, start, width).reshape(-1, 1) for a in (targets, lse, entropy, *gradients)
        )
        logp = _logits(x, weights, dtype) - l
        # d logprob / dz = onehot - p;  d entropy / dz = -p (log p + entropy)
        dz = -jnp.exp(logp) * (d_logprob + d_entropy * (logp + h))
        hit = jnp.clip(y, 0, head.shape[0] - 1) == vocabulary
        dz = (dz + jnp.where(hit, d_logprob, 0.0)).astype(dtype)
        dx = dot(dz, weights, (1, 0), dtype).reshape(x.shape)
        return _set(d_hidden, dx, start), d_head + dot(dz, x.reshape(-1, x.shape[-1]), (0, 0), dtype)

    zeros = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32))
    d_hidden, d_head = _chunks(count, widths, one, zeros)
    return d_hidden, d_head.astype(head.dtype), None, None


_head = jax.custom_vjp(_head_primal, nondiff_argnums=(4, 5))
_head.defvjp(_head_fwd, _head_bwd)
