"""Blockwise causal attention over packed rows, in memory linear in the length.

The online-softmax algorithm of FlashAttention (Dao et al. 2022, arXiv:2205.14135), with the backward pass
from the saved log-sum-exp. A block of queries visits only the key blocks between the start of its first
token's segment and itself, so rows packed with many short segments cost what the segments cost.

On a TPU the same is computed by JAX's splash attention kernel, on a GPU in bfloat16 by its Pallas kernel for
GPUs. A mesh axis `context` splits the tokens of a
row: every device has the queries of two chunks of it, an early and a late one, and gathers all keys and
values.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from metagym.models import sharding

BLOCK = 128
"""Queries and keys in a block. In f32 on the CPU the same tokens give the same bits in any row, batch or
padding if their segment starts at a multiple of it, and the rows on a device hold at least 64 tokens together
(for fewer, XLA multiplies matrices in another order)."""

MASKED = (
    -1e30
)  # finite: a row of only masked keys gives garbage, not NaN, and the next block cancels it exactly


def dot_batched(a: jax.Array, b: jax.Array, contract: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Batched over the leading axis, operands in `dtype`, accumulated in f32."""
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((contract[0],), (contract[1],)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _visible(segments: jax.Array, i: jax.Array, j: jax.Array, block: int) -> jax.Array:
    """[block, block]: may query i * block + row see key j * block + column?"""
    ids = jnp.arange(block)
    sq = lax.dynamic_slice_in_dim(segments, i * block, block)
    sk = lax.dynamic_slice_in_dim(segments, j * block, block)
    return (sq[:, None] == sk[None, :]) & (i * block + ids[:, None] >= j * block + ids[None, :])


def _scores(q_i: jax.Array, k_j: jax.Array, visible: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[K, G, block, block] in f32; q_i is [K, G * block, h] and already scaled."""
    block = visible.shape[0]
    s = dot_batched(q_i, k_j, (2, 2), dtype).reshape(q_i.shape[0], -1, block, block)
    return jnp.where(visible, s, MASKED)


def _first_blocks(segments: jax.Array, block: int) -> jax.Array:
    """[L / block]: the first key block that each block of queries must visit."""
    index = jnp.arange(segments.shape[0])
    starts = jnp.where(jnp.concatenate([jnp.ones(1, bool), segments[1:] != segments[:-1]]), index, 0)
    return lax.cummax(starts)[::block] // block


def _block_of(x: jax.Array, i: jax.Array, block: int) -> jax.Array:
    """Block i of x [K, G, L, h] as [K, G * block, h], or of x [K, L, h] as [K, block, h]."""
    y = lax.dynamic_slice_in_dim(x, i * block, block, axis=x.ndim - 2)
    return y.reshape(x.shape[0], -1, x.shape[-1])


def _row_forward(q, k, v, segments, *, where, block, dtype):
    """One row: q [K, G, l, h] (scaled), k and v [K, L, h], segments [L] -> out [K, G, l, h], lse [K, G, l].
    `where` [l / block]: which block of the row each block of q is."""
    K, G, L, h = q.shape
    first = _first_blocks(segments, block)

    def query_block(at):
        n, i = at
        q_i = _block_of(q, n, block)

        def key_block(j, carry):
            top, total, acc = carry
            s = _scores(q_i, _block_of(k, j, block), _visible(segments, i, j, block), dtype)
            new_top = jnp.maximum(top, s.max(-1))
            shrink = jnp.exp(top - new_top)
            p = jnp.exp(s - new_top[..., None])
            total = total * shrink + p.sum(-1)
            pv = dot_batched(p.reshape(K, G * block, block), _block_of(v, j, block), (2, 1), dtype)
            return new_top, total, acc * shrink[..., None] + pv.reshape(K, G, block, h)

        zero = jnp.zeros((K, G, block), jnp.float32)
        top, total, acc = lax.fori_loop(
            first[i], i + 1, key_block, (zero + MASKED, zero, jnp.zeros((K, G, block, h), jnp.float32))
        )
        return acc / total[..., None], top + jnp.log(total)

    out, lse = lax.map(query_block, (jnp.arange(L // block), where))
    return jnp.moveaxis(out, 0, 2).reshape(K, G, L, h), jnp.moveaxis(lse, 0, 2).reshape(K, G, L)


def _row_backward(q, k, v, segments, out, lse, dout, *, where, block, dtype):
    K, G, L, h = q.shape
    first = _first_blocks(segments, block)
    delta = (out * dout).sum(-1)

    def query_block(carry, at):
        n, i = at
        q_i, do_i = _block_of(q, n, block), _block_of(dout, n, block)
        lse_i = lax.dynamic_slice_in_dim(lse, n * block, block, axis=2)[..., None]
        delta_i = lax.dynamic_slice_in_dim(delta, n * block, block, axis=2)[..., None]

        def key_block(j, carry):
            dq_i, dk, dv = carry
            k_j, v_j = _block_of(k, j, block), _block_of(v, j, block)
            p = jnp.exp(_scores(q_i, k_j, _visible(segments, i, j, block), dtype) - lse_i)
            dp = dot_batched(do_i, v_j, (2, 2), dtype).reshape(p.shape)
            ds = (p * (dp - delta_i)).reshape(K, G * block, block)
            p = p.reshape(K, G * block, block)
            dk_j = _block_of(dk, j, block) + dot_batched(ds, q_i, (1, 1), dtype)
            dv_j = _block_of(dv, j, block) + dot_batched(p, do_i, (1, 1), dtype)
            return (
                dq_i + dot_batched(ds, k_j, (2, 1), dtype),
                lax.dynamic_update_slice_in_dim(dk, dk_j, j * block, axis=1),
                lax.dynamic_update_slice_in_dim(dv, dv_j, j * block, axis=1),
            )

        dq_i = jnp.zeros((K, G * block, h), jnp.float32)
        dq_i, dk, dv = lax.fori_loop(first[i], i + 1, key_block, (dq_i, *carry))
        return (dk, dv), dq_i.reshape(K, G, block, h)

    zeros = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = lax.scan(query_block, (zeros, zeros), (jnp.arange(L // block), where))
    return jnp.moveaxis(dq, 0, 2).reshape(K, G, L, h), dk, dv


def _rows_primal(q, k, v, segments, where, block, dtype) -> jax.Array:
    return _rows_fwd(q, k, v, segments, where, block, dtype)[0]


def _rows_fwd(q, k, v, segments, where, block, dtype):
    row = functools.partial(_row_forward, where=where, block=block, dtype=dtype)
    out, lse = checkpoint_name(lax.map(lambda args: row(*args), (q, k, v, segments)), "attention")
    return out, (q, k, v, segments, where, out, lse)


def _rows_bwd(block, dtype, residuals, dout):
    q, k, v, segments, where, out, lse = residuals
    row = functools.partial(_row_backward, where=where, block=block, dtype=dtype)
    return *lax.map(lambda args: row(*args), (q, k, v, segments, out, lse, dout)), None, None


_rows = jax.custom_vjp(_rows_primal, nondiff_argnums=(5, 6))
_rows.defvjp(_rows_fwd, _rows_bwd)


def _blockwise(q, k, v, segments, chunks, dtype):
    """q [b, K, G, l, h], k and v [b, K, L, h], segments [b, L]; `chunks`: which of the row's equal chunks the
    queries are, in this order."""
    block = BLOCK
    l, L = q.shape[3], k.shape[2]
    pad = -L % block
    if pad:  # only where the row is whole
        q, k, v = (jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, pad), (0, 0)]) for x in (q, k, v))
        segments = jnp.pad(segments, [(0, 0), (0, pad)])
    each = q.shape[3] // block // len(chunks)  # blocks of a chunk
    where = jnp.concatenate([c * each + jnp.arange(each, dtype=jnp.int32) for c in chunks])
    return _rows(q, k, v, segments, where, block, dtype)[:, :, :, :l]


@functools.lru_cache(maxsize=8)
def _splash_kernel(L: int, parts: int, groups: int):
    """The kernel for rows of L tokens in zigzag order over `parts`, and its PartitionSpecs. Its tables are
    numpy arrays: this may be called while something is traced."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as tables

    class Causal(masks.CausalMask):
        """A block of it is only asked whether any and whether all of it is visible. Two numbers say so, and
        save looking at L^2."""

        def __getitem__(self, at: Any) -> np.ndarray:
            q, k = self.q_sequence[at[0]], at[1]
            return np.asarray([q[-1] >= k.start, q[0] >= k.stop - 1])

    mask = Causal((L, L))
    order = np.arange(L, dtype=np.int32)
    if parts > 1:
        order = order.reshape(2 * parts, -1)[sharding.zigzag(parts)].reshape(-1)
    mask.q_sequence = order
    chunk = L // (2 * parts if parts > 1 else 1)
    q_block, k_block = math.gcd(512, chunk), math.gcd(1024, L)
    sizes = kernels.BlockSizes(
        block_q=q_block,
        block_kv=k_block,
        block_kv_compute=math.gcd(512, L),
        block_q_dkv=q_block,
        block_kv_dkv=k_block,
        block_kv_dkv_compute=math.gcd(512, L),
        block_q_dq=q_block,
        block_kv_dq=k_block,
    )
    heads = masks.MultiHeadMask([mask] * groups)
    shards: dict[str, Any] = {"downcast_smem_data": True, "head_shards": 1, "q_seq_shards": parts}
    forward, function = tables.process_mask(heads, (q_block, k_block), **shards)
    return kernels.SplashAttentionKernel(
        forward,
        tables.process_mask(heads, (q_block, k_block), **shards)[0],
        tables.process_mask_dkv(heads, (q_block, k_block), shrink_grid=True, **shards)[0],
        block_sizes=sizes,
        is_mqa=True,
        save_residuals=False,
        mask_value=kernels.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name="attention",
        mask_function=function,
        interpret=False,
    )


def _splash(kernel, q, k, v, segments, q_segments, dtype):
    """As `_blockwise`, on a TPU."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    def head(q, k, v, q_segments, segments):  # [G, l, h], [L, h], [L, h], [l], [L]
        return kernel(q, k, v, segment_ids=kernels.SegmentIds(q_segments, segments))

    heads = jax.vmap(head, in_axes=(0, 0, 0, None, None))
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    return jax.vmap(heads)(q, k, v, q_segments, segments).astype(jnp.float32)


def _gpu(q, k, v, segments, dtype, *, interpret: bool = False):
    """As `_blockwise`, of whole rows on a GPU: JAX's kernel, written with Pallas. It rounds its results to
    `dtype`, and its products of float32 are not exact."""
    from jax.experimental.pallas.ops.gpu.attention import mha

    b, K, G, L, h = q.shape
    q = jnp.moveaxis(q.reshape(b, K * G, L, h), 1, 2).astype(dtype)
    k, v = (jnp.moveaxis(jnp.repeat(x, G, axis=1), 1, 2).astype(dtype) for x in (k, v))
    out = mha(q, k, v, segments, sm_scale=1.0, causal=True, interpret=interpret)
    out = checkpoint_name(out, "attention").astype(jnp.float32)
    return jnp.moveaxis(out, 1, 2).reshape(b, K, G, L, h)


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    dtype: jnp.dtype = jnp.float32,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Causal attention within each segment. q `[B, L, K, G, h]` (G query heads share each of K key heads), k
    and v `[B, L, K, h]`, segments i32 `[B, L]`; tokens of a segment are adjacent. Returns f32 `[B, L, K, G,
    h]`.

    Products have operands in `dtype` and accumulate in f32. On a mesh every device works on its own rows and
    heads; where its axis `context` splits L, tokens are in the order of `sharding.zigzag`, and L is a
    multiple of `2 * context * BLOCK`.
    """
    B, L, K, G, h = q.shape
    assert k.shape == v.shape == (B, L, K, h), (q.shape, k.shape, v.shape)
    assert segments.shape == (B, L), (q.shape, segments.shape)
    dtype, parts = jnp.dtype(dtype), sharding.parts("length", mesh)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    splash = device.platform == "tpu" and h % 128 == 0 and L % (2 * parts * BLOCK) == 0
    kernel = _splash_kernel(L, parts, G) if splash else None
    gpu = device.platform == "gpu" and parts == 1 and dtype != jnp.float32 and L % BLOCK == 0

    def local(kernel, q, k, v, segments):
        q_segments, chunks = segments, [0]
        if parts > 1:
            inverse = np.argsort(sharding.zigzag(parts))
            k, v, segments = (
                sharding.reorder(lax.all_gather(x, "context", axis=1, tiled=True), inverse)
                for x in (k.astype(dtype), v.astype(dtype), segments)
            )
            me = lax.axis_index("context")
            chunks = [me, 2 * parts - 1 - me]
        q = jnp.transpose(q * h**-0.5, (0, 2, 3, 1, 4))
        k, v = (jnp.transpose(x, (0, 2, 1, 3)) for x in (k, v))
        if kernel is not None:
            out = _splash(kernel, q, k, v, segments, q_segments, dtype)
        elif gpu:
            out = _gpu(q, k, v, segments, dtype)
        else:
            out = _blockwise(q, k, v, segments, chunks, dtype)
        return jnp.transpose(out, (0, 3, 1, 2, 4))

    if mesh is None:
        return local(kernel, q, k, v, segments)
    rows, tokens, heads = sharding.spec(("batch", "length", "kv_heads"), mesh, (B, L, K))
    where = None
    if kernel is not None:
        where = kernel.manual_sharding_spec(NamedSharding(mesh, jax.P(None, tokens)))
    qkv = jax.P(rows, tokens, heads)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(where, qkv, qkv, qkv, jax.P(rows, tokens)),
        out_specs=qkv,
        check_vma=False,
    )(kernel, q, k, v, segments)
