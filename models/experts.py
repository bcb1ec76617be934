"""A mixture of experts: each token goes through the few gated MLPs that a router chose for it.

Tokens are sorted by expert, and `lax.ragged_dot` multiplies each run of them with its expert's matrix: no
token is dropped, no expert padded. Letters in shapes: T tokens, E experts, k experts of each token, D embed,
F hidden units of an expert.

With routing replay (R3, arXiv:2510.11370) the trainer takes the experts that were recorded while sampling,
and gates them by the router as it is now: what the small differences between sampler and trainer would have
sent elsewhere goes where it went.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from metagym.models import sharding


def choose(logits: jax.Array, k: int, recorded: jax.Array | None = None) -> jax.Array:
    """i32 `[..., k]`: the experts of the highest logits `[..., E]`, highest first. Where a token's `recorded`
    `[..., k]` are all there (>= 0), those."""
    own = lax.top_k(logits, k)[1].astype(jnp.int32)
    if recorded is None:
        return own
    return jnp.where((recorded >= 0).all(-1, keepdims=True), recorded, own)


def gates(logits: jax.Array, experts: jax.Array, normalise: bool) -> jax.Array:
    """f32 `[..., k]`: the router's probability of each chosen expert, of sum 1 where `normalise`."""
    chosen = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), experts, axis=-1)
    return chosen / chosen.sum(-1, keepdims=True) if normalise else chosen


def mlps(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
) -> jax.Array:
    """The gated sum of every token's experts, f32 `[B, L, D]`. x `[B, L, D]`, experts and gates `[B, L, k]`,
    gate_up `[E, D, 2, F]`, down `[E, F, D]`.

    On a mesh every device computes the experts it holds, for all tokens of its row of the `expert` axis, and
    the parts are added up.
    """
    run = functools.partial(_local, dtype=jnp.dtype(dtype))
    if mesh is None:
        return run(x, experts, gates, gate_up, down)
    B, L, _ = x.shape
    rows, tokens = sharding.spec(("batch", "length"), mesh, (B, L))
    E, _, _, F = gate_up.shape
    expert, mlp = sharding.spec(("expert", "mlp"), mesh, (E, F))
    axes = rows if isinstance(rows, tuple) else (rows,)
    local = functools.partial(
        run,
        gather=expert if expert in axes else None,  # its devices hold different rows: exchange them
        add=tuple(a for a in (expert, mlp) if a is not None and not (a == expert and expert in axes)),
        first=(expert, E // mesh.shape[expert]) if expert else None,
    )
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(*(jax.P(rows, tokens),) * 3, jax.P(expert, None, None, mlp), jax.P(expert, mlp)),
        out_specs=jax.P(rows, tokens),
        check_vma=False,
    )(x, experts, gates, gate_up, down)


def _local(x, experts, gates, gate_up, down, *, dtype, gather=None, add=(), first=None):
    """On one device: `gather` is the mesh axis whose devices exchange their tokens, `add` those whose results
    are added up, `first` = (axis, n): this device holds n experts, from its index on that axis times n on."""
    if gather is not None:
        x, experts, gates = (lax.all_gather(a, gather, axis=0, tiled=True) for a in (x, experts, gates))
    B, L, D = x.shape
    k, E = experts.shape[-1], gate_up.shape[0]
    own = experts.reshape(-1)  # [T k]
    if first is not None:
        own = own - lax.axis_index(first[0]) * first[1]
        own = jnp.where((own >= 0) & (own < E), own, E)  # another device's come last
    order = jnp.argsort(own, stable=True)
    sizes = jnp.bincount(own, length=E).astype(jnp.int32)
    mine = (own < E)[order][:, None]
    y = jnp.take(x.reshape(-1, D), order // k, axis=0)
    gate, up = jnp.split(_grouped(y, gate_up.reshape(E, D, -1), sizes, dtype), 2, axis=-1)
    y = _grouped(jax.nn.silu(gate) * up, down, sizes, dtype)
    y = jnp.where(mine, y, 0.0) * gates.reshape(-1)[order][:, None]
    y = jnp.zeros_like(y).at[order].set(y, unique_indices=True).reshape(B, L, k, D).sum(2)
    if gather is not None:
        y = lax.psum_scatter(y, gather, scatter_dimension=0, tiled=True)
    return lax.psum(y, add) if add else y


def _primal(x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
    """Rows x `[T, M]`, sorted into groups of `sizes` `[E]`, times each group's w `[E, M, N]`: f32 `[T, N]`.
    Operands in `dtype`, sums in f32, forward and backward."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return lax.ragged_dot(
        x.astype(dtype), w.astype(dtype), sizes, precision=precision, preferred_element_type=jnp.float32
    )


def _forward(x, w, sizes, dtype):
    return _primal(x, w, sizes, dtype), (x.astype(dtype), w, sizes)


def _backward(dtype, residuals, dy):
    x, w, sizes = residuals
    dx = _primal(dy, w.swapaxes(1, 2), sizes, dtype)
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    dw = lax.ragged_dot_general(
        x, dy.astype(dtype), sizes, numbers, precision=precision, preferred_element_type=jnp.float32
    )
    return dx, dw.astype(w.dtype), None


_grouped = jax.custom_vjp(_primal, nondiff_argnums=(3,))
_grouped.defvjp(_forward, _backward)
