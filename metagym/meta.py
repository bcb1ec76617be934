"""Meta-environments: the action is what a frozen actor is told, the reward how well it then does.

* `metagym/ICT-v0`, a whole run of In-Context Training: `reset` lets the actor play k tasks under the initial
  system prompt and returns a transcript; each action is the next system prompt, under which the actor plays k
  tasks that it has not had before in this run; the reward is its mean return.
* `metagym/Reflect-v0`, one stored step of such a run, for training: the observation is a transcript that was
  collected before, the action one candidate prompt, the reward what the actor gets when it plays the very
  batch of the transcript again (`reward="previous"`), or another one (see `REWARDS`).

Both work with every registered text env. What an action means to the actor, what is observed and what a batch
is worth are the four hooks of `Prompting`; another meta-environment is another short class with those four.

What holds, whatever the hooks do:

* No task comes twice in a run. A run's tasks are of one split, so what worlds keep apart stays apart.
* (task, seed) of the meta-environment determines every batch, and the seed of every inner episode and of its
  sampling: a repetition sees the same, and all members of a group are measured on the same.
* An inner episode that failed for a reason that is not the actor's (`StopReason.in_loss` is false) is played
  again, and if it still fails, left out of observation and reward; a batch of which nothing counts is a
  WorldError, so that the step leaves the loss too.
* The actor is frozen: what `Actor.about` tells (model, weights' version, sampling) is in each record, and an
  InputError says so if it changes during a run.
"""

import contextlib
import functools
import inspect
import json
import os
import queue
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator

from metagym.episode import Agent, run
from metagym.errors import InputError, MetaGymError, UnknownNameError, WorldError
from metagym.live import Live
from metagym.protocols import Chat, ChatFn
from metagym.text_env import ListedTasks, NumberedTasks, TextEnv
from metagym.types import Task, Trajectory

Played = tuple[tuple[str, int], ...]  # (task id, seed) of each episode of a batch
RUNS = 100_000  # runs of each type and split that ICT-v0 tells apart
REWARDS: Mapping[str, str] = {
    "previous": "mean return on the batch of the transcript, played again (the paper's)",
    "next": "mean return on the batch that comes next in the run, never seen by the reflector",
    "both": "mean of `previous` and `next`",
    "gain": "`previous`, less what the old prompt got on that batch",
    "held_out": "mean return on a batch that no transcript of the run holds",
}


# ---------------------------------------------------------------- the actor


def _nothing() -> Mapping[str, Any]:
    return {}


def _same(chat: Chat | ChatFn, seed: int) -> Chat | ChatFn:
    return chat


@dataclass(frozen=True)
class Actor(Live):
    """Who plays the inner episodes. Frozen: it learns from what it is told and from nothing else."""

    new_chat: Callable[[int], Chat | ChatFn]
    """Makes the chat of one episode; the number is the seed of its sampling."""
    agent: Agent = field(default_factory=Agent)  # prompts and parsing; its `system` is not used
    about: Callable[[], Mapping[str, Any]] = _nothing  # model, version of its weights, sampling: recorded
    max_turns: int | None = None
    timeout_s: float | None = None
    shared: bool = False  # all episodes have the same chat; else one that has a `close` is closed at its end

    @classmethod
    def of(cls, actor: "Actor | ChatFn | Chat") -> "Actor":
        """An `Actor` as it is; a function of the messages, or a `Chat` that keeps no state, as one."""
        if isinstance(actor, cls):
            return actor
        if isinstance(actor, Chat) or callable(actor):
            return cls(functools.partial(_same, actor), shared=True)
        raise InputError(
            "actor= takes a metagym.meta.Actor, a Chat or a function of messages; got "
            f"{type(actor).__name__}."
        )


# ---------------------------------------------------------------- what is played


@dataclass(frozen=True)
class Candidate:
    """An action as it is understood: what the actor gets, and what it does not."""

    text: str | None  # None: nothing at all, not even a default
    analysis: str = ""  # kept in the record
    cut: int = 0  # characters beyond the limit that were dropped


@dataclass(frozen=True)
class Batch:
    """Some tasks that were played under one candidate."""

    candidate: Candidate
    trajectories: tuple[Trajectory, ...]  # those that count, in the order of the tasks, actor by actor
    failed: tuple[Trajectory, ...] = ()  # those that don't: infrastructure

    @property
    def returns(self) -> tuple[float, ...]:
        return tuple(t.reward for t in self.trajectories)


