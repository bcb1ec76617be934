"""How arrays lie on a mesh: five mesh axes and one table from logical axis names to them.

Every parameter of a model carries the logical names of its axes (`nnx.Param(..., axes=("vocab", "embed"))`);
everything that must know where an array lives asks this module.

- data: replicas of the weights, each with its own rows of the batch
- fsdp: rows of the batch too, and the weights are split over it and gathered when used
- tensor: heads, hidden units and vocabulary of one layer are split over it
- context: the tokens of a row are split over it; weights lie on it as on fsdp
- expert: rows of the batch too, and the experts of a layer; other weights lie on it as on fsdp
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor", "context", "expert")

RULES: dict[str | None, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("context",),
    "vocab": ("tensor",),
    "embed": ("fsdp", "context", "expert"),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert": ("expert",),
    "head": (),
    "pair": (),
    "norm": (),
    "rank": (),
    "layers": (),
    None: (),
}


def make_mesh(shape: Sequence[int] | None = None, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes of `AXES`.

    `shape` is the size of the first axes, at most one of them -1 (what is left); the others are 1. None puts
    every device on fsdp. Raises ValueError if the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = list((1, -1) if shape is None else shape)
    if not 1 <= len(sizes) <= len(AXES):
        raise ValueError(f"a mesh shape has up to {len(AXES)} sizes, for {AXES}; got {tuple(sizes)}")
    sizes += [1] * (len(AXES) - len(sizes))
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = len(devices) // math.prod(s for s in sizes if s != -1)
    if math.prod(sizes) != len(devices) or min(sizes) < 1:
        raise ValueError(
            f"mesh {dict(zip(AXES, sizes, strict=True))} needs {math.prod(sizes)} devices, "
            f"there are {len(devices)}"
        )
    if devices[0].platform == "tpu":  # axes along those of the machine, so that neighbours exchange
        placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:
        placed = np.asarray(devices).reshape(sizes)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec(axes: Sequence[str | None], mesh: Mesh, shape: Sequence[int] | None = None) -> P:
    """The PartitionSpec of an array with these logical axes. A mesh axis splits one axis of an array, the
    first that wants it in the order expert, then as they come; with `shape`, only where it divides the size.
    Raises KeyError for a name that the table does not hold."""
    for name in axes:
        if name not in RULES:
            raise KeyError(
                f"logical axis {name!r} is not in the table; known: {sorted(k for k in RULES if k)}"
            )
    out: list[Any] = [None] * len(axes)
    used: set[str] = set()
    for i in sorted(range(len(axes)), key=lambda i: axes[i] != "expert"):
        names, parts = [], 1
        for name in RULES[axes[i]]:
            size = mesh.shape.get(name, 1)
            if size > 1 and name not in used and (shape is None or shape[i] % (parts * size) == 0):
                names.append(name)
                parts *= size
        used |= set(names)
        out[i] = names[0] if len(names) == 1 else tuple(names) or None
    return P(*out)


def param_shardings(model: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every parameter, in the structure of `nnx.state(model)`.

    `model` is a module, its `nnx.State`, or either of them with abstract (`nnx.eval_shape`) leaves.
    """
    state = nnx.state(model) if isinstance(model, nnx.Module) else model

    def one(variable: Any) -> Any:
        value = variable.get_value()
        return variable.replace(NamedSharding(mesh, spec(variable.get_metadata()["axes"], mesh, value.shape)))

    return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays `[B, L, ...]`: rows over data, fsdp and expert, tokens over context."""
    return NamedSharding(mesh, spec(("batch", "length"), mesh))


def parts(axis: str, mesh: Mesh | None) -> int:
    """Into how many parts a mesh cuts a logical axis that is long enough."""
    return math.prod(mesh.shape.get(n, 1) for n in RULES[axis]) if mesh is not None else 1


def constrain(x: jax.Array, axes: Sequence[str | None], mesh: Mesh | None) -> jax.Array:
    """Inside jit: `x` lies as its logical axes say. Without a mesh nothing happens."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(axes, mesh, x.shape)))


def gathered(w: jax.Array, axes: Sequence[str | None], dtype: Any, mesh: Mesh | None) -> jax.Array:
    """A weight as one layer uses it: in `dtype`, and whole along `embed`. Gradients are summed in `dtype`."""
    if mesh is None or mesh.size == 1:
        return w
    own, at = spec(axes, mesh, w.shape), axes.index("embed")

    def place(x: jax.Array, embed: tuple[str, ...]) -> jax.Array:
        lies = (embed if i == at else names for i, names in enumerate(own))
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*lies)))

    @jax.custom_vjp
    def whole(w: jax.Array) -> jax.Array:
        w, names = w.astype(dtype), _each(own[at])
        for i in reversed(range(len(names))):  # see `all_gather`; the barrier keeps them apart
            w = place(lax.optimization_barrier(w), names[:i])
        return w

    whole.defvjp(lambda w: (whole(w), None), lambda _, dw: (place(dw, _each(own[at])).astype(w.dtype),))
    return whole(w)


def _each(names: Any) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def all_gather(x: jax.Array, names: Any, axis: int) -> jax.Array:
    """Inside shard_map: `x` whole along `axis`, which the mesh axes `names` of a PartitionSpec split. One
    after another: all at once, a TPU adds up arrays filled with zeros, which moves twice as much."""
    for name in reversed(_each(names)):
        x = lax.all_gather(x, name, axis=axis, tiled=True)
    return x


def psum_scatter(x: jax.Array, names: Any, axis: int) -> jax.Array:
    """Its transpose: the sum over the devices, of which each keeps its part."""
    for name in _each(names):
        x = lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
    return x


def zigzag(parts: int) -> np.ndarray:
    """i32 `[2 * parts]`: a row is cut into that many chunks, and in this order of them each part gets two
    neighbours: an early and a late one, so that all parts have the same work in causal attention."""
    return np.asarray([c for i in range(parts) for c in (i, 2 * parts - 1 - i)], np.int32)


def reorder(x: jax.Array, chunks: Sequence[int] | np.ndarray) -> jax.Array:
    """x `[B, L, ...]` cut into `len(chunks)` equal chunks along L, in the order of `chunks`."""
    n = len(chunks)
    cut = x.reshape(x.shape[0], n, x.shape[1] // n, *x.shape[2:])
    return cut[:, np.asarray(chunks)].reshape(x.shape)
