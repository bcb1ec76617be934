"""Attention over trees: several continuations of one prompt in a row, whose prompt is computed once.

A tree is a prompt followed by its branches. Its tokens' positions count from 0 along each branch, so what
begins at position 0 is a prompt (or a segment of its own), and what begins later branches off the last one
that did. A token sees the earlier ones of its own branch and the whole prompt, and nothing of other branches.
The score matrix of a row is whole in memory, `[heads, L, L]`: for rows of some hundred tokens.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from metagym.models.attention import MASKED


def tree_mask(segments: jax.Array, positions: jax.Array) -> jax.Array:
    """bool `[B, L, L]`: may the query of a row see the key? segments i32 `[B, L]` rise within a row from one
    prompt or branch to the next, 0 is padding; positions i32 `[B, L]`."""
    assert segments.shape == positions.shape, (segments.shape, positions.shape)
    roots = lax.cummax(jnp.where(positions == 0, segments, 0), axis=1)
    roots = jnp.where(segments > 0, roots, 0)
    own = segments[:, :, None] == segments[:, None, :]
    prompt = (segments == roots)[:, None, :] & (roots[:, :, None] == roots[:, None, :])
    return (own | prompt) & jnp.tri(segments.shape[1], dtype=bool)


def tree_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """q `[B, L, K, G, h]` (G query heads share each of K key heads), k and v `[B, L, K, h]`, mask `[B, L,
    L]`; f32 `[B, L, K, G, h]`. Operands in `dtype`, sums in f32; a query that sees nothing gets the mean of
    v."""
    B, L, K, _, h = q.shape
    assert k.shape == v.shape == (B, L, K, h), (q.shape, k.shape, v.shape)
    assert mask.shape == (B, L, L), (q.shape, mask.shape)
    how = {
        "precision": lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        "preferred_element_type": jnp.float32,
    }
    q, k, v = (q * h**-0.5).astype(dtype), k.astype(dtype), v.astype(dtype)
    scores = jnp.einsum("blkgh,bmkh->bkglm", q, k, **how)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), axis=-1)
    return checkpoint_name(jnp.einsum("bkglm,bmkh->blkgh", weights.astype(dtype), v, **how), "attention")
