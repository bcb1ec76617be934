"""How arrays lie on a mesh: three mesh axes and one table from logical axis names to them.

Every parameter of a model carries the logical names of its axes (`nnx.Param(..., axes=("vocab", "embed"))`);
everything that must know where an array lives asks this module.

- data: replicas of the weights, each with its own rows of the batch
- fsdp: rows of the batch too, and the weights are split over it and gathered when used
- tensor: heads, hidden units and vocabulary of one layer are split over it
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")

RULES: dict[str | None, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "vocab": "tensor",
    "embed": "fsdp",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "head": None,
    "pair": None,
    "norm": None,
    "layers": None,
    None: None,
}


def make_mesh(shape: Sequence[int] | None = None, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with axes ("data", "fsdp", "tensor").

    `shape` is the size of each axis, at most one of them -1 (what is left); None puts every device on fsdp.
    Raises ValueError if the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = list((1, -1, 1) if shape is None else shape)
    if len(sizes) != len(AXES):
        raise ValueError(f"a mesh shape has {len(AXES)} sizes, for {AXES}; got {tuple(sizes)}")
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = len(devices) // math.prod(s for s in sizes if s != -1)
    if math.prod(sizes) != len(devices) or min(sizes) < 1:
        raise ValueError(
            f"mesh {dict(zip(AXES, sizes, strict=True))} needs {math.prod(sizes)} devices, "
            f"there are {len(devices)}"
        )
    return Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec(axes: Sequence[str | None], mesh: Mesh, shape: Sequence[int] | None = None) -> P:
    """The PartitionSpec of an array with these logical axes. With `shape`, an axis whose size the mesh axis
    does not divide stays whole. Raises KeyError for a name that the table does not hold."""
    out = []
    for i, name in enumerate(axes):
        if name not in RULES:
            raise KeyError(
                f"logical axis {name!r} is not in the table; known: {sorted(k for k in RULES if k)}"
            )
        target = RULES[name]
        if target is not None and shape is not None:
            names = (target,) if isinstance(target, str) else target
            if shape[i] % math.prod(mesh.shape[n] for n in names):
                target = None
        out.append(target)
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
    """Rows of a batch, `[B, ...]`, over data and fsdp."""
    return NamedSharding(mesh, P(RULES["batch"]))


def parts(axis: str, mesh: Mesh | None) -> int:
    """Into how many parts a mesh cuts a logical axis that is long enough."""
    target = RULES[axis] if mesh is not None else None
    names = (target,) if isinstance(target, str) else target or ()
    return math.prod(mesh.shape[n] for n in names) if mesh is not None else 1


def constrain(x: jax.Array, axes: Sequence[str | None], mesh: Mesh | None) -> jax.Array:
    """Inside jit: `x` lies as its logical axes say. Without a mesh nothing happens."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(axes, mesh, x.shape)))
