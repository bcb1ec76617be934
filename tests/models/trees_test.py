"""Rows in which the branches of a prompt share it: the same losses and gradients as rows of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from metagym.models import Llama, ModelConfig, make_policy
from metagym.models.trees import tree_mask
from metagym.rl import algorithms
from metagym.rl.batching import pack
from metagym.types import Group, StopReason, Task, TokenTrace, Trajectory


def test_who_sees_whom():
    #                       prompt   branch  branch  other
    segments = np.array([[1, 1, 1, 2, 2, 3, 4, 4, 0]])
    positions = np.array([[0, 1, 2, 3, 4, 3, 0, 1, 0]])
    seen = np.asarray(tree_mask(jnp.asarray(segments), jnp.asarray(positions)))[0]
    assert [list(np.flatnonzero(row)) for row in seen[:8]] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 5],
        [6],
        [6, 7],
    ]


def trajectory(rng, prompt, sampled):
    tokens = np.concatenate([prompt, rng.integers(50, size=sampled)]).astype(np.int32)
    said = np.arange(len(tokens)) >= len(prompt)
    trace = TokenTrace(
        tokens,
        said,
        said,
        np.where(said, -1.0, np.nan).astype(np.float32),
        np.where(said, 0, -1).astype(np.int32),
        np.zeros(len(tokens), np.int32),
    )
    return Trajectory(Task("a", "a", "a"), 0, (), (trace,), 1.0, 1.0, StopReason.TERMINATED)


@pytest.mark.parametrize("length", [150, 60])  # 60: a group does not fit into one tree
def test_trees_have_the_loss_and_gradient_of_their_segments(length):
    config = ModelConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    graphdef, params = nnx.split(Llama(config, seed=0))
    rng = np.random.default_rng(0)
    groups = []
    for extra in (0, 7, 14):
        prompt = rng.integers(50, size=20 + extra)
        groups.append(Group([trajectory(rng, prompt, 3 + 3 * i) for i in range(4)]))
    advantages = [np.array([1.0, -1.0, 0.5, -0.5])] * 3

    def measured(share):
        policy = make_policy(graphdef, chunk=64, trees=share)
        packed = pack(
            groups,
            advantages,
            algorithms.grpo(),
            rows=2,
            length=length,
            share_prompts=share,
            merge_equal=False,
        )

        @jax.jit
        @jax.value_and_grad
        def loss(params, batch):
            logprobs, _ = policy(params, batch)
            return jnp.where(batch.mask > 0, logprobs * batch.weight * batch.advantages, 0).sum()

        parts = [loss(params, jax.tree.map(jnp.asarray, b)) for b in packed.minibatches[0]]
        value = sum(float(v) for v, _ in parts)
        return value, jax.tree.map(lambda *x: sum(x), *(g for _, g in parts)), packed.metrics

    value, gradient, metrics = measured(False)
    shared, shared_gradient, shared_metrics = measured(True)
    assert shared == pytest.approx(value, rel=1e-5)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(shared_gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * float(jnp.abs(a).max()) + 1e-9, rtol=1e-4)
    assert shared_metrics["tokens/trained"] == metrics["tokens/trained"]
    assert shared_metrics["tokens/computed"] < 0.75 * metrics["tokens/computed"]