# ---------------------------------------------------------------- hooks


class Hooks(Protocol):
    """What makes a meta-environment. Pure functions; `Prompting` has the defaults."""

    def read(self, action: str) -> Candidate:
        """What an action means. Any text is an action."""
        ...

    def condition(self, candidate: Candidate, agent: Agent) -> tuple[str | None, Agent]:
        """What the actor is given: its system message (None: none at all), and its agent."""
        ...

    def observe(self, batch: Batch, past: Sequence[Batch]) -> str:
        """What the reflector sees of a batch. `past`: those of the run before it; none in Reflect-v0."""
        ...

    def score(self, batch: Batch, past: Sequence[Batch]) -> float:
        """What a batch is worth; at least one of its trajectories counts."""
        ...


@dataclass(frozen=True)
class Transcript:
    """How a batch becomes text. Fields in braces are filled in; what is empty is left out.

    If a text would be longer than `max_chars`, it is shortened by rules that stand in its first line: every
    episode gets the same share; of a long one the first and the last turns stay; of a long observation its
    beginning and its end. Whatever is left out is named in its place.
    """

    head: str = "System prompt: {prompt}"
    no_prompt: str = "(none)"  # what stands for {prompt} if there is none
    episode: str = "Episode {number}"
    turn: str = "{observation}\n> {action}"  # also {reward}, a number, and {mark}
    later: str = ""  # of every turn but an episode's first, if it shall look different
    marks: tuple[str, str] = ("+", "-")  # what {mark} is: for a reward above 0, for another
    final: str = "{observation}"
    end: str = "Return: {value:.2f}"
    no_action: str = "(no action: {reply})"  # in place of {action} if nothing was done
    separator: str = "\n\n"
    tail: str = ""
    max_chars: int = 20_000
    max_observation: int = 2_000  # characters of one observation, or reply, where a text is shortened

    def __post_init__(self):
        if self.max_chars < 200 or self.max_observation < 40:
            raise InputError(
                f"a transcript needs max_chars >= 200 and max_observation >= 40, got {self.max_chars} and "
                f"{self.max_observation}."
            )
        turn = {"observation": "", "action": "", "reward": 0.0, "mark": ""}
        end = {"value": 0.0, "outcome": 0.0, "stop": ""}
        for name, known in {
            "head": {"prompt": ""},
            "episode": {"number": 1, "task": "", "type": ""},
            "turn": turn,
            "later": turn,
            "final": {"observation": ""},
            "end": end,
            "no_action": {"reply": ""},
        }.items():
            try:
                getattr(self, name).format(**known)
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                holds = ", ".join(f"{{{k}}}" for k in known)
                raise InputError(
                    f"the layout {name}={getattr(self, name)!r} of a transcript can't be filled in "
                    f"({type(error).__name__}: {error}); it may hold {holds}."
                ) from error

    def __call__(self, batch: Batch) -> str:
        """The text, of at most `max_chars` characters."""
        prompt = self.no_prompt if batch.candidate.text is None else batch.candidate.text
        head, tail = self.head.format(prompt=prompt), self.tail
        bodies = [self._episode(n, t, None) for n, t in enumerate(batch.trajectories, start=1)]
        text = self._join(head, *bodies, tail)
        if len(text) <= self.max_chars:
            return text
        rules = (
            f"(Shortened to {self.max_chars} characters: each episode has an equal share; its first and last "
            f"turns stay; what is left out is marked [...].)"
        )
        fixed = len(self._join(rules, "", tail)) + len(self.separator) * (len(bodies) + 1)
        head = _middle(head, max(40, min(len(head), (self.max_chars - fixed) // 2)))
        share = (self.max_chars - fixed - len(head)) // max(1, len(bodies))
        bodies = [self._episode(n, t, share) for n, t in enumerate(batch.trajectories, start=1)]
        return _middle(self._join(rules, head, *bodies, tail), self.max_chars)

    def _join(self, *parts: str) -> str:
        return self.separator.join(p for p in parts if p)

    def _episode(self, number: int, t: Trajectory, budget: int | None) -> str:
        cut = (
            (lambda s: s)
            if budget is None
            else (lambda s: _middle(s, min(self.max_observation, max(40, budget))))
        )
        title = self.episode.format(number=number, task=t.task.id, type=t.task.type) if self.episode else ""
        end = self.end.format(value=t.reward, outcome=t.outcome, stop=t.stop) if self.end else ""
        turns = []
        for i, turn in enumerate(t.turns):
            layout = self.later if i and self.later else self.turn
            action = self.no_action.format(reply=cut(turn.reply)) if turn.action is None else cut(turn.action)
            mark = self.marks[0 if turn.reward > 0 else 1]
            shown = {"observation": cut(turn.observation), "action": action, "reward": turn.reward}
            turns.append(layout.format(**shown, mark=mark))
        if t.final is not None and self.final:
            turns.append(self.final.format(observation=cut(t.final)))
        whole = "\n".join(p for p in (title, *turns, end) if p)
        if budget is None or len(whole) <= budget:
            return whole
        first, last = 0, 0  # turns kept from either end
        mark = "[... {} turns left out ...]"
        room = budget - len(title) - len(end) - len(mark) - 6
        while first + last < len(turns):
            index = len(turns) - 1 - last if last <= first else first
            room -= len(turns[index]) + 1
            if room < 0:
                break
            first, last = (first, last + 1) if last <= first else (first + 1, last)
        left = len(turns) - first - last
        middle = [mark.format(left)] if left else []
        kept = (title, *turns[:first], *middle, *turns[len(turns) - last :], end)
        return _middle("\n".join(p for p in kept if p), budget)


def _middle(text: str, length: int) -> str:
    """A text of at most `length` characters: what is too much is taken from its middle, and said."""
    if len(text) <= length:
        return text
    mark = f"[... {len(text) - length} characters left out ...]"
    room = max(0, length - len(mark) - 8)
    mark = f"[... {len(text) - room} characters left out ...]"
    if len(mark) > length:
        return text[:length]
    return text[: room - room // 2] + mark + (text[-(room // 2) :] if room // 2 else "")


_PROMPT = re.compile(r"<prompt>(.*?)(?:</prompt>|\Z)", re.DOTALL | re.IGNORECASE)
_ANALYSIS = re.compile(r"<analysis>(.*?)(?:</analysis>|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Prompting:
    """The hooks of In-Context Training: the action is the next system prompt.

    An action may hold an analysis, which is kept and never given to the actor: either all that stands outside
    `<prompt>...</prompt>`, or what stands inside `<analysis>...</analysis>`. Without such marks the whole
    text is the prompt. An empty prompt means none: the actor gets no system message.
    """

    transcript: Transcript = field(default_factory=Transcript)
    max_prompt: int = 4_000  # characters; what is beyond is dropped, and counted in `Candidate.cut`

    def read(self, action: str) -> Candidate:
        found = _PROMPT.search(action)
        if found:
            prompt, analysis = found[1], action[: found.start()] + action[found.end() :]
        else:
            prompt, analysis = _ANALYSIS.sub("", action), "\n".join(_ANALYSIS.findall(action))
        prompt = prompt.strip()
        kept = prompt[: self.max_prompt]
        return Candidate(kept or None, analysis.strip(), len(prompt) - len(kept))

    def condition(self, candidate: Candidate, agent: Agent) -> tuple[str | None, Agent]:
        return candidate.text, agent

    def observe(self, batch: Batch, past: Sequence[Batch]) -> str:
        return self.transcript(batch)

    def score(self, batch: Batch, past: Sequence[Batch]) -> float:
        return float(np.mean(batch.returns))


# ---------------------------------------------------------------- the inner world


class World:
    """An inner world: its tasks by type, and envs in which they are played, several at the same time.

    Args:
        id: a registered text env, ours or not.
        kwargs: what `gymnasium.make` gets besides.
        split, types: which tasks; None: what the world does by itself, or all.
        workers: episodes at the same time.

    An env that lists no tasks, as those of others do, has the tasks `"<id>:<seed>"` in the splits of `SEEDS`.
    Raises UnknownNameError for a world that is not registered, InputError for arguments that it refuses.
    """

    SEEDS: Mapping[str, range] = {
        "train": range(800_000),
        "validation": range(800_000, 900_000),
        "test": range(900_000, 1_000_000),
    }

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        split: str | None = None,
        types: Sequence[str] | None = None,
        workers: int = 1,
    ):
        self.id, self.kwargs, self.split = id, dict(kwargs or {}), split
        if not isinstance(id, str):
            raise InputError(f"world= takes the id of a registered env, got {type(id).__name__}.")
        try:
            spec = gym.spec(id)
        except gym.error.Error as error:
            raise UnknownNameError("world", id, gym.registry, f"({error})") from error
        self._types = None if types is None else tuple(types)
        self._free: queue.LifoQueue[gym.Env[Any, Any]] = queue.LifoQueue()
        self._all: list[gym.Env[Any, Any]] = []
        self._workers = workers
        self._threads: ThreadPoolExecutor | None = None
        creator = spec.entry_point if callable(spec.entry_point) else None
        if creator is None:
            creator = load_env_creator(str(spec.entry_point))
        self._takes = _parameters(creator) & {"split", "types"}
        self._inner: Any = self._make().unwrapped
        self._free.put(self._all[0])
        self._listed = hasattr(self._inner, "tasks")
        known = getattr(self._inner, "types", None) if self._listed else (id,)
        self.types = tuple(dict.fromkeys(t.type for t in self._inner.tasks) if known is None else known)
        for name, asked, all_of in (
            ("type", self._types or (), self.types),
            ("split", () if split is None else (split,), () if self._listed else self.SEEDS),
        ):
            for one in asked:
                if all_of and one not in all_of:
                    raise UnknownNameError(name, one, all_of)
        if self._types is not None:
            self.types = self._types

    def tasks(self, type: str | None) -> Sequence[Task]:
        """The tasks of a type, or of all types, in the split; may be lazy."""
        if not self._listed:
            return NumberedTasks((self.id,), {s: r for s, r in self.SEEDS.items() if self.split in (None, s)})
        if type is None and self._takes == {"split", "types"}:
            return self._inner.tasks
        table = getattr(self._inner, "world", None)
        if isinstance(self._inner, TextEnv) and table is not None and "tasks" not in self.kwargs:
            return table.select(self.split, [type] if type is not None else self.types)
        types = self.types if type is None else (type,)
        return [t for t in self._inner.tasks if t.type in types and self.split in (None, t.split)]

    def find(self, id: str) -> Task:
        """The task of an id. Raises UnknownNameError."""
        if not self._listed:
            return NumberedTasks((self.id,), self.SEEDS).find(id)
        lookup = getattr(self._inner, "task", None)
        if lookup is not None:
            return lookup(id)
        found = next((t for t in self._inner.tasks if t.id == id), None)
        if found is None:
            raise UnknownNameError("task", id, [t.id for t in self._inner.tasks[:1000]])
        return found

    def play(self, episodes: Sequence[Callable[[gym.Env[Any, Any]], Trajectory]]) -> list[Trajectory]:
        """Gives each function an env of its own; results in order."""
        if len(episodes) == 1 or self._workers == 1:
            return [self._with_env(e) for e in episodes]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="actor")
        return list(self._threads.map(self._with_env, episodes))

    def episode(
        self, env: gym.Env[Any, Any], chat: Chat | ChatFn, task: Task, seed: int, **how: Any
    ) -> Trajectory:
        """Plays a task as `metagym.episode.run` does."""
        if self._listed:
            return run(env, chat, task, seed=seed, **how)
        number = int(task.id.rpartition(":")[2])
        return replace(run(env, chat, None, seed=number, **how), task=task, seed=seed)

    def _with_env(self, episode: Callable[[gym.Env[Any, Any]], Trajectory]) -> Trajectory:
        try:
            env = self._free.get_nowait()
        except queue.Empty:
            env = self._make()
        try:
            return episode(env)
        finally:
            self._free.put(env)

    def _make(self) -> gym.Env[Any, Any]:
        given = {"split": self.split, "types": self._types}
        kwargs = self.kwargs | {name: given[name] for name in sorted(self._takes)}
        try:
            env = gym.make(self.id, disable_env_checker=True, **kwargs)
        except MetaGymError:
            raise
        except (TypeError, gym.error.Error) as error:
            raise InputError(f"the world {self.id} can't be made with {kwargs}: {error}") from error
        self._all.append(env)
        return env

    def close(self) -> None:
        """Closes the envs and ends the threads; what is played afterwards starts new ones. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None
        for env in self._all:
            env.close()


def _parameters(creator: Callable[..., Any]) -> set[str]:
    with contextlib.suppress(TypeError, ValueError):
        return set(inspect.signature(creator).parameters)
    return set()


# ---------------------------------------------------------------- the environments


class MetaEnv(TextEnv):
    """What both meta-environments share: playing batches. See the module.

    Args:
        actor: an `Actor`, a function of messages, a `Chat`; or several, each of which plays every batch.
        hooks: what an action means, what is seen, what it is worth.
        retries: how often an inner episode that failed (infrastructure) is played again.
        workers: inner episodes at the same time; None: all of a batch.
    """

    def __init__(
        self,
        table: Any,
        *,
        actor: Any,
        hooks: Hooks | None = None,
        retries: int = 2,
        workers: int | None = None,
        **selection: Any,
    ):
        if retries < 0 or (workers is not None and workers < 1):
            raise InputError(
                f"retries must be at least 0 and workers at least 1, got {retries} and {workers}."
            )
        super().__init__(table, max_chars=1_000_000, **selection)
        actors = actor if isinstance(actor, list | tuple) else (actor,)
        if not actors:
            raise InputError("actor= is empty: a meta-environment needs at least one.")
        self.actors = tuple(Actor.of(a) for a in actors)
        self.hooks: Hooks = Prompting() if hooks is None else hooks
        self.retries, self._workers = retries, workers
        self.waits = True
        self._told_about: list[dict[str, Any]] | None = None

    def about(self) -> list[dict[str, Any]]:
        """What each actor tells of itself now."""
        return [dict(a.about()) for a in self.actors]

    def _frozen(self, start: bool = False) -> list[dict[str, Any]]:
        """What the actors are, which must be what they were when the episode began."""
        now = self.about()
        if start:
            self._told_about = now
        elif now != self._told_about:
            raise InputError(
                f"the actor changed during an episode, from {self._told_about} to {now}: it must be frozen."
            )
        return now

    def play(
        self, world: World, candidate: Candidate, tasks: Sequence[tuple[Task, int]], key: Sequence[int]
    ) -> Batch:
        """Plays (task, seed) pairs under a candidate, all at the same time. `key`: what the actors' sampling
        seeds are made of. Raises WorldError if no episode counts."""
        jobs = []
        for a, actor in enumerate(self.actors):
            system, agent = self.hooks.condition(candidate, actor.agent)
            agent = replace(agent, system=None)  # nothing but what the hooks say
            for i, (task, seed) in enumerate(tasks):
                jobs.append((actor, system, agent, task, seed, _seed(*key, a, i)))

        def play_one(job: tuple[Actor, str | None, Agent, Task, int, int]) -> Callable[[Any], Trajectory]:
            return lambda env: self._play_one(world, env, *job)

        played = world.play([play_one(job) for job in jobs])
        good = tuple(t for t in played if t.stop.in_loss)
        failed = tuple(t for t in played if not t.stop.in_loss)
        if not good:
            raise WorldError(
                f"none of the {len(played)} episodes of a batch counts, each tried {self.retries + 1} times; "
                f"the last one: {failed[-1].error}"
            )
        return Batch(candidate, good, failed)

    def _play_one(
        self,
        world: World,
        env: gym.Env[Any, Any],
        actor: Actor,
        system: str | None,
        agent: Agent,
        task: Task,
        seed: int,
        sampling_seed: int,
    ) -> Trajectory:
        for attempt in range(self.retries + 1):
            chat = actor.new_chat(sampling_seed)
            try:
                how = {"max_turns": actor.max_turns, "timeout_s": actor.timeout_s}
                played = world.episode(env, chat, task, seed, system=system, agent=agent, **how)
            finally:
                if not actor.shared and callable(close := getattr(chat, "close", None)):
                    close()
            if played.stop.in_loss or attempt == self.retries:
                # What a clock said is not determined by task and seed.
                metrics = {k: v for k, v in played.metrics.items() if not k.endswith("seconds")}
                return replace(played, metrics=metrics)
        raise AssertionError("unreachable")

    def _record(self, played: Batch, **more: Any) -> dict[str, Any]:
        """What info tells of a batch."""
        return {
            "prompt": played.candidate.text,
            "analysis": played.candidate.analysis,
            "prompt_cut": played.candidate.cut,
            "returns": list(played.returns),
            "failed": len(played.failed),
            "trajectories": played.trajectories,
            "failures": played.failed,
            "actor": self._frozen(),
            "success": all(t.outcome >= 1.0 for t in played.trajectories),
            **more,
        }


class ICTEnv(MetaEnv):
    """`metagym/ICT-v0`: a run of In-Context Training; see the module.

    Args:
        world: id of a registered text env.
        actor, hooks, retries, workers: see `MetaEnv`.
        k: tasks of a batch.
        meta_turns: actions of a run.
        prompt: the initial prompt; None: none at all.
        split: of the world's tasks; None: all of them.
        types: the world's types; None: all.
        held_out: types that must not be played, such as those of another phase: InputError if one is.
        mixed: a batch has tasks of all types; else all tasks of a run are of one.
        world_kwargs: what else the world is made with.
        tasks, render_mode: as for `TextEnv`.

    A task is a run, `"<type>:<n>"`. info tells of the batch just played: `prompt`, `analysis`, `tasks` (and
    `batch`: with their seeds), `returns`, `trajectories`, `failed` (episodes that do not count) and
    `failures`, `meta_turn` (0 after reset), `actor` (what each tells of itself), `success` (every episode
    that counts succeeded), `outcome` (what the batch is worth). Raises InputError if a type has too few tasks
    for a run.
    """

    def __init__(
        self,
        *,
        world: str,
        actor: Any,
        k: int = 5,
        meta_turns: int = 8,
        prompt: str | None = None,
        split: str | None = "train",
        types: str | Iterable[str] | None = None,
        held_out: str | Iterable[str] = (),
        mixed: bool = False,
        world_kwargs: Mapping[str, Any] | None = None,
        hooks: Hooks | None = None,
        retries: int = 2,
        workers: int | None = None,
        tasks: str | Iterable[str] | None = None,
        render_mode: str | None = None,
    ):
        if k < 1 or meta_turns < 1:
            raise InputError(f"k and meta_turns must be at least 1, got {k} and {meta_turns}.")
        actors = len(actor) if isinstance(actor, list | tuple) else 1
        chosen = None if types is None else (types,) if isinstance(types, str) else tuple(types)
        inner = World(world, world_kwargs, split=split, types=chosen, workers=workers or k * actors)
        check_apart(inner.types, (held_out,) if isinstance(held_out, str) else held_out)
        names = (MIXED,) if mixed else inner.types
        super().__init__(
            NumberedTasks(names, {split or "all": range(RUNS)}),
            actor=actor,
            hooks=hooks,
            retries=retries,
            workers=workers,
            split=None,
            tasks=tasks,
            render_mode=render_mode,
        )
        self.inner, self.k, self.meta_turns, self.prompt = inner, k, meta_turns, prompt
        self._mixed = mixed
        self._enough: set[str] = set()

    def draws(
        self, type: str, seed: int, count: int, *, key: int = 0
    ) -> Iterator[tuple[tuple[Task, int], ...]]:
        """Endless batches of `count` different (task, seed) pairs, none of which comes twice. Raises
        InputError when the tasks are used up."""
        tasks = self.inner.tasks(None if self._mixed else type)
        rng = np.random.default_rng([seed, key, len(tasks), *type.encode()])
        yield from _draw(tasks, rng, count, f"type {type!r} of {self.inner.id}, split {self.inner.split!r}")

    def _begin(
        self, task: Task, seed: int, rng: np.random.Generator, options: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        self._check_size(task.type)
        self._key = (seed, int(task.id.rpartition(":")[2]))
        self._draws = self.draws(task.type, _seed(*self._key), self.k)
        self._meta_turn = 0
        self._frozen(start=True)
        self.past: tuple[Batch, ...] = ()
        self.batch = self._batch(Candidate(self.prompt))
        return self.hooks.observe(self.batch, self.past), self._told()

    def _act(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        self._meta_turn += 1
        batch = self._batch(self.hooks.read(action))
        self.past, self.batch = (*self.past, self.batch), batch
        told = self._told()
        over = self._meta_turn == self.meta_turns
        return self.hooks.observe(batch, self.past), told["outcome"], over, False, told

    def _batch(self, candidate: Candidate) -> Batch:
        self.asked = next(self._draws)
        return self.play(self.inner, candidate, self.asked, (*self._key, self._meta_turn))

    def fresh(self) -> Played:
        """k more tasks, with seeds, that no batch of the run has had; none of the coming ones has them."""
        return tuple((t.id, seed) for t, seed in next(self._draws))

    def _told(self) -> dict[str, Any]:
        pairs = tuple((t.id, seed) for t, seed in self.asked)
        more = {"meta_turn": self._meta_turn, "tasks": [id for id, _ in pairs], "batch": pairs}
        return self._record(self.batch, **more, outcome=float(self.hooks.score(self.batch, self.past)))

    def _check_size(self, type: str) -> None:
        if type in self._enough:
            return
        have, need = len(self.inner.tasks(None if self._mixed else type)), self.k * (self.meta_turns + 1)
        if have < need:
            raise InputError(
                f"a run of {self.meta_turns} meta-turns with k={self.k} needs {need} tasks, for none comes "
                f"twice; type {type!r} of {self.inner.id}, split {self.inner.split!r}, has {have}. Lower k "
                f"or meta_turns, choose other types, or pass mixed=True."
            )
        self._enough.add(type)

    def close(self) -> None:
        super().close()
        self.inner.close()


MIXED = "mixed"


def check_apart(types: Iterable[str], held_out: Iterable[str]) -> None:
    """Raises InputError if two sets of types have one in common."""
    both = sorted(set(types) & set(held_out))
    if both:
        raise InputError(
            f"{len(both)} types are both played here and held out: {', '.join(both[:8])}. Meta-train and "
            f"meta-test types must be disjoint."
        )


def _draw(
    tasks: Sequence[Task], rng: np.random.Generator, count: int, what: str
) -> Iterator[tuple[tuple[Task, int], ...]]:
    used: set[int] = set()
    while True:
        batch = []
        for _ in range(count):
            if len(used) == len(tasks):
                raise InputError(
                    f"all {len(tasks)} tasks of {what} are used up: no task comes twice in a run."
                )
            while (index := int(rng.integers(len(tasks)))) in used:
                pass
            used.add(index)
            batch.append((tasks[index], int(rng.integers(2**31))))
        yield tuple(batch)


def _seed(*numbers: int) -> int:
    """A seed below 2**31 that is a function of the numbers."""
    return int(np.random.SeedSequence((len(numbers), *numbers)).generate_state(1)[0] & 0x7FFFFFFF)


# ---------------------------------------------------------------- stored experience


@dataclass(frozen=True)
class Experience:
    """One meta-turn as it was collected: the tuple (prompt, observation, batch), and what rewards need."""

    id: str
    type: str
    split: str
    world: str
    world_kwargs: Mapping[str, Any]
    prompt: str | None  # the actor had it when it played `batch`
    observation: str
    batch: Played
    returns: tuple[float, ...]  # of those of `batch` that count
    score: float  # what `batch` was worth under `prompt`
    next: Played = ()  # the run's next tasks, which no transcript up to here holds
    held_out: Played = ()  # of no transcript of the run
    meta_turn: int = 0
    actor: Sequence[Mapping[str, Any]] = ()  # what the actors told of themselves

    def record(self) -> dict[str, Any]:
        """As a JSON value."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Experience":
        """From a JSON value. Raises InputError if a field is missing, unknown or malformed."""
        known = set(cls.__dataclass_fields__)
        try:
            if unknown := set(record) - known:
                raise InputError(
                    f"an experience has no field {sorted(unknown)[0]!r}; known: {sorted(known)}."
                )
            pairs = {
                name: tuple((str(id), int(seed)) for id, seed in record[name])
                for name in ("batch", "next", "held_out")
                if name in record
            }
            more = {"returns": tuple(map(float, record["returns"])), "actor": tuple(record.get("actor", ()))}
            made = cls(**{**record, **pairs, **more})
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"not a stored experience ({error}): {json.dumps(record, default=str)[:200]}"
            ) from error
        if not made.batch:
            raise InputError(f"experience {made.id!r} has an empty batch.")
        return made


def read_experience(path: str | os.PathLike[str]) -> list[Experience]:
    """The experience in a file of JSON lines; half a line at its end, left by a killed process, is no harm.

    Raises InputError, with the line, if there is none or a line is damaged.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no file {file}: `metagym ict collect` makes one.")
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            found.append(Experience.of(json.loads(line)))
        except ValueError as error:
            raise InputError(f"{file}, line {number}: {error}") from error
    if not found:
        raise InputError(f"{file} holds no experience.")
    return found


class ReflectEnv(MetaEnv):
    """`metagym/Reflect-v0`: one stored meta-turn, one candidate, one reward; see the module.

    Args:
        data: a file that `metagym ict collect` wrote, or a sequence of `Experience`.
        actor, hooks, retries, workers: see `MetaEnv`. The actor is the one that the data were collected with.
        reward: see `REWARDS`.
        split, types, tasks, render_mode: as for `TextEnv`; a task is an experience, of the type of its tasks.
        held_out: types that must not be in the data: InputError if one is.

    info tells what ICT-v0 tells, `outcome` being the reward, `gain` what the candidate got more than the old
    prompt on the old batch (where that was played), and after reset `returns` those of the old prompt.
    """

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | Sequence[Experience],
        actor: Any,
        reward: str = "previous",
        split: str | None = None,
        types: str | Iterable[str] | None = None,
        held_out: str | Iterable[str] = (),
        hooks: Hooks | None = None,
        retries: int = 2,
        workers: int | None = None,
        tasks: str | Iterable[str] | None = None,
        render_mode: str | None = None,
    ):
        if reward not in REWARDS:
            raise UnknownNameError("reward", reward, REWARDS)
        stored = read_experience(data) if isinstance(data, str | os.PathLike) else list(data)
        self._stored = {e.id: e for e in stored}
        super().__init__(
            ListedTasks(Task(e.id, e.type, e.split) for e in stored),
            actor=actor,
            hooks=hooks,
            retries=retries,
            workers=workers,
            split=split,
            types=types,
            tasks=tasks,
            render_mode=render_mode,
        )
        check_apart({t.type for t in self.tasks}, (held_out,) if isinstance(held_out, str) else held_out)
        self.reward = reward
        self._worlds: dict[str, World] = {}
        wanted = {"next": ("next",), "both": ("next",), "held_out": ("held_out",)}.get(reward, ())
        for task in self.tasks:
            for name in wanted:
                if not getattr(self._stored[task.id], name):
                    raise InputError(
                        f"reward {reward!r} needs `{name}`, which experience {task.id!r} has not."
                    )
        for task in self.tasks[:1]:
            self._world(self._stored[task.id])  # so that a wrong world fails here

    def _world(self, e: Experience) -> World:
        key = json.dumps([e.world, dict(e.world_kwargs), e.split], sort_keys=True)
        if key not in self._worlds:
            most = max(len(s.batch) for s in self._stored.values()) * len(self.actors)
            self._worlds[key] = World(
                e.world, e.world_kwargs, split=_given(e.split), workers=self._workers or most
            )
        return self._worlds[key]

    def _begin(
        self, task: Task, seed: int, rng: np.random.Generator, options: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        self._now = e = self._stored[task.id]
        self._key = (seed, e.meta_turn)
        self._frozen(start=True)
        told = {"prompt": e.prompt, "returns": list(e.returns), "tasks": [id for id, _ in e.batch]}
        return e.observation, told | {"meta_turn": e.meta_turn, "actor": self._frozen(), "outcome": e.score}

    def _act(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        e, candidate = self._now, self.hooks.read(action)
        names = {"next": ("next",), "both": ("batch", "next"), "held_out": ("held_out",)}.get(
            self.reward, ("batch",)
        )
        batches = {name: self._replay(candidate, getattr(e, name), n) for n, name in enumerate(names)}
        scores = {name: float(self.hooks.score(batch, ())) for name, batch in batches.items()}
        value = float(np.mean(list(scores.values())))
        gain = {"gain": scores["batch"] - e.score} if "batch" in scores else {}
        if self.reward == "gain":
            value = gain["gain"]
        one = next(iter(batches.values()))
        everything = replace(
            one,
            trajectories=tuple(t for b in batches.values() for t in b.trajectories),
            failed=tuple(t for b in batches.values() for t in b.failed),
        )
        told = {"tasks": [id for name in names for id, _ in getattr(e, name)], "meta_turn": e.meta_turn + 1}
        text = self.hooks.observe(one, ())
        return text, value, True, False, self._record(everything, **told, **gain, outcome=value)

    def _replay(self, candidate: Candidate, played: Played, number: int) -> Batch:
        world = self._world(self._now)
        tasks = [(world.find(id), seed) for id, seed in played]
        return self.play(world, candidate, tasks, (*self._key, number))

    def close(self) -> None:
        super().close()
        for world in self._worlds.values():
            world.close()


def _given(split: str) -> str | None:
    return None if split == "all" else split
