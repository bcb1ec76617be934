import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from metagym.models import batch_sharding, make_mesh, make_policy, param_shardings
from metagym.models.sharding import spec

MESHES = [(8, 1, 1), (1, 8, 1), (1, 4, 2), (2, 2, 2)]


@pytest.fixture(scope="module")
def case(tiny, random_batch):
    batch = random_batch([[70, 50]] * 6 + [[90], [128]])
    weights = jnp.where(batch.segments > 0, jnp.sin(jnp.arange(128.0)), 0.0) / 100

    def gradient(mesh):
        graphdef, _ = nnx.split(tiny)
        policy = make_policy(graphdef, chunk=1024, mesh=mesh)

        def loss(params, batch, weights):
            logprobs, entropy = policy(params, batch)
            return (weights * (logprobs + entropy)).sum(), logprobs

        return jax.value_and_grad(loss, has_aux=True)

    _, params = nnx.split(tiny)
    return params, batch, weights, gradient, jax.jit(gradient(None))(params, batch, weights)


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_loss_and_gradients_equal_one_device(tiny, case, shape):
    params, batch, weights, gradient, ((loss, logprobs), expected) = case
    mesh = make_mesh(shape)
    where, rows = param_shardings(tiny, mesh), batch_sharding(mesh)
    step = jax.jit(gradient(mesh), in_shardings=(where, rows, rows), out_shardings=(None, where))
    (got_loss, got_logprobs), got = step(
        jax.device_put(params, where), jax.device_put(batch, rows), jax.device_put(weights, rows)
    )
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))
    if shape[2] == 1:  # rows split over devices: the same operations on every row
        np.testing.assert_array_equal(got_logprobs, logprobs)


def test_each_device_holds_its_part(tiny):
    mesh = make_mesh((1, 4, 2))
    _, params = nnx.split(tiny)
    placed = jax.device_put(params, param_shardings(tiny, mesh))
    whole = sum(x.nbytes for x in jax.tree.leaves(placed))
    own = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
    assert own < 1.05 * whole / 8


def test_what_cannot_be_split_stays_whole():
    mesh = make_mesh((1, 4, 2))
    assert spec(("layers", "embed", "kv_heads", "head"), mesh, (2, 64, 3, 5)) == P(None, "fsdp", None, None)
    with pytest.raises(KeyError, match="'heads' is not in the table"):
        spec(("heads",), mesh)


def test_mesh_shapes():
    assert dict(make_mesh().shape) == {"data": 1, "fsdp": jax.device_count(), "tensor": 1}
    assert dict(make_mesh((2, -1, 2)).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    with pytest.raises(ValueError, match="needs 6 devices, there are 8"):
        make_mesh((3, 2, 1))
    with pytest.raises(ValueError, match="3 sizes"):
        make_mesh((8,))
