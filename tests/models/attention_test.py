"""The tables of the TPU kernel, the kernel of GPUs, memory; that the blocks are right is pinned elsewhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as tables

from metagym.models import make_mesh
from metagym.models.attention import _gpu, _splash_kernel, packed_attention
from metagym.models.sharding import zigzag


@pytest.mark.parametrize("parts", [1, 4])
def test_splash_tables_are_those_of_the_whole_mask(parts):
    L = 4096
    kernel = _splash_kernel(L, parts, 2)
    order = np.arange(L, dtype=np.int32)
    if parts > 1:
        order = order.reshape(2 * parts, -1)[zigzag(parts)].reshape(-1)
    mask = masks.CausalMask((L, L))
    mask.q_sequence = order
    heads = masks.MultiHeadMask([mask] * 2)
    sizes = kernel.kwargs["block_sizes"]
    shards = {"downcast_smem_data": True, "head_shards": 1, "q_seq_shards": parts}
    forward, _ = tables.process_mask(heads, (sizes.block_q, sizes.block_kv), **shards)
    backward, _ = tables.process_mask_dkv(
        heads, (sizes.block_q_dkv, sizes.block_kv_dkv), shrink_grid=True, **shards
    )
    for got, want in ((kernel.fwd_mask_info, forward), (kernel.dkv_mask_info, backward)):
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_array_equal(a, b)


def test_memory_grows_with_the_length_and_not_its_square():
    """A row over 8 devices, forward and backward: four times the tokens, four times the memory."""
    mesh = make_mesh((1, 1, 1, 8))

    def temporaries(L: int) -> int:
        q = jax.ShapeDtypeStruct((1, L, 1, 2, 8), jnp.float32)
        kv = jax.ShapeDtypeStruct((1, L, 1, 8), jnp.float32)
        segments = jax.ShapeDtypeStruct((1, L), jnp.int32)

        def loss(q, k, v, segments):
            return packed_attention(q, k, v, segments, mesh=mesh).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, kv, kv, segments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(131072) < 4.4 * temporaries(32768)


def rows(L: int, h: int, dtype=np.float32):
    """Two packed rows of four query heads on two key heads, the second one padded."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, L, 2, *s, h)), dtype) for s in ((2,), (), ()))
    segments = np.repeat([[1, 2]], L // 2, axis=1).astype(np.int32).repeat(2, 0)
    segments[1, -L // 4 :] = 0
    return q, k, v, jnp.asarray(segments)


def by_gpu_kernel(q, k, v, segments, *, interpret):
    q = jnp.transpose(q * q.shape[-1] ** -0.5, (0, 2, 3, 1, 4))
    k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
    return jnp.transpose(_gpu(q, k, v, segments, jnp.bfloat16, interpret=interpret), (0, 3, 1, 2, 4))


def test_the_gpu_kernel_computes_the_same():
    """Interpreted on the CPU, value and gradients against the blocks; operands are bfloat16 in both, and the
    kernel rounds what it returns, too."""
    *qkv, segments = rows(256, 16)
    real = (segments > 0)[..., None, None, None]

    def loss(attention):
        def total(*qkv):
            out = jnp.where(real, attention(*qkv, segments), 0.0)
            return (out * jnp.cos(jnp.arange(16.0))).sum(), out

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*qkv)

    (_, got), gradients = loss(functools.partial(by_gpu_kernel, interpret=True))
    (_, want), expected = loss(functools.partial(packed_attention, dtype=jnp.bfloat16))
    for a, b in ((got, want), *zip(gradients, expected, strict=True)):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-2 * float(jnp.abs(b).max()))


def test_the_gpu_kernel_is_lowered_for_a_gpu():
    *qkv, segments = rows(256, 64)
    loss = functools.partial(by_gpu_kernel, segments=segments, interpret=False)
    gradient = jax.jit(jax.grad(lambda *qkv: loss(*qkv).sum(), argnums=(0, 1, 2)))
    lowered = gradient.trace(*qkv).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("xla.gpu.triton") >= 3  # forward, and for queries and keys backward


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU")
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-4), (jnp.bfloat16, 2e-2)])
def test_a_gpu_computes_what_the_cpu_does(dtype, bound):
    """bfloat16 with the kernel, float32 in blocks."""
    inputs = rows(512, 64)
    got = packed_attention(*inputs, dtype=dtype)
    with jax.default_device(jax.devices("cpu")[0]):
        want = packed_attention(*jax.device_put(inputs, jax.devices("cpu")[0]), dtype=jnp.float32)
    real = np.asarray(inputs[-1]) > 0
    np.testing.assert_allclose(np.asarray(got)[real], np.asarray(want)[real], rtol=0, atol=bound)
