"""`metagym ict`: collect what a reflector is trained on, and measure it.

`metagym ict collect` lets a reflector go through runs of In-Context Training and writes every meta-turn down
as a tuple for `metagym/Reflect-v0`. `metagym train` trains on them. `metagym ict eval` measures: for each row
of `config.ict.evaluate` and each reflector, the actor's mean return by meta-turn, over runs. Both go on where
they were stopped, and keep every prompt and transcript.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
from flax import nnx

from metagym.agents.endpoint import endpoints
from metagym.agents.follower import rule_follower
from metagym.episode import Agent, run
from metagym.errors import InfraError, InputError, TrainingError, UnknownNameError, WorldError
from metagym.experiments import build
from metagym.experiments import config as config_lib
from metagym.experiments.config import Config
from metagym.experiments.ict_report import write_report
from metagym.meta import (
    Actor,
    Batch,
    Candidate,
    Experience,
    Prompting,
    Transcript,
    read_experience,
)
from metagym.protocols import Backend
from metagym.proxy.render import Renderer
from metagym.proxy.session import Session
from metagym.rl import checkpoint
from metagym.rl.metrics import episode_record, read_jsonl
from metagym.rl.rollouts import ThreadExecutor, seed_of
from metagym.rl.train_step import init_state
from metagym.types import Message, Sampling

ACTORS = ("engine", "endpoint", "rule_follower")
REFLECTORS = {
    "initial": "no reflector: every batch is played under the initial prompt",
    "noop": "hands back the prompt that is in force",
    "random_action": "tells the actor to do something that it did before, drawn at random",
    "untrained": "the model as it comes",
    "best_of": "the model as it comes writes some prompts; the best on the validation tasks stays",
    "trained": "the newest checkpoint of the run",
}


# ---------------------------------------------------------------- from a config


def build_actor(config: Config, stack: contextlib.ExitStack, scratch: Path) -> Actor:
    """The frozen actor of `config.actor`; what it needs is closed with `stack`. Raises InputError."""
    a = config.actor
    if a.kind not in ACTORS:
        raise UnknownNameError("config.actor.kind", a.kind, ACTORS)
    if a.kind == "rule_follower":
        return dataclasses.replace(rule_follower(), max_turns=a.max_turns or None)
    agent = build.build_agent(config_lib.changed(config, agent={**a.agent, "system": "", "max_turns": 0}))
    how: dict[str, Any] = {"agent": agent, "max_turns": a.max_turns or None, "timeout_s": a.timeout_s or None}
    if a.kind == "endpoint":
        sampling = {"temperature": a.temperature, "top_p": a.top_p, "max_tokens": a.max_tokens}
        make = endpoints(a.url, a.model, key_name=a.key_variable, sampling=sampling)
        return Actor(make, about=make(0).about, **how)
    mesh = build.build_mesh(config)
    name = a.model or config.model.name
    own = {"model__name": name, "model__chat_template": a.chat_template}
    own |= {"engine__slots": a.slots, "sampling__context": a.context}
    config = config_lib.changed(config, **own)
    model, directory = build.build_model(config, mesh, scratch / "actor")
    renderer = build.build_renderer(config, directory)
    backend = build.build_backend(config, model)
    stack.callback(backend.close)
    stops = build.stop_tokens(renderer, a.stop)
    sampling = Sampling(a.max_tokens, a.temperature, a.top_p, stop_token_ids=stops)

    def new_chat(seed: int) -> Session:
        return Session(backend, renderer, sampling=sampling, training=False, context=a.context, seed=seed)

    def about() -> Mapping[str, Any]:
        return {"model": name, "version": backend.version, "sampling": dataclasses.asdict(sampling)}

    return Actor(new_chat, about=about, **how)


@dataclass(frozen=True)
class ValidActions(Prompting):
    """Prompts whose worth is, besides the return, that the actor's replies can be turned into actions: where
    the world's reward is rare, a weak actor's first lesson."""

    weight: float = 0.0

    def score(self, batch: Batch, past: Sequence[Batch]) -> float:
        valid = [t.action is not None for episode in batch.trajectories for t in episode.turns]
        return super().score(batch, past) + self.weight * (sum(valid) / len(valid) if valid else 0.0)


def build_hooks(config: Config) -> Prompting:
    """The hooks: prompts, with the transcript of `config.ict.transcript`."""
    given = build.plain(config.ict.transcript)
    transcript = build.call("config.ict.transcript", Transcript, given)
    if config.ict.valid_weight:
        return ValidActions(transcript, config.ict.max_prompt, config.ict.valid_weight)
    return Prompting(transcript, config.ict.max_prompt)


def world_arguments(config: Config, stack: contextlib.ExitStack, scratch: Path) -> dict[str, Any]:
    """What `gymnasium.make` of a meta-environment gets besides `config.world`: the actor, and how it is told
    and seen. Nothing if the config has no actor."""
    if not config.actor.kind:
        return {}
    return {"actor": build_actor(config, stack, scratch), "hooks": build_hooks(config)}


# ---------------------------------------------------------------- runs


class Witness(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps what every reset and step of an episode told."""

    def __init__(self, env: gym.Env[Any, Any]):
        super().__init__(env)
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def reset(self, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        self.seen = [(observation, info)]
        return observation, info

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.seen.append((observation, info))
        return observation, reward, terminated, truncated, info


@dataclass(frozen=True)
class Reflector:
    """Who writes the prompts of a run."""

    name: str
    chat: Callable[[Witness, int], Any]  # (the run's env, seed) -> the chat of a run
    agent: Agent
    about: Mapping[str, Any]


def scripted(name: str, prompt_of: Callable[[Witness, int, int], str | None]) -> Reflector:
    """A reflector without a model; `prompt_of` gets the run's env, its seed, and the meta-turn to come."""

    def chat(env: Witness, seed: int) -> Callable[[Sequence[Message]], str]:
        return lambda messages: prompt_of(env, seed, len(env.seen)) or ""

    return Reflector(name, chat, Agent(history=False), {"reflector": name})


def _initial(env: Witness, seed: int, turn: int) -> str | None:
    return env.unwrapped.prompt  # pyright: ignore[reportAttributeAccessIssue]


def _noop(env: Witness, seed: int, turn: int) -> str | None:
    return env.seen[-1][1]["prompt"]


def _random_action(env: Witness, seed: int, turn: int) -> str | None:
    done = [t.action for played in env.seen[-1][1]["trajectories"] for t in played.turns if t.action]
    return done[seed_of(seed, turn) % len(done)] if done else None


SCRIPTED = {"initial": _initial, "noop": _noop, "random_action": _random_action}


def model_reflector(
    name: str, config: Config, backend: Backend, renderer: Renderer, agent: Agent, about: Mapping[str, Any]
) -> Reflector:
    """The reflector that is a model: a session of its own for every run."""
    sampling = build.build_sampling(config, renderer)
    sampling = dataclasses.replace(sampling, temperature=config.ict.temperature)
    how = {"sampling": sampling, "training": False, "context": config.sampling.context}

    def chat(env: Witness, seed: int) -> Session:
        return Session(backend, renderer, seed=seed, **how)

    return Reflector(name, chat, agent, {**about, "sampling": dataclasses.asdict(sampling)})


@dataclass
class Models:
    """The reflector's model, its engine, and its weights before training and after."""

    config: Config
    agent: Agent
    renderer: Renderer
    backend: Any
    base: Any  # parameters
    mesh: Any

    def untrained(self) -> Reflector:
        self._serve(self.base)
        about = {"reflector": "untrained", "model": self.config.model.name}
        return self._reflector("untrained", about)

    def trained(self, run_directory: Path) -> Reflector:
        """Raises InputError if there is no checkpoint."""
        optimizer, params = build.build_optimizer(self.config), jax.tree.map(jnp.copy, self.base)
        shapes = checkpoint.abstract(init_state(params, optimizer, jax.random.key(0), self.mesh))
        found = checkpoint.load(run_directory / "checkpoints", shapes)
        if found is None:
            raise InputError(f"{run_directory} has no checkpoints: `metagym train` makes them.")
        step, state, _ = found
        self._serve(state.params)
        about = {"reflector": "trained", "model": self.config.model.name, "step": step}
        return self._reflector("trained", about)

    def _reflector(self, name: str, about: Mapping[str, Any]) -> Reflector:
        return model_reflector(name, self.config, self.backend, self.renderer, self.agent, about)

    def _serve(self, params: Any) -> None:
        self.backend.load(params, self.backend.version + 1)


@contextlib.contextmanager
def models(config: Config, scratch: Path) -> Iterator[Models]:
    """Loads the reflector's model and starts its engine."""
    agent, mesh = build.build_agent(config), build.build_mesh(config)
    model, directory = build.build_model(config, mesh, scratch)
    renderer = build.build_renderer(config, directory)
    backend = build.build_backend(config, model)
    try:
        yield Models(config, agent, renderer, backend, nnx.state(model), mesh)
    finally:
        backend.close()


def play_run(env: Witness, reflector: Reflector, task: str, seed: int) -> dict[str, Any]:
    """One run of a meta-environment: a record of every meta-turn, JSON values. Raises WorldError where a
    batch did not count."""
    chat = reflector.chat(env, seed_of(seed, 1))
    try:
        played = run(env, chat, task, seed=seed, agent=reflector.agent)
    finally:
        if callable(close := getattr(chat, "close", None)):
            close()
    if not played.stop.in_loss:
        raise WorldError(f"run {task} of {reflector.name}: {played.error}")
    replies = [None, *(t.reply for t in played.turns)]
    turns = [
        turn_record(observation, info, reply)
        for (observation, info), reply in zip(env.seen, replies, strict=False)
    ]
    return {"task": task, "seed": seed, "stop": str(played.stop), "error": played.error, "turns": turns}


def turn_record(observation: str, info: Mapping[str, Any], reply: str | None) -> dict[str, Any]:
    """What is kept of a meta-turn."""
    names = (
        "meta_turn",
        "prompt",
        "analysis",
        "prompt_cut",
        "returns",
        "outcome",
        "tasks",
        "failed",
        "actor",
    )
    episodes = [episode_record(t) for t in (*info["trajectories"], *info["failures"])]
    return {name: info[name] for name in names} | {
        "reply": reply,
        "observation": observation,
        "episodes": episodes,
    }


class Log:
    """A file of JSON lines that a stopped command goes on with: half a line at its end is cut off. For
    threads."""

    def __init__(self, path: Path):
        self.records = read_jsonl(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = "".join(json.dumps(r) + "\n" for r in self.records)
        if path.exists() and path.read_text(encoding="utf-8") != whole:
            path.write_text(whole, encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def add(self, *records: Mapping[str, Any]) -> None:
        with self._lock:
            self.records.extend(map(dict, records))
            self._file.write("".join(json.dumps(r) + "\n" for r in records))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def in_parallel(
    config: Config, jobs: Sequence[Any], work: Callable[[Any], None], tell: Callable[[str], None]
) -> None:
    """Does the jobs in threads. One that an infrastructure fault ends is told, and left for the next start of
    the command. Raises TrainingError if some are left, and whatever else a job raises."""
    left: list[str] = []

    def attempt(job: Any) -> None:
        try:
            work(job)
        except InfraError as error:
            left.append(f"{job}: {error}")
            tell(f"did not count: {left[-1]}")

    for _ in ThreadExecutor(config.max_workers).map(attempt, jobs):
        pass
    if left:
        raise TrainingError(
            f"{len(left)} of {len(jobs)} runs did not count, since something outside the agents failed; "
            f"start the command again to make them. The last one: {left[-1]}"
        )


class Envs:
    """ICT envs that are made when needed and used again, with the arguments of one study's row."""

    def __init__(self, **kwargs: Any):
        self._kwargs, self._free, self._lock = kwargs, [], threading.Lock()
        self._all = [self._make()]  # so that what can't work fails here
        self._free.append(self._all[0])

    def _make(self) -> Witness:
        try:
            return Witness(gym.make("metagym/ICT-v0", disable_env_checker=True, **self._kwargs))
        except (TypeError, gym.error.Error) as error:
            raise InputError(f"metagym/ICT-v0: {error}") from error

    @property
    def types(self) -> tuple[str, ...]:
        return self._all[0].unwrapped.types  # pyright: ignore[reportAttributeAccessIssue]

    @contextlib.contextmanager
    def one(self) -> Iterator[Witness]:
        with self._lock:
            env = self._free.pop() if self._free else None
        if env is None:
            env = self._make()
            with self._lock:
                self._all.append(env)
        try:
            yield env
        finally:
            with self._lock:
                self._free.append(env)

    def close(self) -> None:
        for env in self._all:
            env.close()


def ict_arguments(config: Config, actor: Actor) -> dict[str, Any]:
    """What ICT-v0 is made with for the training types of a config."""
    c = config.ict
    return {
        "world": c.world,
        "world_kwargs": build.plain(c.world_kwargs),
        "types": tuple(c.types) or None,
        "held_out": tuple(c.held_out),
        "split": c.split or None,
        "k": c.k,
        "meta_turns": c.meta_turns,
        "prompt": c.prompt or None,
        "mixed": c.mixed,
        "actor": actor,
        "hooks": build_hooks(config),
        "retries": config.retries,
    }


# ---------------------------------------------------------------- collect


def collect(
    config: Config, out: Path, run_directory: Path | None, tell: Callable[[str], None] = print
) -> None:
    """Writes `config.ict.runs` runs of each type to `out`, one `Experience` a line, and the runs themselves
    beside it. Goes on where it was stopped. Raises InputError, TrainingError."""
    c = config.ict
    name = c.collect
    known = {n: what for n, what in REFLECTORS.items() if n != "best_of"}
    if name not in known:
        raise UnknownNameError("config.ict.collect", name, known)
    if name == "trained" and run_directory is None:
        raise InputError("config.ict.collect = 'trained' needs --workdir=DIR, the run with its checkpoints.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        actor = build_actor(config, stack, out.parent / "scratch")
        envs = Envs(**ict_arguments(config, actor))
        stack.callback(envs.close)
        if name in SCRIPTED:
            reflector = scripted(name, SCRIPTED[name])
        else:
            made = stack.enter_context(models(config, out.parent / "scratch"))
            reflector = (
                made.trained(run_directory) if run_directory and name == "trained" else made.untrained()
            )
        data = stack.enter_context(contextlib.closing(Log(out)))
        runs = stack.enter_context(contextlib.closing(Log(out.with_suffix(".runs.jsonl"))))
        done = {r["id"].rpartition("/")[0] for r in data.records}
        tasks = [f"{kind}:{n}" for n in range(c.runs) for kind in envs.types]
        left = [t for t in tasks if f"{name}/{t}" not in done]
        tell(f"{len(tasks)} runs of {c.meta_turns} meta-turns by {name}; {len(left)} are left to make")

        def one(task: str) -> None:
            with envs.one() as env:
                found, record = collect_run(env, reflector, task, config.seed)
            runs.add({"id": f"{name}/{task}", "reflector": dict(reflector.about), **record})
            data.add(*(e.record() for e in found))  # at once: a run is there whole or not at all

        in_parallel(config, left, one, tell)
        scores = [r["score"] for r in data.records]
        tell(f"{len(scores)} tuples in {out}, mean return {sum(scores) / max(1, len(scores)):.3f}")


def collect_run(
    env: Witness, reflector: Reflector, task: str, seed: int
) -> tuple[list[Experience], dict[str, Any]]:
    """One run as experience: a tuple for every meta-turn that has a next one, and the record of the run."""
    record = play_run(env, reflector, task, seed)
    meta: Any = env.unwrapped
    batches = [(observation, info, info["batch"]) for observation, info in env.seen]
    try:
        held_out = meta.fresh()
    except InputError:  # the tasks of the type are used up: these tuples have no held-out batch
        held_out = ()
    kind = task.rpartition(":")[0]
    found = [
        Experience(
            id=f"{reflector.name}/{task}/{n}",
            type=kind,
            split=meta.inner.split or "all",
            world=meta.inner.id,
            world_kwargs=meta.inner.kwargs,
            prompt=info["prompt"],
            observation=observation,
            batch=batch,
            returns=tuple(info["returns"]),
            score=info["outcome"],
            next=batches[n + 1][2],
            held_out=held_out,
            meta_turn=n,
            actor=info["actor"],
        )
        for n, (observation, info, batch) in enumerate(batches[:-1])
    ]
    return found, record


# ---------------------------------------------------------------- evaluate


@dataclass(frozen=True)
class Job:
    """One run that an evaluation makes."""

    row: str
    reflector: str
    k: int
    type: str
    run: int

    @property
    def id(self) -> str:
        return f"{self.row}/{self.reflector}/k{self.k}/{self.type}/{self.run}"


def evaluate(
    config: Config, directory: Path, run_directory: Path | None, tell: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Makes the runs of every row of `config.ict.evaluate` that are not in `directory` yet, and writes
    runs.jsonl, results.json, table.md and curves.png there; the runs' records. Raises InputError,
    TrainingError."""
    rows = config.ict.evaluate
    if not rows:
        raise InputError("the config says nothing under `ict.evaluate`: there is nothing to measure.")
    chosen = list(dict.fromkeys(name for row in rows.values() for name in row.reflectors))
    for name in chosen:
        if name not in REFLECTORS:
            raise UnknownNameError("reflector", name, REFLECTORS)
    if run_directory is None and "trained" in chosen:
        tell("no --workdir with checkpoints: the trained reflector is left out")
        chosen.remove("trained")
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        actor = build_actor(config, stack, directory / "scratch")
        trained_on = training_types(config)
        envs, validation = {}, {}
        for name, row in rows.items():
            base = ict_arguments(config, actor)
            base |= {
                "world": row.world or config.ict.world,
                "world_kwargs": build.plain(row.world_kwargs) if row.world else base["world_kwargs"],
                "types": tuple(row.types) or None,
                "split": row.split,
                "held_out": trained_on if row.held_out and row.world in ("", config.ict.world) else (),
                "meta_turns": row.meta_turns,
            }
            for k in row.k:
                envs[name, k] = Envs(**{**base, "k": k})
                stack.callback(envs[name, k].close)
            if row.validation or "best_of" in row.reflectors:
                if row.validation_split == row.split or not row.validation:
                    raise InputError(
                        f"config.ict.evaluate.{name}: prompts are chosen on `validation` tasks of "
                        f"`validation_split`, which must be another split than {row.split!r}."
                    )
                more = {"split": row.validation_split, "k": row.validation, "meta_turns": 1}
                validation[name] = Envs(**{**base, **more})
                stack.callback(validation[name].close)
        jobs = [
            Job(name, reflector, k, kind, n)
            for reflector in chosen
            for name, row in rows.items()
            if reflector in row.reflectors
            for k in row.k
            for n in range(row.runs)
            for kind in envs[name, k].types
        ]
        log = stack.enter_context(contextlib.closing(Log(directory / "runs.jsonl")))
        done = {r["id"] for r in log.records}
        left = [job for job in jobs if job.id not in done]
        tell(f"{len(jobs)} runs, {len(left)} are left to make")
        made: Models | None = None
        for name in chosen:
            own = [job for job in left if job.reflector == name]
            if not own:
                continue
            if name not in SCRIPTED and made is None:
                made = stack.enter_context(models(config, directory / "scratch"))
            reflector = _reflector_of(name, made, run_directory)

            def one(job: Job, reflector: Reflector = reflector) -> None:
                row = rows[job.row]
                with envs[job.row, job.k].one() as env, contextlib.ExitStack() as inner:
                    judge = None
                    if job.row in validation:
                        judge = Judge(inner.enter_context(validation[job.row].one()), job.type)
                    record = _evaluate_run(env, reflector, job, config.seed, judge, row)
                log.add({"id": job.id, **dataclasses.asdict(job), "about": dict(reflector.about), **record})

            in_parallel(config, own, one, tell)
            tell(f"{name}: {len(own)} runs")
        wanted = {job.id for job in jobs}
        records = [r for r in log.records if r["id"] in wanted]
    tell(write_report(records, directory))
    return records


def training_types(config: Config) -> tuple[str, ...]:
    """The types that training saw: those of the data, or of the config if there are no data yet."""
    path = Path(str(build.plain(config.world.kwargs).get("data", config.ict.data)))
    if path.is_file():
        return tuple(dict.fromkeys(e.type for e in read_experience(path)))
    return tuple(config.ict.types)


def _reflector_of(name: str, made: Models | None, run_directory: Path | None) -> Reflector:
    if name in SCRIPTED:
        return scripted(name, SCRIPTED[name])
    assert made is not None
    if name == "trained":
        assert run_directory is not None
        return made.trained(run_directory)
    found = made.untrained()
    return dataclasses.replace(found, name=name, about={**found.about, "reflector": name})


@dataclass(frozen=True)
class Judge:
    """The fixed validation tasks of a type: the same ones, with the same seeds, for every prompt."""

    env: Witness
    type: str

    def score(self, prompt: str | None) -> float:
        meta: Any = self.env.unwrapped
        tasks = next(meta.draws(self.type, 0, meta.k))
        return float(meta.hooks.score(meta.play(meta.inner, Candidate(prompt), tasks, (0,)), ()))


def _evaluate_run(
    env: Witness, reflector: Reflector, job: Job, seed: int, judge: Judge | None, row: Any
) -> dict[str, Any]:
    """One run, and what choosing among its prompts on the validation tasks would have given."""
    task = f"{job.type}:{job.run}"
    if job.reflector == "best_of":
        assert judge is not None
        reflector = _best_of(reflector, judge, row.best_of)
    record = play_run(env, reflector, task, seed)
    if judge is None:
        return record
    meta: Any = env.unwrapped
    best, best_score = None, -math.inf
    for n, turn in enumerate(record["turns"]):
        turn["validation"] = judge.score(turn["prompt"])
        if turn["validation"] > best_score:
            best, best_score = n, turn["validation"]
        turn["selected"] = best
    fresh = [(meta.inner.find(id), n) for id, n in meta.fresh()]
    value: dict[str | None, float] = {}
    for turn in record["turns"]:
        prompt = record["turns"][turn["selected"]]["prompt"]
        if prompt not in value:
            batch = meta.play(meta.inner, Candidate(prompt), fresh, (seed, job.run, 1))
            value[prompt] = float(meta.hooks.score(batch, ()))
        turn["selected_score"] = value[prompt]
    return record


def _best_of(reflector: Reflector, judge: Judge, count: int) -> Reflector:
    """Writes `count` prompts to the first transcript, and keeps the best on the validation tasks."""

    def chat(env: Witness, seed: int) -> Callable[[Sequence[Message]], Message | str]:
        found: list[tuple[float, str]] = []

        def answer(messages: Sequence[Message]) -> str:
            if not found:
                hooks = env.unwrapped.hooks  # pyright: ignore[reportAttributeAccessIssue]
                for n in range(count):
                    session = reflector.chat(env, seed_of(seed, n))
                    reply = session.chat(messages, prefix=reflector.agent.prefix).content
                    session.close()
                    candidate = hooks.read(reflector.agent.parse(reply))
                    found.append((judge.score(candidate.text), reply))
                found.sort(key=lambda x: -x[0])
            return found[0][1]

        return answer

    return dataclasses.replace(reflector, chat=chat)


# ---------------------------------------------------------------- commands


def command(arguments: Sequence[str]) -> int:
    """`metagym ict collect|eval`; returns the exit code."""
    parser = argparse.ArgumentParser(
        "metagym ict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Who can write the prompts:\n" + "".join(f"  {n:14s} {t}\n" for n, t in REFLECTORS.items()),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a Python file with get_config(), or a name that comes along"
    )
    parser.add_argument("what", choices=("collect", "eval"))
    parser.add_argument(
        "--workdir", metavar="DIR", type=Path, help="the run whose newest checkpoint is the trained reflector"
    )
    parser.add_argument("--out", metavar="PATH", type=Path, help="collect: the file; eval: the folder")
    options, config = config_lib.parse(arguments, parser)
    if options.what == "collect":
        collect(config, options.out or Path(config.ict.data), options.workdir)
        return 0
    folder = options.out or (options.workdir / "ict" if options.workdir else Path("runs") / "ict")
    evaluate(config, folder, options.workdir)
    return 0
