"""Packing: the shift, what is left out, merging, and that no order matters."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metagym.errors import InputError
from metagym.rl.algorithms import cispo, dapo, dr_grpo, grpo, gspo
from metagym.rl.batching import empty_batch, merge, micro_batches, pack, segments, shift, weigh
from metagym.rl.losses import loss_terms, truncated_importance
from metagym.types import Group, StopReason, TokenTrace

rngs = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def advantages(groups, rng=None):
    sizes = [len(g.trajectories) for g in groups]
    rng = rng or np.random.default_rng(0)
    return [rng.normal(size=n) for n in sizes]


def test_the_shift():
    nan = np.nan
    trace = TokenTrace(
        tokens=np.array([10, 11, 12, 13, 14, 15, 16], np.int32),
        sampled=np.array([0, 0, 1, 1, 0, 1, 0], bool),
        trainable=np.array([0, 0, 1, 0, 0, 1, 0], bool),
        logprobs=np.array([nan, nan, -0.2, -0.3, nan, -0.5, nan], np.float32),
        version=np.array([-1, -1, 0, 0, -1, 0, -1], np.int32),
        turn=np.zeros(7, np.int32),
        routing=np.arange(7, dtype=np.int32)[:, None],
    )
    s = shift(trace, 1.5, rollout=4)
    assert s is not None
    np.testing.assert_array_equal(s.tokens, [10, 11, 12, 13, 14])  # 15 is only a target, 16 not even that
    np.testing.assert_array_equal(s.targets, [11, 12, 13, 14, 15])
    np.testing.assert_array_equal(s.mask, [0, 1, 0, 0, 1])
    np.testing.assert_array_equal(s.advantages, [0, 1.5, 0, 0, 1.5])
    np.testing.assert_array_equal(s.behavior_logprobs, np.array([nan, -0.2, nan, nan, -0.5], np.float32))
    np.testing.assert_array_equal(s.routing[:, 0], [0, 1, 2, 3, 4])
    frozen = dataclasses.replace(trace, trainable=np.zeros(7, bool))
    assert shift(frozen, 1.5, rollout=4) is None


def test_only_what_was_sampled_is_trained_in_three_turns():
    """Per turn: a user's text, the generation prompt (90, 91), the reply, its end-of-turn token (99), all
    sampled, and the newline (10) that the template puts behind it."""
    turn = [(20, 0), (90, 0), (91, 0), (30, 1), (31, 1), (99, 1), (10, 0)]
    tokens = np.array([t + 100 * i if t < 90 and t != 10 else t for i in range(3) for t, _ in turn], np.int32)
    said = np.array([m for _ in range(3) for _, m in turn], bool)
    trace = TokenTrace(
        tokens=tokens,
        sampled=said,
        trainable=said,
        logprobs=np.where(said, -1.0, np.nan).astype(np.float32),
        version=np.where(said, 0, -1).astype(np.int32),
        turn=np.repeat(np.arange(3), 7).astype(np.int32),
    )
    s = shift(trace, 1.0, rollout=0)
    assert s is not None
    trained = s.targets[s.mask > 0].tolist()
    assert trained == [30, 31, 99, 130, 131, 99, 230, 231, 99]
    assert s.turn[s.mask > 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert not set(s.targets[s.mask == 0]) & {30, 31, 99, 130, 131, 230, 231}


def test_an_advantage_for_each_model_call(tiny):
    """Two traces of one episode share the call 0; each token has the advantage of the call that said it."""
    rng = np.random.default_rng(0)
    first = tiny.trace(rng, 2, 2, turns=3)
    second = dataclasses.replace(
        first,
        trainable=first.sampled & (first.turn > 0),  # the shared call is trained in the first trace only
        turn=np.array([0, 3, 4])[first.turn].astype(np.int32),
    )
    episode = tiny.trajectory([first, second])
    calls = np.array([1.0, -2.0, 0.5, 3.0, -4.0])
    packed = pack([Group([episode])], [[calls]], grpo(), rows=2, length=16)
    ((batch,),) = packed.minibatches
    by_trace = sorted(row[m > 0].tolist() for row, m in zip(batch.advantages, batch.mask, strict=True))
    assert by_trace == [[1, 1, -2, -2, 0.5, 0.5], [3, 3, -4, -4]]
    whole = pack([Group([episode])], [[0.5]], grpo(), rows=2, length=16).minibatches[0][0]
    assert set(whole.advantages[whole.mask > 0]) == {0.5}


def test_calls_without_an_advantage_are_refused(tiny):
    episode = tiny.trajectory([tiny.trace(np.random.default_rng(0), 2, 2, turns=3)])
    with pytest.raises(InputError, match="for 2 model calls, and a trained token is of call 2"):
        pack([Group([episode])], [[np.ones(2)]], grpo(), rows=1, length=16)
    with pytest.raises(InputError, match=r"number or f64\[calls\]"):
        pack([Group([episode])], [[np.ones((2, 3))]], grpo(), rows=1, length=16)


def test_a_sampled_first_token_has_no_prediction():
    rng = np.random.default_rng(0)
    trace = TokenTrace(
        tokens=rng.integers(0, 9, 2).astype(np.int32),
        sampled=np.ones(2, bool),
        trainable=np.ones(2, bool),
        logprobs=np.array([-1, -2], np.float32),
        version=np.zeros(2, np.int32),
        turn=np.zeros(2, np.int32),
    )
    s = shift(trace, 1.0, 0)
    assert s is not None
    np.testing.assert_array_equal(s.behavior_logprobs, [-2])


def test_what_is_left_out(tiny):
    rng = np.random.default_rng(0)
    short, long = tiny.trace(rng, 3, 2), tiny.trace(rng, 30, 2)
    frozen = dataclasses.replace(short, trainable=np.zeros(5, bool))
    group = Group(
        [
            tiny.trajectory([short], 1.0),
            tiny.trajectory([short, long], 0.0),  # one of its traces is longer than a row: out whole
            tiny.trajectory([short], 0.0, stop=StopReason.INFRA),
            tiny.trajectory([], 0.0),
            tiny.trajectory([frozen], 0.0),
        ]
    )
    packed = pack([group], [np.ones(5)], grpo(), rows=2, length=8)
    ((batch,),) = packed.minibatches
    assert packed.metrics["batch/overflow"] == 1
    assert packed.metrics["batch/failed"] == 1
    assert packed.metrics["batch/untrained"] == 2
    assert packed.metrics["tokens/trained"] == 2
    assert batch.mask.sum() == 2
    assert set(np.unique(batch.rollout)) == {-1, 0}
    np.testing.assert_allclose(batch.weight.sum(), 1.0)


def test_nothing_to_train_gives_no_micro_batch(tiny):
    group = Group([tiny.trajectory([], stop=StopReason.INFRA)])
    packed = pack([group], [np.zeros(1)], grpo(), rows=2, length=8)
    assert packed.minibatches == ((),)
    assert packed.metrics["tokens/trained"] == 0


@settings(max_examples=25, deadline=None)
@given(rng=rngs, align=st.sampled_from([1, 4]), minibatches=st.integers(1, 3))
def test_every_trained_token_is_packed_once(tiny, rng, align, minibatches):
    groups = tiny.groups(rng)
    values = advantages(groups, rng)
    packed = pack(
        groups, values, grpo(), rows=2, length=24, minibatches=minibatches, align=align, merge_equal=False
    )
    assert len(packed.minibatches) == minibatches
    found = []
    for minibatch in packed.minibatches:
        for batch in minibatch:
            assert batch.tokens.shape == (2, 24)
            for r in range(2):
                for s in range(1, batch.segments[r].max() + 1):
                    at = np.flatnonzero(batch.segments[r] == s)
                    assert at[0] % align == 0
                    np.testing.assert_array_equal(at, np.arange(at[0], at[-1] + 1))
                    np.testing.assert_array_equal(batch.positions[r, at], np.arange(len(at)))
                    np.testing.assert_array_equal(batch.tokens[r, at][1:], batch.targets[r, at][:-1])
                    on = at[batch.mask[r, at] > 0]
                    found.append((batch.targets[r, on].tobytes(), batch.behavior_logprobs[r, on].tobytes()))
            np.testing.assert_array_equal(np.isnan(batch.behavior_logprobs), batch.mask == 0)
            np.testing.assert_array_equal(batch.rollout >= 0, batch.segments > 0)
        if minibatch:
            np.testing.assert_allclose(sum(b.weight.sum(dtype=np.float64) for b in minibatch), 1.0, rtol=1e-6)
    traces = [t for g in groups for trajectory in g.trajectories for t in trajectory.traces]
    expected = [(t.tokens[t.trainable].tobytes(), t.logprobs[t.trainable].tobytes()) for t in traces]
    assert sorted(found) == sorted(expected)


@settings(max_examples=15, deadline=None)
@given(rng=rngs)
def test_any_order_gives_the_same_rows(tiny, rng):
    groups = tiny.groups(rng)
    values = advantages(groups, rng)
    order = rng.permutation(len(groups))
    one = pack(groups, values, grpo(), rows=2, length=24)
    other = pack([groups[i] for i in order], [values[i] for i in order], grpo(), rows=2, length=24)
    for a, b in zip(one.minibatches[0], other.minibatches[0], strict=True):
        for field in dataclasses.fields(a):
            if field.name != "rollout":  # an index into the groups as they came
                np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


def test_rows_are_filled_first_fit_decreasing(tiny):
    rng = np.random.default_rng(0)
    lengths = [3, 7, 5, 2, 6, 1]
    found = [shift(tiny.trace(rng, n, 1), 1.0, i) for i, n in enumerate(lengths)]
    (batch, second) = micro_batches(weigh(found, grpo()), rows=2, length=8)
    assert [sorted(np.bincount(row)[1:].tolist()) for row in batch.segments] == [[1, 7], [2, 6]]
    assert [sorted(np.bincount(row)[1:].tolist()) for row in second.segments] == [[3, 5], []]


def test_a_segment_longer_than_a_row_is_refused(tiny):
    s = shift(tiny.trace(np.random.default_rng(0), 9, 1), 1.0, 0)
    with pytest.raises(InputError, match="9 positions"):
        micro_batches([s], rows=1, length=8)


def alike(tiny, rng, algorithm, members=12):
    """Segments many of which are equal but for their advantage, and parameters whose ratios are far from
    1."""
    prompts = [tiny.trace(rng, 3, 2, turns=2) for _ in range(2)]
    group = [tiny.trajectory([prompts[i % 2], prompts[(i // 3) % 2]], 0.0) for i in range(members)]
    values = rng.normal(size=members)
    values[:2] = 0.0
    found, _ = segments([Group(group)], [values], 16)
    return weigh(found, algorithm)


@pytest.mark.parametrize(
    "algorithm",
    [
        grpo(entropy_coef=0.03),
        grpo(reduction="seq-mean-token-mean", dual=1.5, kl_coef=0.2),
        dapo(correction=truncated_importance),
        dr_grpo(max_tokens=16),
        gspo(clip_low=0.05, clip_high=0.05),
        cispo(cap=1.5),
    ],
    ids=lambda a: f"{a.name}-{a.reduction}",
)
@pytest.mark.parametrize("seed", [0, 1])
def test_merged_rows_have_the_loss_and_gradient_of_all(tiny, algorithm, seed):
    rng = np.random.default_rng(seed)
    found = alike(tiny, rng, algorithm)
    merged = merge(found)
    assert len(merged) <= 6 < len(found)
    np.testing.assert_allclose(sum(s.mask.sum() for s in merged), sum(s.mask.sum() for s in found))
    params, old = tiny.params(0), tiny.params(1)

    def loss(p, batches):
        total, clipped = 0.0, 0.0
        for batch in batches:
            stored, _ = tiny.policy(old, batch)
            batch = dataclasses.replace(batch, old_logprobs=stored, ref_logprobs=stored)
            value, bounded = loss_terms(algorithm, *tiny.policy(p, batch), batch, False)
            total, clipped = total + value, clipped + jnp.sum(batch.mask * bounded)
        return total, clipped

    one, two = (micro_batches(s, rows=4, length=16) for s in (found, merged))
    assert len(two) < len(one)
    (a, clipped_a), grad_a = jax.value_and_grad(partial(loss, batches=one), has_aux=True)(params)
    (b, clipped_b), grad_b = jax.value_and_grad(partial(loss, batches=two), has_aux=True)(params)
    assert clipped_a == clipped_b > 0
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    for x, y in zip(jax.tree.leaves(grad_a), jax.tree.leaves(grad_b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_rows_that_differ_where_it_counts_are_not_merged(tiny):
    trace = tiny.trace(np.random.default_rng(0))
    other = dataclasses.replace(trace, logprobs=trace.logprobs - np.float32(0.1))
    group = Group([tiny.trajectory([t]) for t in (trace, trace, trace, other)])
    found, _ = segments([group], [np.array([1.0, 0.5, -1.0, 1.0])], 16)
    found = weigh(found, grpo())
    assert len(merge(found)) == 3  # sign, behavior log-probs
    assert len(merge(found, match_behavior=False)) == 2
    one = next(s for s in merge(found) if s.mask.max() == 2)
    on = one.mask > 0
    np.testing.assert_allclose(one.advantages[on], 0.75)
    np.testing.assert_allclose(one.weight[on], 2 / 8)


def test_empty_batch_has_no_segment():
    batch = empty_batch(2, 3, routing=5)
    assert batch.routing.shape == (2, 3, 5)
    assert not batch.segments.any()
    assert np.isnan(batch.old_logprobs).all()
