"""The training state of a model on every mesh: what each device holds, checkpoints from one to another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from metagym.models import Decoder, ModelConfig, make_mesh, param_shardings
from metagym.rl import checkpoint
from metagym.rl.algorithms import grpo
from metagym.rl.train_step import HOST, abstract_state, init_state, make_train_step, state_shardings

CONFIG = ModelConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    model_type="qwen3_moe",
    qk_norm=True,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)
MESHES = [(8,), (1, 8), (1, 2, 2, 2), (1, 1, 1, 8), (1, 1, 2, 1, 4), (2, 1, 1, 2, 2)]
OPTIMIZER = optax.adamw(1e-3)


def on(mesh, params):
    return jax.device_put(params, param_shardings(params, mesh))


def test_a_checkpoint_of_one_mesh_is_bit_equal_on_every_other(tmp_path):
    mesh = make_mesh((1, 4, 2))
    _, params = nnx.split(Decoder(CONFIG, seed=1))
    state = init_state(on(mesh, params), OPTIMIZER, jax.random.key(0), mesh)
    checkpoint.save(tmp_path, 1, state, {})
    for shape in MESHES:
        other = make_mesh(shape)
        shapes = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            params,
            param_shardings(params, other),
        )
        like = abstract_state(shapes, OPTIMIZER, other)
        _, found, _ = checkpoint.load(tmp_path, like)
        for got, want, wanted in zip(*map(jax.tree.leaves, (found, state, like)), strict=True):
            assert got.sharding.is_equivalent_to(wanted.sharding, got.ndim)
            if not jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", MESHES[1:], ids=str)
def test_parameters_and_moments_shrink_with_the_devices(shape):
    mesh = make_mesh(shape)
    _, params = nnx.split(Decoder(CONFIG, seed=1))
    state = init_state(on(mesh, params), OPTIMIZER, jax.random.key(0), mesh)
    copies = mesh.shape["data"]
    for tree in (state.params, state.opt_state):
        whole = sum(x.nbytes for x in jax.tree.leaves(tree))
        own = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
        assert own < 1.1 * whole * copies / 8


def test_moments_in_the_hosts_memory_change_no_bit_and_come_back_from_a_checkpoint(tmp_path):
    mesh = make_mesh((1, 8))
    _, params = nnx.split(Decoder(CONFIG, seed=1))
    params = on(mesh, params)
    after = []
    for offload in (False, True):
        state = init_state(params, OPTIMIZER, jax.random.key(0), mesh, offload=offload)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}
        assert kinds == {HOST if offload else "device"}
        step = make_train_step(lambda p, b: (p, b), grpo(), OPTIMIZER, mesh, state_shardings(state))
        gradient = jax.tree.map(jnp.sin, state.params)
        after.append(step.apply(jax.tree.map(jnp.copy, state), gradient))
    for got, want in zip(jax.tree.leaves(after[1].params), jax.tree.leaves(after[0].params), strict=True):
        np.testing.assert_array_equal(got, want)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(after[1].opt_state) if x.ndim} == {HOST}
    checkpoint.save(tmp_path, 1, after[1], {})
    _, found, _ = checkpoint.load(tmp_path, checkpoint.abstract(after[1]))
    for got, want in zip(*map(jax.tree.leaves, (found.opt_state, after[1].opt_state)), strict=True):
        assert got.sharding.memory_kind == want.sharding.memory_kind
        np.testing.assert_array_equal(got, want)
