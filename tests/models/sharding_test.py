import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from metagym.models import (
    Decoder,
    ModelConfig,
    ModelError,
    batch_sharding,
    make_mesh,
    make_policy,
    param_shardings,
)
from metagym.models.attention import packed_attention
from metagym.models.sharding import reorder, spec, zigzag

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "qk_norm": True}
CONFIGS = {
    "dense": ModelConfig(**SHAPE, qkv_bias=True, model_type="qwen2"),
    "long": ModelConfig(**SHAPE, qkv_bias=True, model_type="qwen2"),
    "experts": ModelConfig(**SHAPE, **EXPERTS, model_type="qwen3_moe", tie_word_embeddings=True),
}
# data, fsdp, tensor, context, expert: each alone, then together.
MESHES = [
    ("dense", (8,)),
    ("dense", (1, 8)),
    ("dense", (1, 1, 2)),
    ("long", (1, 1, 1, 2)),
    ("long", (1, 2, 2, 2)),
    ("experts", (1, 1, 1, 1, 4)),
    ("experts", (1, 1, 2, 2, 2)),
]
LENGTHS = {
    "dense": [[100, 156]] * 6 + [[90, 100], [256]],
    "long": [[300, 212], [90, 100], [512], [512]],
    "experts": [[300, 212], [90, 100], [512], [512]],
}


@pytest.fixture(scope="module")
def cases(random_batch):
    """By name: the parameters, a batch, and value and gradient on one device; made once."""
    made = {}

    def case(name):
        if name not in made:
            batch = random_batch(LENGTHS[name])
            waves = jnp.sin(jnp.arange(batch.tokens.shape[1], dtype=jnp.float32))
            # All terms of the loss are positive: nothing cancels.
            weights = jnp.where(batch.segments > 0, 2 + waves, 0.0) / 100
            graphdef, params = nnx.split(Decoder(CONFIGS[name], seed=1))

            def gradient(mesh):
                policy = make_policy(graphdef, chunk=1024, mesh=mesh)

                def loss(params, batch, weights):
                    logprobs, entropy = policy(params, batch)
                    return (weights * (entropy - logprobs)).sum(), logprobs

                return jax.value_and_grad(loss, has_aux=True)

            made[name] = params, gradient, jax.jit(gradient(None))(params, batch, weights), batch, weights
        return made[name]

    return case


@pytest.mark.parametrize(("name", "shape"), MESHES, ids=str)
def test_loss_and_gradients_equal_one_device(cases, name, shape):
    params, gradient, ((loss, logprobs), expected), batch, weights = cases(name)
    mesh = make_mesh(shape, devices=jax.devices()[: int(np.prod(shape))])
    where, rows = param_shardings(params, mesh), batch_sharding(mesh)
    step = jax.jit(gradient(mesh), in_shardings=(where, rows, rows), out_shardings=(None, where))
    placed = jax.device_put((params, batch, weights), (where, rows, rows))
    with jax.transfer_guard("disallow"):
        (got_loss, got_logprobs), got = step(*placed)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))
    if name != "experts" and mesh.shape["tensor"] == 1:  # the same operations on every token
        np.testing.assert_array_equal(got_logprobs, logprobs)


@pytest.mark.parametrize(
    ("name", "shape"), [("dense", (1, 4, 2)), ("dense", (1, 2, 2, 2)), ("experts", (1, 2, 1, 2, 2))], ids=str
)
def test_each_device_holds_its_part(cases, name, shape):
    params = cases(name)[0]
    mesh = make_mesh(shape)
    placed = jax.device_put(params, param_shardings(params, mesh))
    whole = sum(x.nbytes for x in jax.tree.leaves(placed))
    own = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
    assert own < 1.15 * whole / 8


