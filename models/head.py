"""Log-probabilities and entropies of the next token without a `[tokens, vocabulary]` array.

The logits of a chunk of tokens are made, reduced to three numbers a token and dropped; the backward pass
makes them again. The chunk cuts along the row, not across rows, so rows may be split over devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from metagym.models import sharding
from metagym.models.matmul import dot


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    chunk: int,
    compute_dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`log softmax(hidden @ head.T)[targets]` and the entropy in nats, both f32 `[B, L]`.

    hidden f32 `[B, L, D]`, head `[V, D]`, targets i32 `[B, L]`. About `chunk` tokens have logits at one time,
    in at least two chunks. Gradients flow to hidden and head from both results.
    """
    B, L, D = hidden.shape
    assert targets.shape == (B, L), (hidden.shape, targets.shape)
    assert head.shape[1] == D, (hidden.shape, head.shape)
    width = max(1, min(chunk // B, -(-L // 2)))  # tokens of each row in a chunk
    n = max(2, -(-L // width))
    pad = n * width - L
    head = sharding.constrain(head, ("vocab", None), mesh)  # gathered over fsdp once, not in every chunk

    def chunks(x: jax.Array) -> jax.Array:  # [B, L, ...] -> [n, B, width, ...]
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, n, width, *x.shape[2:]), 1, 0)

    out = _head(chunks(hidden), head, chunks(targets), jnp.dtype(compute_dtype))
    logprobs, entropy = (jnp.moveaxis(x, 0, 1).reshape(B, n * width)[:, :L] for x in out)
    return logprobs, entropy


def _logits(x: jax.Array, head: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[B, width, D] -> [B * width, V]"""
    return dot(x.reshape(-1, x.shape[-1]), head, (1, 1), dtype)


def _head_primal(hidden, head, targets, dtype) -> tuple[jax.Array, jax.Array]:
    return _head_fwd(hidden, head, targets, dtype)[0]


def _head_fwd(hidden, head, targets, dtype):
    weights = head.astype(dtype)

    def one(args):
        x, y = args
        z = _logits(x, weights, dtype)
        top = z.max(-1, keepdims=True)
        e = jnp.exp(z - top)
        total = e.sum(-1)
        lse = jnp.log(total) + top[:, 0]
        mean = (e * z).sum(-1) / total  # the expected logit
        chosen = jnp.take_along_axis(z, y.reshape(-1, 1), axis=1, mode="clip")[:, 0]
        return tuple(a.reshape(y.shape) for a in (chosen - lse, lse - mean, lse))

    logprobs, entropy, lse = lax.map(one, (hidden, targets))
    return (logprobs, entropy), (hidden, head, targets, lse, entropy)


def _head_bwd(dtype, residuals, gradients):
    hidden, head, targets, lse, entropy = residuals
    weights = head.astype(dtype)
    vocabulary = jnp.arange(head.shape[0])

    def one(d_head, args):
        x, y, lse, entropy, d_logprob, d_entropy = args
        column = lambda a: a.reshape(-1, 1)  # noqa: E731
        logp = _logits(x, weights, dtype) - column(lse)
        # d logprob / dz = onehot - p;  d entropy / dz = -p (log p + entropy)
        dz = -jnp.exp(logp) * (column(d_logprob) + column(d_entropy) * (logp + column(entropy)))
        dz = (
            dz + jnp.where(column(jnp.clip(y, 0, head.shape[0] - 1)) == vocabulary, column(d_logprob), 0.0)
        ).astype(dtype)
        dx = dot(dz, weights, (1, 0), dtype).reshape(x.shape)
        return d_head + dot(dz, x.reshape(-1, x.shape[-1]), (0, 0), dtype), dx

    zero = jnp.zeros(head.shape, jnp.float32)
    d_head, d_hidden = lax.scan(one, zero, (hidden, targets, lse, entropy, *gradients))
    return d_hidden, d_head.astype(head.dtype), None


_head = jax.custom_vjp(_head_primal, nondiff_argnums=(3,))
_head.defvjp(_head_fwd, _head_bwd)
