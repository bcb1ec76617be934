"""Penalties, filters, what is selected: the reference numbers, and that outcomes stay raw."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from metagym.rl import losses
from metagym.rl.advantages import of_group, standardized
from metagym.rl.algorithms import dapo, grpo, rft
from metagym.rl.batching import pack
from metagym.rl.losses import loss_terms
from metagym.rl.shaping import (
    complete,
    format_errors,
    format_penalty,
    length_penalty,
    overlong_penalty,
    shaped,
    solvable,
    successes,
    teaches,
    with_kl,
)
from metagym.types import Group, StopReason, TokenTrace, Turn


def with_turns(episode, actions, **more):
    turns = tuple(Turn("seen", "said", action, 0.0) for action in actions)
    return dataclasses.replace(episode, turns=turns, **more)


def sampled(tiny, tokens):
    """An episode of so many sampled tokens, in two traces."""

    def trace(n):
        on = np.arange(n + 1) > 0
        return TokenTrace(
            tokens=np.zeros(n + 1, np.int32),
            sampled=on,
            trainable=on,
            logprobs=np.where(on, -1, np.nan).astype(np.float32),
            version=np.where(on, 0, -1).astype(np.int32),
            turn=np.zeros(n + 1, np.int32),
        )

    return tiny.trajectory([trace(tokens // 2), trace(tokens - tokens // 2)])


def test_the_penalty_on_turns(tiny):
    values = [(1, 25, 40), (1, 40, 40), (0, 40, 40), (1, 9, 40), (1, 45, 80)]
    for (reward, turns, maximum), expected in zip(values, [0.5, 0.0, -1.0, 1.0, 0.5], strict=True):
        episode = with_turns(tiny.trajectory([], reward), ["go"] * turns)
        found = shaped(episode, [partial(length_penalty, threshold=10, maximum=maximum)])
        assert (found.reward, found.outcome) == (expected, reward)


def test_the_penalty_on_tokens(tiny):
    for tokens, expected in {100: 0, 16384: 0, 18432: -0.5, 20480: -1, 30000: -1}.items():
        assert overlong_penalty(sampled(tiny, tokens), maximum=20480, cache=4096) == expected


def test_the_penalty_on_format_errors(tiny):
    episode = with_turns(tiny.trajectory([], 1.0), [None, "go", None, None])
    assert format_errors(episode) == [0, 2, 3]
    assert format_penalty(episode, cost=0.25) == -0.75
    assert format_penalty(episode, cost=0.5) == -1.0
    assert format_penalty(episode, cost=0.5, most=0.6) == -0.6
    late = dataclasses.replace(episode, stop=StopReason.AGENT_TIMEOUT)
    assert format_errors(late) == [0, 2]  # its last reply came too late, right or wrong
    total = shaped(episode, [partial(format_penalty, cost=0.1), lambda _: -0.2])
    assert total.reward == pytest.approx(0.5)
    assert shaped(episode, []) is episode


def test_groups_are_filtered_by_the_raw_outcome(tiny):
    """With a length penalty an all-failed group has rewards, and by formula advantages, that differ."""
    lengths = [9, 25, 25, 17]
    penalty = partial(length_penalty, threshold=10, maximum=40)
    failed = [shaped(with_turns(tiny.trajectory([], 0.0), ["go"] * n), [penalty]) for n in lengths]
    rewards = np.array([t.reward for t in failed])
    np.testing.assert_array_equal(np.round(standardized(rewards, rewards), 2), [1.28, -0.80, -0.80, 0.31])
    assert not teaches(Group(failed))
    assert of_group(dapo(), Group(failed)) == [0, 0, 0, 0]
    assert teaches(Group([*failed, tiny.trajectory([], 1.0)]))
    # An infrastructure fault is no outcome: it neither makes a group teach, nor is it in a mean.
    fault = tiny.trajectory([], 1.0, stop=StopReason.INFRA)
    assert not teaches(Group([*failed, fault]))
    won, lost = tiny.trajectory([], 1.0), tiny.trajectory([], 0.0)
    found = of_group(grpo(), Group([won, fault, lost, lost, won]))
    np.testing.assert_allclose(found, [0.866024, np.nan, -0.866024, -0.866024, 0.866024], atol=1e-6)


def test_the_curriculum():
    kept = [solvable(s, 9) for s in range(10)]
    assert kept == [False, *[True] * 6, False, False, False]  # never, and more than 2/3 of the time
    assert [solvable(s, 4, at_most=0.75) for s in range(5)] == [False, True, True, True, False]
    assert solvable(0, 0)


def test_rejection_keeps_successes_without_their_format_errors(tiny):
    rng = np.random.default_rng(0)
    trace = tiny.trace(rng, 2, 3, turns=3)
    won = with_turns(tiny.trajectory([trace], 1.0), ["go", None, "go"])
    lost = with_turns(tiny.trajectory([trace], 0.0), ["go"] * 3)
    assert successes(lost) is None
    assert successes(won, mask_format_errors=False) is won
    kept = successes(won)
    assert kept is not None
    np.testing.assert_array_equal(kept.traces[0].trainable, trace.sampled & (trace.turn != 1))
    np.testing.assert_array_equal(kept.traces[0].tokens, trace.tokens)  # it stays as context


def test_rejection_fine_tuning_is_the_mean_log_loss_of_what_is_kept(tiny):
    """The same packing, and the loss of the kept tokens alone: rejected episodes are in no denominator."""
    rng = np.random.default_rng(0)
    traces = [tiny.trace(rng, 2, 3, turns=2) for _ in range(3)]
    won = with_turns(tiny.trajectory([traces[0]], 1.0), ["go", None])
    other = with_turns(tiny.trajectory([traces[1]], 1.0), ["go", "go"])
    lost = with_turns(tiny.trajectory([traces[2]], 0.0), ["go", "go"])
    group = Group([won, lost, other])
    packed = pack([group], [of_group(rft(), group)], rft(), rows=2, length=16)
    ((batch,),) = packed.minibatches
    assert packed.metrics["batch/rejected"] == 1
    assert packed.metrics["tokens/trained"] == 9
    l = -rng.exponential(1.0, batch.tokens.shape).astype(np.float32)
    on = batch.mask > 0
    (loss, _), grad = jax.value_and_grad(partial(loss_terms, rft()), argnums=0, has_aux=True)(
        l, np.zeros_like(l), batch, True
    )
    np.testing.assert_allclose(loss, -l[on].mean(), rtol=1e-6)
    np.testing.assert_allclose(grad, np.where(on, -1 / 9, 0), atol=1e-7)


def test_truncated_episodes_leave_numerator_and_denominator(tiny):
    """Hand value: two episodes of 2 and 4 tokens, the longer one cut off; A = 1.5 and -0.5, ratio 1."""
    rng = np.random.default_rng(0)
    done = tiny.trajectory([tiny.trace(rng, 2, 2)], 1.0)
    cut = tiny.trajectory([tiny.trace(rng, 2, 4)], 0.0, stop=StopReason.CONTEXT_OVERFLOW)
    assert complete(done) is done
    assert complete(cut) is None
    values = {}
    for name, algorithm in {"all": grpo(), "filtered": grpo(select=complete)}.items():
        ((batch,),) = pack(
            [Group([done, cut])], [np.array([1.5, -0.5])], algorithm, rows=2, length=8
        ).minibatches
        zero = np.zeros(batch.tokens.shape, np.float32)
        values[name] = float(loss_terms(algorithm, zero, zero, batch, True)[0])
    np.testing.assert_allclose(values["filtered"], -1.5)  # not -1.5 x 2 / 6
    np.testing.assert_allclose(values["all"], -(2 * 1.5 - 4 * 0.5) / 6, rtol=1e-6)
    only = pack([Group([cut])], [np.array([1.0])], grpo(select=complete), rows=2, length=8)
    assert only.minibatches == ((),)


def test_kl_in_the_reward(tiny):
    """R - coef x sum of (q - ref) over the episode's trained tokens, with log-probs from several traces."""
    rng = np.random.default_rng(0)
    groups = tiny.groups(rng, count=2, size=3)
    algorithm = grpo(kl_coef=0.1, kl=losses.k1, kl_in="reward")

    def score(batch):
        """A reference that is off by 0.5 nat for each even token."""
        shift = np.where(batch.targets % 2 == 0, 0.5, 0.0)
        return np.where(batch.mask > 0, batch.behavior_logprobs - shift, np.nan).astype(np.float32)

    found, metrics = with_kl(groups, score, algorithm, rows=2, length=24)
    taken = []
    for before, after in zip(groups, found, strict=True):
        for a, b in zip(before.trajectories, after.trajectories, strict=True):
            even = sum(int((t.trainable & (t.tokens % 2 == 0))[1:].sum()) for t in a.traces)
            taken.append(0.5 * even)
            np.testing.assert_allclose(b.reward, a.reward - 0.1 * 0.5 * even, atol=1e-5)
            assert b.outcome == a.outcome
    assert len(set(taken)) > 2
    np.testing.assert_allclose(metrics["reward/kl"], np.mean(taken), rtol=1e-5)
