"""Matrix product with an f32 exact mode and a bf16 mode that stays bf16 in the backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], dtype: Any) -> jax.Array:
    """Contracts axis `contract[0]` of a with `contract[1]` of b; operands in `dtype`, result f32."""
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def outer(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """x `[T, M]` and y `[T, N]`, summed over T: f32 `[M, N]`."""

    def plain(x: jax.Array, y: jax.Array) -> jax.Array:
        return dot(x, y, (0, 0), dtype)

    def transposed(x: jax.Array, y: jax.Array) -> jax.Array:
        # Both branches are the same. Without the condition what makes x is fused into the transpose, and
        # computed in its order, which jumps through memory.
        x = lax.cond(jnp.isfinite(y[0, 0]), jnp.transpose, jnp.transpose, x.astype(dtype))
        x = with_layout_constraint(x, Layout((0, 1)))
        return dot(x, y, (1, 0), dtype)

    if dtype == jnp.float32 or jax.sharding.get_abstract_mesh().size > 1:
        return plain(x, y)
    # XLA has no product of bf16 for this on a CPU, and computes it in f32 unless x is transposed in memory.
    # The platform is the one that is compiled for, which need not be this machine's.
    return lax.platform_dependent(x, y, cpu=transposed, default=plain)


def matmul(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """x `[..., M]` times w, f32 `[..., N]`; w is `[M, N]`, or has more axes whose sizes multiply to these.
    Operands are rounded to `dtype`, sums are f32.

    Differentiating a mixed product as JAX does leaves the backward products in f32; here the incoming
    gradient is rounded to `dtype` too, and both gradients are accumulated in f32.
    """
    rows, w = x.reshape(-1, x.shape[-1]), w.reshape(x.shape[-1], -1)
    return _matmul(rows, w, jnp.dtype(dtype)).reshape(*x.shape[:-1], w.shape[-1])


def few_rows(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """x `[..., M]` times w `[N, M]`, f32 `[..., N]`, for a few rows. As `w @ x.T`: the other way round XLA on
    a CPU rearranges w in memory each time."""
    y = dot(w, x.reshape(-1, x.shape[-1]), (1, 1), jnp.dtype(dtype))
    return lax.optimization_barrier(y).T.reshape(*x.shape[:-1], w.shape[0])


def _primal(x: jax.Array, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return dot(x, w, (1, 0), dtype)


def _forward(x: jax.Array, w: jax.Array, dtype: jnp.dtype):
    return dot(x, w, (1, 0), dtype), (x.astype(dtype), w)


def _backward(dtype: jnp.dtype, residuals: tuple[jax.Array, jax.Array], dy: jax.Array):
    x, w = residuals
    return dot(dy, w, (1, 1), dtype), outer(x, dy, dtype).astype(w.dtype)


_matmul = jax.custom_vjp(_primal, nondiff_argnums=(2,))
_matmul.defvjp(_forward, _backward)


def to_bits(x: jax.Array) -> jax.Array:
    """bf16 as its bits, u16; other types as they are. What only moves bf16 (a slice at a place that is not
    known before, an update in place, a scatter) XLA does in f32 on a CPU, converting the whole array for it.
    Integers it moves as they are."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array) -> jax.Array:
    """Undoes `to_bits`."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
