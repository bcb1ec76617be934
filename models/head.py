"""Log-probabilities and entropies of the next token without a `[tokens, vocabulary]` array.

The logits of a chunk of tokens are made, reduced to three numbers a token and dropped; the backward pass
makes them again. Only what is trained is computed: the trained tokens of each row are moved to its front, and
chunks without any are skipped. On a mesh every device does this with its own tokens and the whole head, or
its part of the vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from metagym.models import sharding
from metagym.models.matmul import dot, outer

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
    About `chunk` tokens of a device have logits at one time. Gradients flow to hidden and head from both
    results.
    """
    B, L, D = hidden.shape
    assert targets.shape == (B, L), (hidden.shape, targets.shape)
    assert head.shape[1] == D, (hidden.shape, head.shape)
    keep = jnp.ones((B, L), bool) if mask is None else jnp.asarray(mask) > 0
    local = functools.partial(_local, chunk=chunk, dtype=jnp.dtype(compute_dtype), sort=mask is not None)
    if mesh is None:
        return local(hidden, head, targets, keep)
    rows, tokens = sharding.spec(("batch", "length"), mesh, (B, L))
    vocab, embed = sharding.spec(("vocab", "embed"), mesh, head.shape)
    own = jax.P(rows, tokens)
    return jax.shard_map(
        functools.partial(local, vocab=vocab, embed=embed),
        mesh=mesh,
        in_specs=(own, jax.P(vocab, embed), own, own),
        out_specs=(own, own),
        check_vma=False,
    )(hidden, head, targets, keep)


def _local(hidden, head, targets, keep, *, chunk, dtype, sort, vocab=None, embed=None):
    """On one device, whose `head` is a part: of the rows along mesh axis `vocab`, of D along `embed`."""
    B, L, _ = hidden.shape
    # Tokens of each row in a chunk, and in a chunk where little is trained.
    wide = max(1, min(chunk // B, -(-L // 2)))
    narrow = min(wide, math.ceil(_LEAST / B))
    wide -= wide % narrow
    count = keep.sum(1).max()
    order = jnp.argsort(~keep, axis=1, stable=True)

    def front(x: jax.Array) -> jax.Array:  # what is trained first, padded to whole chunks
        if sort:
            x = jnp.take_along_axis(x, order.reshape(B, L, *[1] * (x.ndim - 2)), axis=1)
        return jnp.pad(x, [(0, 0), (0, -L % wide)] + [(0, 0)] * (x.ndim - 2))

    out = _head(front(hidden), head, front(targets), count, dtype, (wide, narrow), vocab, embed)
    back = jnp.argsort(order, axis=1)
    logprobs, entropy = (jnp.take_along_axis(x, back, axis=1) if sort else x[:, :L] for x in out)
    return jnp.where(keep, logprobs, 0.0), jnp.where(keep, entropy, 0.0)


def _whole(head: jax.Array, dtype: jnp.dtype, embed: Any) -> jax.Array:
    return sharding.all_gather(head.astype(dtype), embed, axis=1)


def _total(x: jax.Array, axis: Any) -> jax.Array:
    return x if axis is None else lax.psum(x, axis)


def _targets(y: jax.Array, size: int, vocab: Any) -> tuple[jax.Array, jax.Array]:
    """Rows of this device's part of the head, and whether the targets y are among them."""
    if vocab is None:
        return jnp.clip(y, 0, size - 1), jnp.ones(y.shape, bool)
    y = jnp.clip(y, 0, size * lax.axis_size(vocab) - 1) - lax.axis_index(vocab) * size
    return jnp.clip(y, 0, size - 1), (y >= 0) & (y < size)


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


def _head_primal(hidden, head, targets, count, dtype, widths, vocab, embed) -> tuple[jax.Array, jax.Array]:
    return _head_fwd(hidden, head, targets, count, dtype, widths, vocab, embed)[0]


def _head_fwd(hidden, head, targets, count, dtype, widths, vocab, embed):
    weights = _whole(head, dtype, embed)

    def one(width, start, out):
        x, y = _part(hidden, start, width), _part(targets, start, width)
        z = _logits(x, weights, dtype)
        top = z.max(-1, keepdims=True)
        top = top if vocab is None else lax.pmax(top, vocab)
        e = jnp.exp(z - top)
        total = _total(e.sum(-1), vocab)
        lse = jnp.log(total) + top[:, 0]
        mean = _total((e * z).sum(-1), vocab) / total  # the expected logit
        row, mine = _targets(y.reshape(-1, 1), z.shape[1], vocab)
        chosen = _total(jnp.where(mine, jnp.take_along_axis(z, row, axis=1), 0.0)[:, 0], vocab)
        made = (chosen - lse, lse - mean, lse)
        return tuple(_set(o, a.reshape(y.shape), start) for o, a in zip(out, made, strict=True))

    zeros = (jnp.zeros(targets.shape, jnp.float32),) * 3
    logprobs, entropy, lse = _chunks(count, widths, one, zeros)
    return (logprobs, entropy), (hidden, head, targets, count, lse, entropy)


def _head_bwd(dtype, widths, vocab, embed, residuals, gradients):
    hidden, head, targets, count, lse, entropy = residuals
    weights = _whole(head, dtype, embed)
    vocabulary = jnp.arange(head.shape[0])
    # shard_map hands every device its share of a gradient, and adds up what the devices return.
    gradients = tuple(_total(g, vocab) for g in gradients)

    def one(width, start, carry):
        d_hidden, d_head = carry
        x = _part(hidden, start, width)
        y, l, h, d_logprob, d_entropy = (
            _part(a, start, width).reshape(-1, 1) for a in (targets, lse, entropy, *gradients)
        )
        logp = _logits(x, weights, dtype) - l
        # d logprob / dz = onehot - p;  d entropy / dz = -p (log p + entropy)
        dz = -jnp.exp(logp) * (d_logprob + d_entropy * (logp + h))
        row, mine = _targets(y, head.shape[0], vocab)
        hit = mine & (row == vocabulary)
        dz = (dz + jnp.where(hit, d_logprob, 0.0)).astype(dtype)
        dx = dot(dz, weights, (1, 0), dtype).reshape(x.shape)
        return _set(d_hidden, dx, start), d_head + outer(x.reshape(-1, x.shape[-1]), dz, dtype)

    zeros = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(weights.T.shape, jnp.float32))
    d_hidden, d_head = _chunks(count, widths, one, zeros)
    d_head = d_head.T
    if embed is not None:
        d_head = sharding.psum_scatter(d_head, embed, axis=1)
        # Now, not after the layers' backward pass, through which the whole of it would wait.
        d_hidden, d_head = lax.optimization_barrier((d_hidden, d_head))
    return d_hidden, d_head.astype(head.dtype), None, None


_head = jax.custom_vjp(_head_primal, nondiff_argnums=(4, 5, 6, 7))
_head.defvjp(_head_fwd, _head_bwd)
