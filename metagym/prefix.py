"""Prefix rollouts: an episode is played again from one of its turns on.

The world is reset as it was, the first turns are replayed, and from there on the model decides anew. The
continuations say what the episode was worth at that turn, so that credit can be given by turns instead of to
the whole (`metagym.rl.credit`). They need a world that does the same each time it is reset with the same task
and seed and given the same actions.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np

from metagym.episode import run
from metagym.errors import InputError
from metagym.protocols import Chat
from metagym.types import Branch, Generation, Message, StopReason, TokenTrace, Trajectory


@runtime_checkable
class Recalls(Protocol):
    """A `Chat` that can be given an answer that was sampled before (`metagym.proxy.session.Session`)."""

    def recall(self, messages: Sequence[Message], generation: Generation, *, prefix: str = "") -> Message: ...


class Replay:
    """A `Chat` that gives the first replies of a stored episode again, and then asks `chat`.

    With `trace`, the episode's first trace, `chat` is told the exact tokens of these replies. Without it, it
    is the chat that gave them, and knows.
    """

    def __init__(self, chat: Chat, replies: Sequence[str], trace: TokenTrace | None = None):
        if trace is not None and not isinstance(chat, Recalls):
            raise InputError(f"a {type(chat).__name__} cannot be told tokens that it did not sample")
        self._chat, self._replies = chat, tuple(replies)
        self._known = None if trace is None else generations(trace)
        self._turn = 0

    def chat(self, messages: Sequence[Message], *, prefix: str = "") -> Message:
        turn, self._turn = self._turn, self._turn + 1
        if turn >= len(self._replies):
            return self._chat.chat(messages, prefix=prefix)
        reply = Message("assistant", self._replies[turn])
        if self._known is not None:
            assert isinstance(self._chat, Recalls)
            told = self._chat.recall(messages, next(self._known), prefix=prefix)
            if told.content != reply.content:
                raise InputError(
                    f"turn {turn} was {reply.content!r:.200}, and its tokens say {told.content!r:.200}"
                )
        return reply


def generations(trace: TokenTrace) -> Iterator[Generation]:
    """The replies of a trace, in order. How they ended is not known: they are told as cut."""
    for turn in np.unique(trace.turn[trace.sampled]):
        at = trace.sampled & (trace.turn == turn)
        yield Generation(trace.tokens[at], trace.logprobs[at], trace.version[at], "length", trace.routing[at])


def continued(
    env: gym.Env[Any, Any],
    chat: Chat,
    episode: Trajectory,
    at: int,
    *,
    trace: TokenTrace | None = None,
    **settings: Any,
) -> Trajectory:
    """Plays `episode` again: its first `at` turns as they were, the others anew.

    `settings` are those of `metagym.episode.run` that the episode was played with (agent, max_turns, ...).
    `trace`: see `Replay`. The turns are all of them, the replayed ones first, and so is the reward. A world
    that shows something else than it did ends the result as INFRA. Raises InputError if the episode has no
    turn `at`.
    """
    if not 0 <= at < len(episode.turns):
        raise InputError(f"there is no turn {at} in an episode of {len(episode.turns)} turns")
    given: dict[str, Any] = {"system": episode.system} | settings
    replay = Replay(chat, [t.reply for t in episode.turns[:at]], trace)
    played = run(env, replay, episode.task, seed=episode.seed, **given)
    seen = [(t.observation, t.action, t.reward) for t in played.turns[:at]]
    before = [(t.observation, t.action, t.reward) for t in episode.turns[:at]]
    differ = seen != before or (
        len(played.turns) > at and played.turns[at].observation != episode.turns[at].observation
    )
    if differ and played.stop.in_loss:
        text = f"the world is another one: what is seen in the first {at} turns differs from the first time"
        return dataclasses.replace(played, stop=StopReason.INFRA, outcome=0.0, error=text)
    return played


def branches(
    env: gym.Env[Any, Any],
    chat: Chat,
    episode: Trajectory,
    *,
    points: int,
    count: int,
    seed: int,
    calls: Callable[[], int],
    **settings: Any,
) -> tuple[Branch, ...]:
    """Plays `count` continuations from each of `points` turns of an episode that `chat` was just used for.

    The turns are drawn from those after the first, by `seed`; fewer if there are not so many. The last one is
    taken first: then no continuation can pass for the episode's own beginning by saying the same in other
    tokens. `calls` says how many model calls the chat has had so far. An episode that failed has none.
    """
    if not episode.stop.in_loss or len(episode.turns) < 2:
        return ()
    later = np.arange(1, len(episode.turns))
    chosen = np.random.default_rng(seed).choice(later, size=min(points, len(later)), replace=False)
    made = []
    for at in sorted((int(a) for a in chosen), reverse=True):
        for _ in range(count):
            first = calls()
            played = continued(env, chat, episode, at, **settings)
            made.append(Branch(at, (first, calls()), played))
    return tuple(made)