def test_inputs_in_the_hosts_memory_change_no_bit(cases):
    """`offload` of the layers' inputs: on the CPU there is one memory, on a TPU they are moved."""
    params, _, _, batch, _ = cases("long")
    mesh = make_mesh((1, 2, 1, 2), devices=jax.devices()[:4])
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIGS["long"])))
    placed = jax.device_put((params, batch), (param_shardings(params, mesh), batch_sharding(mesh)))
    made = []
    for offload in (False, True):
        policy = make_policy(graphdef, memory=0, offload=offload, mesh=mesh)
        traced = jax.jit(jax.value_and_grad(lambda p, b: policy(p, b)[0].sum())).trace(*placed)  # noqa: B023
        assert ("Host" in str(traced.jaxpr)) == offload
        made.append(jax.tree.leaves(traced.lower().compile()(*placed)))
    for got, want in zip(*made, strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_cannot_be_split_stays_whole():
    mesh = make_mesh((1, 4, 2))
    assert spec(("layers", "embed", "kv_heads", "head"), mesh, (2, 64, 3, 5)) == P(None, "fsdp", None, None)
    with pytest.raises(KeyError, match="'heads' is not in the table"):
        spec(("heads",), mesh)


def test_a_mesh_axis_splits_one_axis_of_an_array():
    mesh = make_mesh((1, 2, 1, 2, 2))
    everywhere = ("fsdp", "context", "expert")
    assert spec(("vocab", "embed"), mesh, (320, 32)) == P(None, everywhere)
    assert spec(("expert", "embed", "mlp"), mesh, (8, 32, 16)) == P("expert", everywhere[:2], None)
    assert spec(("mlp", "embed", "expert"), mesh, (16, 32, 8)) == P(None, everywhere[:2], "expert")
    assert spec(("expert", "embed"), mesh, (7, 32)) == P(None, everywhere)


def test_mesh_shapes():
    whole = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1, "expert": 1}
    assert dict(make_mesh().shape) == {**whole, "fsdp": jax.device_count()}
    assert dict(make_mesh((2, -1, 2)).shape) == {**whole, "data": 2, "fsdp": 2, "tensor": 2}
    with pytest.raises(ValueError, match="needs 6 devices, there are 8"):
        make_mesh((3, 2, 1))
    with pytest.raises(ValueError, match="up to 5 sizes"):
        make_mesh((8, 1, 1, 1, 1, 1))


# Context parallelism


def test_zigzag_by_hand():
    assert zigzag(2).tolist() == [0, 3, 1, 2]
    x = jnp.arange(8).reshape(1, 8)
    assert reorder(x, zigzag(2)).tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]]
    np.testing.assert_array_equal(reorder(reorder(x, zigzag(2)), np.argsort(zigzag(2))), x)
    # Causal work of a part, in pairs of tokens: its chunks' distances from the row's start add up the same.
    assert len({sum(zigzag(8)[2 * i : 2 * i + 2]) for i in range(8)}) == 1


def test_attention_over_split_rows_equals_the_dense_one():
    """Rows packed with documents that cross the devices' borders, one row whole, one padded."""
    B, L, K, G, h = 2, 2048, 2, 2, 8
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(B, L, K, *s, h)), jnp.float32) for s in ((G,), (), ()))
    lengths = [[700, 1, 900, 300], [2048]]
    segments = np.zeros((B, L), np.int32)
    for row, parts in enumerate(lengths):
        ends = np.cumsum(parts)
        for i, (a, b) in enumerate(zip([0, *ends], ends, strict=False)):
            segments[row, a:b] = i + 1
    visible = (segments[:, :, None] == segments[:, None, :]) & np.tri(L, dtype=bool)
    weight = jnp.where(segments[..., None, None, None] > 0, jnp.cos(jnp.arange(h)), 0.0)

    def dense(q, k, v):
        s = jnp.einsum("bqkgh,btkh->bkgqt", q, k) * h**-0.5
        p = jax.nn.softmax(jnp.where(visible[:, None, None], s, -1e30), axis=-1)
        out = jnp.einsum("bkgqt,btkh->bqkgh", p, v)
        return (out * weight).sum(), out

    mesh = make_mesh((1, 2, 1, 4))
    order, inverse = zigzag(4), np.argsort(zigzag(4))

    def split(q, k, v):
        turned = [reorder(x, order) for x in (q, k, v, jnp.asarray(segments))]
        out = reorder(packed_attention(*turned, mesh=mesh), inverse)
        return (out * weight).sum(), out

    (_, got), gradients = jax.jit(jax.value_and_grad(split, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    (_, want), expected = jax.jit(jax.value_and_grad(dense, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    real = segments > 0
    np.testing.assert_allclose(got[real], want[real], rtol=0, atol=1e-5)
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


def test_rows_that_cannot_be_split_are_refused(cases, random_batch):
    params, gradient, *_ = cases("dense")
    batch = random_batch([[300]])
    with pytest.raises(ModelError, match="300 tokens can't be split over 4 devices: use a multiple of 1024"):
        gradient(make_mesh((1, 2, 1, 4)))(params, batch, jnp.zeros((1, 300)))
