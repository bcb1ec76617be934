"""Prefix rollouts with a real session: the shared tokens are there once, and trained once."""

import dataclasses

import gymnasium as gym
import numpy as np
import pytest

import metagym  # noqa: F401  (registers the worlds)
from metagym.episode import run
from metagym.errors import InputError
from metagym.prefix import branches, continued
from metagym.proxy.session import Session
from metagym.rl.algorithms import grpo
from metagym.rl.batching import pack
from metagym.rl.credit import by_prefix
from metagym.testing import ScriptedBackend
from metagym.types import Group, Why


class Letters:
    """A message is one token, the number of its characters; a conversation goes on where it ended."""

    end_of_turn = None
    stop_token_ids = ()

    def render(self, messages, *, generation_prompt, prefix="", tools=()):
        return [len(m.content) % 13 for m in messages]

    def extend(self, messages, known, *, prefix="", tools=(), history="branch"):
        return [len(m.content) % 13 for m in messages[known:]]

    def decode(self, ids):
        return f"open the {'red' if ids[0] % 2 else 'blue'} door"


@pytest.fixture
def played():
    """An episode of four turns, two continuations from each of its later turns, and the session."""
    rng = np.random.default_rng(0)
    backend = ScriptedBackend(lambda prompt: [int(rng.integers(13)), 1])
    session = Session(backend, Letters(), context=64, seed=1)
    with gym.make("metagym/Toy-v0", types=["doors-red"], rounds=4) as env:
        episode = run(env, session, "doors-red:3", seed=5, max_turns=4)
        episode = dataclasses.replace(episode, traces=session.traces)
        more = {"calls": lambda: int(session.metrics["calls"]), "max_turns": 4}
        found = branches(env, session, episode, points=3, count=2, seed=0, **more)
        yield episode, found, session, backend, env


def test_the_prefix_is_shared_and_trained_once(played):
    episode, found, session, backend, _ = played
    assert len(episode.turns) == 4
    assert [b.at for b in found] == [3, 3, 2, 2, 1, 1]
    traces = session.traces
    assert len(traces) == 7
    assert traces[0].tokens.tolist() == episode.traces[0].tokens.tolist()
    sampled = sum(int(t.trainable.sum()) for t in traces)
    assert sampled == session.metrics["sampled_tokens"] == 2 * len(backend.calls)
    by_calls = {b.calls: t for b in found for t in traces if b.calls[0] <= t.turn[-1] < b.calls[1]}
    for branch in found:
        trace = by_calls[branch.calls]
        start = int(np.argmax(trace.turn == branch.calls[0]))
        np.testing.assert_array_equal(trace.tokens[:start], traces[0].tokens[:start])  # the same tokens
        assert not trace.trainable[:start].any()
        assert set(trace.turn[trace.trainable]) == set(range(*branch.calls))
    whole = dataclasses.replace(episode, traces=traces, branches=found)
    advantages = by_prefix(Group((whole,)), np.zeros(1))
    packed = pack([Group((whole,))], [advantages], grpo(), rows=4, length=64)
    assert packed.metrics["tokens/trained"] == sampled


def test_a_stored_episode_goes_on_in_another_session_with_its_exact_tokens(played):
    """As from a run's record: nothing but the episode and its trace is left of the first session."""
    episode, _, _, backend, env = played
    before = len(backend.calls)
    other = Session(backend, Letters(), context=64, seed=2)
    again = continued(env, other, episode, 2, trace=episode.traces[0], max_turns=4)
    assert again.turns[:2] == episode.turns[:2]
    assert len(backend.calls) == before + 2
    (trace,) = other.traces
    known = int(np.argmax(episode.traces[0].turn == 2))
    first = episode.traces[0]
    np.testing.assert_array_equal(trace.tokens[:known], first.tokens[:known])
    np.testing.assert_array_equal(trace.logprobs[:known], first.logprobs[:known])
    assert backend.calls[before][0] == tuple(first.tokens[: known + 1])
    assert not trace.trainable[:known].any()
    assert set(trace.why[:known][trace.sampled[:known]]) == {Why.SHARED}
    assert trace.trainable[known:].sum() == 4
    assert other.metrics["recalled_tokens"] == 4
    assert other.metrics["sampled_tokens"] == 4


def test_tokens_that_say_something_else_are_refused(played):
    episode, _, _, backend, env = played
    turned = dataclasses.replace(episode.traces[0], tokens=episode.traces[0].tokens + 1)
    other = Session(backend, Letters(), context=64, seed=2)
    again = continued(env, other, episode, 2, trace=turned, max_turns=4)
    assert not again.stop.in_loss
    assert "its tokens say" in (again.error or "")
    with pytest.raises(InputError, match="no turn 4"):
        continued(env, other, episode, 4)
