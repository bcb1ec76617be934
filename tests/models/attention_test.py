"""The tables of the TPU kernel; its numbers are those of `packed_attention`, which other tests pin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as tables

from metagym.models import make_mesh
from metagym.models.attention import _splash_kernel, packed_attention
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


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU")
def test_a_gpu_computes_what_the_cpu_does():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 512, 2, *s, 64)).astype(np.float32) for s in ((2,), (), ()))
    segments = np.repeat([[1, 2]], 256, axis=1).astype(np.int32).repeat(2, 0)
    got = packed_attention(q, k, v, segments)
    with jax.default_device(jax.devices("cpu")[0]):
        want = packed_attention(q, k, v, segments)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
