"""The training step: exact accumulation, ratio 1, bad updates, devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from metagym.errors import InputError
from metagym.rl.advantages import of_group
from metagym.rl.algorithms import grpo, gspo
from metagym.rl.batching import empty_batch, pack
from metagym.rl.losses import k1, truncated_importance
from metagym.rl.shaping import with_kl
from metagym.rl.train_step import init_state, make_optimizer, make_train_step, state_shardings
from metagym.types import Group


def build(tiny, mesh, algorithm=None, lr=1e-2, shard=None, seed=0):
    optimizer = make_optimizer(lr)
    params = tiny.params(seed)
    if shard is not None:
        params = jax.device_put(params, {k: NamedSharding(mesh, s) for k, s in shard.items()})
    state = init_state(params, optimizer, jax.random.key(3), mesh)
    return state, make_train_step(tiny.policy, algorithm or grpo(), optimizer, mesh, state_shardings(state))


def packed(tiny, algorithm=None, rows=4, minibatches=1, seed=0, **more):
    rng = np.random.default_rng(seed)
    groups = tiny.groups(rng, count=4)
    values = [rng.normal(size=4) for _ in groups]
    return pack(
        groups, values, algorithm or grpo(), rows=rows, length=24, minibatches=minibatches, **more
    ).minibatches


def host(tree):
    return [np.asarray(x) for x in jax.tree.leaves(jax.device_get(tree))]


def gradient(step, state, micro_batches, on_policy=True):
    """The summed gradient and loss of the micro-batches, without an update."""
    with jax.set_mesh(step.mesh):
        parts = [step.gradient(state.params, step.put(b), step._flag(on_policy)) for b in micro_batches]
    grads = [sum(leaves) for leaves in zip(*(host(g) for g, _, _ in parts), strict=True)]
    return grads, sum(float(x) for _, x, _ in parts), [np.asarray(t[0]) for _, _, t in parts]


def test_the_micro_batch_split_changes_nothing(tiny):
    state, step = build(tiny, tiny.make_mesh())
    (whole,), (split,) = packed(tiny, rows=16), packed(tiny, rows=1)
    assert len(whole) == 1
    assert len(split) > 4
    a, loss_a, _ = gradient(step, state, whole)
    b, loss_b, _ = gradient(step, state, split)
    np.testing.assert_allclose(loss_a, loss_b, rtol=1e-6, atol=1e-7)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


def test_an_update_adds_up_its_micro_batches(tiny):
    results = []
    for rows in (16, 2):
        state, step = build(tiny, tiny.make_mesh())
        (batches,) = packed(tiny, rows=rows)
        state, metrics = step(state, [batches])
        results.append((host(state.params), metrics))
        assert int(state.step) == int(state.version) == 1
    (a, one), (b, other) = results
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-6)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_an_empty_micro_batch_adds_nothing(tiny):
    state, step = build(tiny, tiny.make_mesh())
    grads, loss, _ = gradient(step, state, [empty_batch(4, 24)])
    assert loss == 0.0
    assert all(np.array_equal(g, np.zeros_like(g)) for g in grads)


@pytest.mark.parametrize("algorithm", [grpo(), gspo(correction=truncated_importance)], ids=lambda a: a.name)
def test_ratio_is_exactly_one_when_nothing_changed(tiny, algorithm):
    state, step = build(tiny, tiny.make_mesh(2, 2), algorithm, lr=0.0)
    for rows in (4, 8):
        state, metrics = step(state, packed(tiny, algorithm, rows=rows, minibatches=3))
        assert metrics["update/applied"] == 3
        assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0
        assert metrics["policy/clip_fraction"] == 0.0
        assert metrics["policy/kl_old"] == 0.0


def test_ratio_moves_when_something_did(tiny):
    state, step = build(tiny, tiny.make_mesh(), lr=0.1)
    state, metrics = step(state, packed(tiny, minibatches=3))
    assert metrics["policy/ratio_max"] > 1.2
    assert metrics["policy/clip_fraction"] > 0
    assert int(state.version) == 3


def test_eight_devices_give_the_losses_and_gradients_of_one(tiny):
    (batches,) = packed(tiny, rows=8)
    state, step = build(tiny, tiny.make_mesh())
    grads, loss, logprobs = gradient(step, state, batches)
    shard = {"token": P(None, "fsdp"), "previous": P(None, "fsdp"), "position": P("fsdp"), "out": P("fsdp")}
    for shape in ((8, 1, 1), (1, 8, 1), (4, 2, 1)):
        other, spread = build(tiny, tiny.make_mesh(*shape), shard=shard)
        found, value, sharded = gradient(spread, other, batches)
        np.testing.assert_allclose(value, loss, rtol=1e-6, atol=1e-7)
        for x, y in zip(found, grads, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        for x, y, b in zip(logprobs, sharded, batches, strict=True):
            np.testing.assert_array_equal(x[b.mask > 0], y[b.mask > 0])
        other, metrics = spread(other, [batches])
        assert metrics["update/applied"] == 1
        assert other.params["position"].sharding.spec == P("fsdp")
        mu = optax.tree_utils.tree_get(other.opt_state, "mu")
        assert mu["position"].sharding.spec == P("fsdp")


def test_rows_must_divide_over_the_devices(tiny):
    state, step = build(tiny, tiny.make_mesh(4, 2))
    with pytest.raises(InputError, match="multiple of 8 rows"):
        step(state, packed(tiny, rows=4))


def test_a_non_finite_update_is_skipped_before_the_optimizer(tiny):
    state, step = build(tiny, tiny.make_mesh())
    (batches,) = packed(tiny)
    before, opt_before = host(state.params), host(state.opt_state)
    bad = [
        dataclasses.replace(b, advantages=np.where(b.mask > 0, np.inf, 0).astype(np.float32)) for b in batches
    ]
    state, metrics = step(state, [bad])
    assert metrics["update/skipped"] == 1
    assert metrics["update/applied"] == 0
    assert not np.isfinite(metrics["loss"])
    for x, y in zip(before + opt_before, host(state.params) + host(state.opt_state), strict=True):
        np.testing.assert_array_equal(x, y)
    assert (int(state.step), int(state.version)) == (1, 0)
    state, metrics = step(state, [batches])
    assert metrics["update/applied"] == 1
    assert (int(state.step), int(state.version)) == (2, 1)


def test_empty_minibatches_make_no_update(tiny):
    state, step = build(tiny, tiny.make_mesh())
    state, metrics = step(state, [(), ()])
    assert metrics == {"update/applied": 0.0, "update/skipped": 0.0}
    assert int(state.version) == 0


def test_the_state_is_donated(tiny):
    state, step = build(tiny, tiny.make_mesh())
    old = state.params["token"]
    state, _ = step(state, packed(tiny))
    assert old.is_deleted()
    assert not state.params["token"].is_deleted()


def test_kl_needs_a_reference_and_is_zero_against_itself(tiny):
    algorithm = grpo(kl_coef=0.1)
    state, step = build(tiny, tiny.make_mesh(), algorithm)
    batches = packed(tiny, algorithm)
    with pytest.raises(InputError, match="reference"):
        step(state, batches)
    reference = jax.tree.map(lambda x: x.copy(), state.params)
    state, metrics = step(state, batches, reference=reference)
    assert metrics["policy/kl_ref"] == 0.0
    state, metrics = step(state, batches, reference=reference)
    assert metrics["policy/kl_ref"] > 0.0


def test_the_gradient_at_observations_is_zero(tiny):
    """Tokens of the vocabulary that are only ever targets of observations get no gradient from the output
    head."""
    rng = np.random.default_rng(0)
    trace = tiny.trace(rng, 3, 2)
    tokens = np.array([1, 2, 3, 4, 5], np.int32)
    trace = dataclasses.replace(trace, tokens=tokens)

    def policy(params, batch):
        logprobs, entropy = tiny.policy(params, batch)
        return logprobs + params["probe"], entropy

    (batches,) = pack([Group([tiny.trajectory([trace])])], [np.ones(1)], grpo(), rows=1, length=8).minibatches
    optimizer = make_optimizer(0.1)
    mesh = tiny.make_mesh()
    params = tiny.params() | {"probe": np.zeros((1, 8), np.float32)}
    state = init_state(params, optimizer, jax.random.key(0), mesh)
    step = make_train_step(policy, grpo(), optimizer, mesh, state_shardings(state))
    with jax.set_mesh(mesh):
        grads, _, _ = step.gradient(state.params, step.put(batches[0]), step._flag(True))
    seen = np.asarray(grads["probe"])[0]
    np.testing.assert_array_equal(seen, [0, 0, -0.5, -0.5, 0, 0, 0, 0])


def test_nothing_recompiles_when_the_number_of_micro_batches_changes(tiny):
    state, step = build(tiny, tiny.make_mesh())
    for seed in range(3):
        state, _ = step(state, packed(tiny, rows=2, seed=seed, minibatches=1 + seed))
    assert step.gradient._cache_size() == 1
    assert step.apply._cache_size() == 1


def test_kl_in_the_reward_is_taken_off_by_the_reference_and_scored_once(tiny):
    """Its loss has no KL, so the step needs no reference; the reward's is the sum of q - ref over an
    episode."""
    algorithm = grpo(kl_coef=0.5, kl=k1, kl_in="reward")
    state, step = build(tiny, tiny.make_mesh(), algorithm)
    reference = tiny.params(5)
    groups = tiny.groups(np.random.default_rng(0), count=2)
    found, metrics = with_kl(groups, lambda b: step.score(reference, b), algorithm, rows=4, length=24)
    expected = []
    for group in groups:
        for episode in group.trajectories:
            total = 0.0
            for trace in episode.traces:
                ((batch,),) = pack(
                    [Group([tiny.trajectory([trace])])], [[1.0]], grpo(entropy_coef=1.0), rows=4, length=24
                ).minibatches
                on = batch.mask > 0
                total += (batch.behavior_logprobs - step.score(reference, batch))[on].sum()
            expected.append(episode.reward - 0.5 * total)
    rewards = [t.reward for g in found for t in g.trajectories]
    np.testing.assert_allclose(rewards, expected, rtol=1e-5)
    assert metrics["reward/kl"] != 0
    packed = pack(found, [of_group(algorithm, g) for g in found], algorithm, rows=4, length=24)
    state, metrics = step(state, packed.minibatches)
    assert metrics["update/applied"] == 1
    assert "policy/kl_ref" not in metrics


def test_gradients_are_clipped_as_optax_does_without_a_second_copy_of_them():
    params = {"a": jnp.ones(4096), "b": jnp.ones((64, 64))}
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, b2=0.95, weight_decay=0.0))
    ours = make_optimizer(0.1)
    for size in (1e-4, 3.0):
        grads = {name: x * size for name, x in params.items()}
        got, want = (o.update(grads, o.init(params), params)[0] for o in (ours, theirs))
        for name in params:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-6)

    def apply(params, state, grads):
        updates, state = ours.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    shapes = jax.eval_shape(lambda: (params, ours.init(params), params))
    memory = jax.jit(apply, donate_argnums=(0, 1)).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 4096
