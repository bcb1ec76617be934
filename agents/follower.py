"""An actor without a model: it reads advice in free language and does what it says, if the world lets it.

It stands in for a language model in tests and small studies. There is no format that advice must have: it
looks for the words in which the possible actions differ, in any sentence, in the order in which they come,
and takes words of refusal into account. Without advice it guesses.
"""

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from metagym.episode import Agent
from metagym.meta import Actor
from metagym.protocols import ChatFn
from metagym.types import Message

ACTIONS = "Possible actions: "  # how `metagym.agents` lists them, with list_actions=True

_NEGATIONS = frozenset(
    (
        *("not", "never", "no", "don't", "dont", "cannot", "can't", "avoid"),
        *("wrong", "bad", "false", "without", "except", "instead"),
    )
)
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return [w.replace("’", "'") for w in _WORD.findall(text.casefold())]


def follow(messages: Sequence[Message], seed: int = 0) -> str:
    """A reply to a conversation: one of the actions that the last message lists as possible.

    Each sentence of the system message counts for the actions that share words with it, as far as they stand
    in the same order, or against them if it holds a word of refusal. The action with the most is taken; of
    equal ones, any. Once the world has refused what was advised in this conversation ("Wrong.", "You can't
    ..."), the advice is dropped, and what was refused is not tried again. A pure function: chance is drawn
    from `seed` and the turn, whatever was said, so that prompts which say nothing of use get the same. Raises
    ValueError if no actions are listed.
    """
    options = possible(messages[-1].content)
    rng = np.random.default_rng([seed, sum(m.role == "assistant" for m in messages)])
    advice = next((m.content for m in messages if m.role == "system"), "")
    scores = support(advice, options)
    best = [o for o, s in zip(options, scores, strict=True) if s == max(scores)]
    refused = _refused(messages)
    if len(best) == len(options):
        best = options
    elif refused.intersection(best):
        best = [o for o in options if o not in refused] or options
    return best[int(rng.integers(len(best)))]


def rule_follower() -> Actor:
    """The actor for meta-environments: `follow`, with an agent that lists what can be done."""
    return Actor(_new_chat, agent=Agent(prompt=_prompt), about=_about)


def _prompt(observation: str, info: Mapping[str, Any], turn: int) -> str:
    return f"{observation}\n\n{ACTIONS}{', '.join(info.get('admissible', ()))}"


def _new_chat(seed: int) -> ChatFn:
    return functools.partial(follow, seed=seed)


def _about() -> Mapping[str, Any]:
    return {"actor": "rule_follower"}


def possible(text: str) -> list[str]:
    """The actions that a message lists."""
    for line in text.splitlines():
        if line.startswith(ACTIONS):
            return line.removeprefix(ACTIONS).split(", ")
    raise ValueError(
        "the message lists no actions, as the agents of metagym.agents do with list_actions=True: "
        f"{text!r:.200}"
    )


def support(advice: str, options: Sequence[str]) -> list[float]:
    """How much a text speaks for each action: the sum over its sentences of the share of the action's own
    words that stand there in order, negative for a sentence of refusal."""
    own = _distinct([words(o) for o in options])
    total = [0.0] * len(options)
    for sentence in re.split(r"[.;:!?\n]|, but\b|\bbut\b", advice):
        heard = words(sentence)
        sign = -1.0 if _NEGATIONS.intersection(heard) else 1.0
        for i, wanted in enumerate(own):
            if wanted:
                total[i] += sign * _in_order(wanted, heard) / len(wanted)
    return total


def _distinct(said: Sequence[Sequence[str]]) -> list[list[str]]:
    """The words in which phrases differ: by their place where all are equally long, else those not in all."""
    if len({len(o) for o in said}) == 1:
        same = [len(set(column)) == 1 for column in zip(*said, strict=True)]
        return [[w for w, dull in zip(o, same, strict=True) if not dull] for o in said]
    common = set(said[0]).intersection(*said[1:])
    return [[w for w in o if w not in common] for o in said]


def _in_order(wanted: Sequence[str], heard: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(wanted) + 1)
    for word in heard:
        for i in range(len(wanted), 0, -1):
            row[i] = max(row[i], row[i - 1] + (word == wanted[i - 1]), row[i])
        for i in range(1, len(row)):
            row[i] = max(row[i], row[i - 1])
    return row[-1]


def _refused(messages: Sequence[Message]) -> set[str]:
    """The actions that were answered with a word of refusal."""
    return {
        reply.content
        for reply, answer in itertools.pairwise(messages)
        if reply.role == "assistant" and _NEGATIONS.intersection(words(answer.content)[:4])
    }
