"""Matrix product with an f32 exact mode and a bf16 mode that stays bf16 in the backward pass."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], dtype: Any) -> jax.Array:
    """Contracts axis `contract[0]` of a with `contract[1]` of b; operands in `dtype`, result f32."""
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


class Transposed(NamedTuple):
    """A matrix that is stored the other way round, `[N, M]`, as a CPU multiplies it fastest with a few rows.
    For generation: it has no gradient. Transposing the array in the program instead would be hoisted out of
    its loops, and done."""

    array: jax.Array

    def reshape(self, *_: int) -> "Transposed":
        return self  # it is flat


def matmul(x: jax.Array, w: jax.Array | Transposed, dtype: Any) -> jax.Array:
    """x `[..., M]` times w `[M, N]`, f32 `[..., N]`. Operands are rounded to `dtype`, sums are f32.

    Differentiating a mixed product as JAX does leaves the backward products in f32; here the incoming
    gradient is rounded to `dtype` too, and both gradients are accumulated in f32.
    """
    rows, dtype = x.reshape(-1, x.shape[-1]), jnp.dtype(dtype)
    if not isinstance(w, Transposed):
        return _matmul(rows, w, dtype).reshape(*x.shape[:-1], w.shape[-1])
    N, M = w.array.shape
    if M > N:  # then XLA uses several threads only this way round
        y = lax.optimization_barrier(dot(w.array, rows, (1, 1), dtype)).T
    else:
        y = dot(rows, w.array, (1, 1), dtype)
    return y.reshape(*x.shape[:-1], N)


def _primal(x: jax.Array, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return dot(x, w, (1, 0), dtype)


def _forward(x: jax.Array, w: jax.Array, dtype: jnp.dtype):
    return dot(x, w, (1, 0), dtype), (x.astype(dtype), w)


def _backward(dtype: jnp.dtype, residuals: tuple[jax.Array, jax.Array], dy: jax.Array):
    x, w = residuals
    return dot(dy, w, (1, 1), dtype), dot(x, dy, (0, 0), dtype).astype(w.dtype)


_matmul = jax.custom_vjp(_primal, nondiff_argnums=(2,))
_matmul.defvjp(_forward, _backward)
