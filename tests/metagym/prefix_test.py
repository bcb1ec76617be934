"""Prefix rollouts in the Toy world: what is replayed, what is anew, what is refused."""

import gymnasium as gym
import numpy as np
import pytest

import metagym  # noqa: F401  (registers the worlds)
from metagym.episode import Agent, run
from metagym.errors import FormatError, InputError
from metagym.prefix import Replay, branches, continued, generations
from metagym.testing import ScriptedChat
from metagym.types import Message, StopReason, TokenTrace


@pytest.fixture
def env():
    with gym.make("metagym/Toy-v0", types=["doors-red"], rounds=4) as env:
        yield env


def parse(reply):
    if reply.startswith("?"):
        raise FormatError("say which door")
    return reply


AGENT = Agent(parse=parse)
RED, BLUE = "open the red door", "open the blue door"


def stored(env, replies=(RED, "?", BLUE, RED, RED, RED)):
    return run(env, ScriptedChat(replies), "doors-red:3", seed=5, agent=AGENT)


def test_the_first_turns_are_replayed_and_the_others_are_anew(env):
    first = stored(env)
    chat = ScriptedChat([RED, RED, RED, RED])
    again = continued(env, chat, first, 3, agent=AGENT)
    assert again.turns[:3] == first.turns[:3]
    assert [t.reply for t in again.turns] == [RED, "?", BLUE, RED, RED, RED]
    assert len(chat.calls) == 3
    assert [m.content for m in chat.calls[0] if m.role == "assistant"] == [RED, "?", BLUE]
    assert (again.reward, again.stop) == (first.reward, first.stop)
    assert len(continued(env, ScriptedChat([RED] * 4), first, 0, agent=AGENT).turns) == 4


def test_branches_say_where_they_begin_and_which_calls_are_theirs(env):
    first = stored(env)
    chat = ScriptedChat(lambda messages: RED)
    chat.calls += [()] * 6  # the calls of the episode itself
    more = {"points": 2, "count": 3, "seed": 1, "calls": lambda: len(chat.calls), "agent": AGENT}
    found = branches(env, chat, first, **more)
    assert len(found) == 6
    assert [b.at for b in found][::3] == sorted({b.at for b in found}, reverse=True)
    assert all(1 <= b.at <= 5 for b in found)
    edges = [6, *(b.calls[1] for b in found)]
    assert [b.calls[0] for b in found] == edges[:-1]
    for b in found:
        assert b.calls[1] - b.calls[0] == len(b.trajectory.turns) - b.at
        assert b.trajectory.turns[: b.at] == first.turns[: b.at]
    assert [b.at for b in branches(env, chat, first, **more)] == [b.at for b in found]
    assert len(branches(env, chat, first, **more | {"points": 99})) == 5 * 3


def test_a_short_or_failed_episode_has_none(env):
    more = {"points": 2, "count": 1, "seed": 1, "calls": lambda: 0, "agent": AGENT}
    failed = stored(env, (RED,))  # the script ends: the engine failed
    assert failed.stop == StopReason.INFRA
    assert branches(env, ScriptedChat([]), failed, **more) == ()
    with pytest.raises(InputError, match="no turn 9 in an episode of 6 turns"):
        continued(env, ScriptedChat([]), stored(env), 9, agent=AGENT)


def test_a_world_that_shows_something_else_is_told(env):
    first = stored(env)
    with gym.make("metagym/Toy-v0", types=["doors-red"], rounds=6) as other:
        again = continued(other, ScriptedChat([RED] * 9), first, 2, agent=AGENT)
    assert again.stop == StopReason.INFRA
    assert "the world is another one" in (again.error or "")


def test_a_chat_that_cannot_be_told_tokens_is_refused():
    sampled = np.array([False, True, True, False, True])
    trace = TokenTrace(
        tokens=np.arange(5, dtype=np.int32),
        sampled=sampled,
        trainable=sampled,
        logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        version=np.where(sampled, 3, -1).astype(np.int32),
        turn=np.array([0, 0, 0, 1, 1], np.int32),
    )
    assert [g.tokens.tolist() for g in generations(trace)] == [[1, 2], [4]]
    with pytest.raises(InputError, match="ScriptedChat cannot be told tokens"):
        Replay(ScriptedChat([]), [RED], trace)
    assert Replay(ScriptedChat([BLUE]), [RED]).chat([Message("user", "?")]).content == RED
