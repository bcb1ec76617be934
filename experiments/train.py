"""`metagym train` and `metagym eval`: a config becomes a run directory.

A run directory holds config.json, metrics.jsonl, TensorBoard events, episodes/*.jsonl, checkpoints/,
results.json, and at the end learning_curve.png.
"""

import argparse
import contextlib
import functools
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from metagym.envs.swe import datasets
from metagym.episode import Agent
from metagym.errors import InputError
from metagym.experiments import build, exact, harness, ict, results
from metagym.experiments import config as config_lib
from metagym.experiments.config import Config
from metagym.experiments.results import Score
from metagym.experiments.tracking import Console, Together
from metagym.rl import checkpoint, loop
from metagym.rl.health import matmul_rate
from metagym.rl.metrics import EpisodeWriter, TensorBoardTracker, read_jsonl
from metagym.rl.rollouts import Episode, Request, TaskStream, ThreadExecutor, collect
from metagym.rl.train_step import Policy, init_state
from metagym.rl.types import Algorithm, TrainState
from metagym.types import Group, Task, Trajectory

# May differ between a run and its resumption: what is left is what the checkpoint was made with.
FREE_ON_RESUME = (
    "steps",
    "checkpoint_every",
    "evaluate",
    "max_workers",
    "checkpoints_kept",
    "retries",
    "episode_timeout_s",
    "max_distance",
    "stop_rules",
    "record_traces",
    "mesh",
    "engine",
    "sglang",
)
SHOWN = {
    "outcome/mean": "success",
    "reward/mean": "reward",
    "policy/entropy": "entropy",
    "sampler/max": "sampler distance",
    "time/collect_s": "collect s",
    "time/update_s": "update s",
}


@dataclass(frozen=True)
class Parts:
    """All that a run is made of, built from its config."""

    mesh: Mesh
    policy: Policy
    state: TrainState  # before training
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    reference: Any  # parameters that a KL term is measured against; None without one
    backend: build.Engine
    pool: build.EnvPool
    episode: Episode
    evaluations: dict[str, "Evaluation"]


@dataclass(frozen=True)
class Evaluation:
    """One row of the table: these tasks, each so many times."""

    tasks: Sequence[Task]
    episode: Episode
    during: bool
    attempts: int

    def run(
        self, config: Config, version: int, on_end: Callable[[Request, Trajectory], None] | None = None
    ) -> tuple[Score, Sequence[Group]]:
        """Plays every task, at temperature 1, with the same seeds whenever it is called."""
        played = collect(
            self.episode,
            self.tasks,
            self.attempts,
            seed=config.seed,
            step=0,
            version=version,
            executor=ThreadExecutor(config.max_workers),
            retries=config.retries,
            timeout_s=config.episode_timeout_s or None,
            on_end=on_end,
        )
        groups = [group.trajectories for group in played.groups]
        turns = [len(t.turns) for each in groups for t in each]
        failed = self.attempts * len(self.tasks) - len(turns)
        tokens = results.sources(t for each in groups for t in each)
        return Score.of([[t.outcome for t in each] for each in groups], turns, failed, tokens), played.groups


@contextlib.contextmanager
def parts(config: Config, scratch: Path, last: Config | None = None) -> Iterator[Parts]:
    """Builds everything, cheap things first, and closes what has to be closed.

    Evaluations are made as in the `last` phase of the run, so that they are the same from first to last.
    A model of random weights is written to `scratch`. Raises InputError for whatever can't work.
    """
    algorithm, optimizer = build.build_algorithm(config), build.build_optimizer(config)
    final: Config = config if last is None else last
    player = harness.player(config)
    mesh = build.build_mesh(config)
    make_policy = build.build_policy(config, mesh)
    with contextlib.ExitStack() as stack:
        more = ict.world_arguments(config, stack, scratch)
        place = harness.Place(stack)

        def pool(config: Config, player: harness.Foreign | Agent, **override: Any) -> build.EnvPool:
            own = place.world(player) if isinstance(player, harness.Foreign) else {}
            made = build.EnvPool(lambda: build.build_env(config, **{**more, **own, **override}))
            stack.callback(made.close)
            return made

        train_pool = pool(config, player)
        pools, players, rows = {}, {}, {}
        for name, row in config.evaluate.items():
            rows[name] = config_lib.changed(final, **{f"agent__{k}": v for k, v in row.agent.items()})
            players[name] = harness.player(rows[name])
            types = row.types or final.world.types or None
            own = {"split": row.split, "types": types, **build.plain(row.kwargs)}
            pools[name] = pool(rows[name], players[name], **own)
            if len(pools[name].tasks) < row.episodes:
                raise InputError(
                    f"config.evaluate.{name} asks for {row.episodes} episodes, but its split {row.split!r} "
                    f"has {len(pools[name].tasks)} tasks of these types."
                )
        model, directory = build.build_model(config, mesh, scratch)
        renderer = build.build_renderer(config, directory)
        if config.exact:
            print(exact.cost(config, model), flush=True)
        backend = build.build_engine(config, model, directory, scratch)
        stack.callback(backend.close)

        def episodes(
            config: Config, player: harness.Foreign | Agent, pool: build.EnvPool, training: bool
        ) -> Episode:
            how: dict[str, Any] = {"place": place, "training": training}
            return harness.build_episode(config, player, backend, renderer, pool, **how)

        evaluations = {
            name: Evaluation(
                pools[name].tasks[: row.episodes],
                episodes(rows[name], players[name], pools[name], training=False),
                row.during,
                row.attempts,
            )
            for name, row in config.evaluate.items()
        }
        episode = episodes(config, player, train_pool, training=True)
        graphdef, params = nnx.split(model)
        policy = make_policy(graphdef)
        rng, offload = jax.random.key(config.seed), config.optimizer.offload
        state = init_state(params, optimizer, rng, mesh, offload=offload)
        reference = None if algorithm.kl is None else jax.tree.map(jnp.copy, state.params)
        yield Parts(
            mesh, policy, state, algorithm, optimizer, reference, backend, train_pool, episode, evaluations
        )


def train(config: Config, workdir: Path, *, resume: bool = False, stream: TextIO | None = None) -> None:
    """One run; prints its table. Raises InputError before anything is trained if it can't work, and what
    `metagym.rl.loop.train` raises."""
    start = time.monotonic()
    _check_workdir(config, workdir, resume)
    phases = config_lib.phases(config)
    for phase in phases:  # what is wrong in a later one is told now
        for make in (build.build_algorithm, harness.player, build.build_penalties):
            make(phase.config)
    done = (checkpoint.newest(workdir / "checkpoints") or 0) if resume else 0
    with contextlib.closing(Console(config.steps, SHOWN, stream)) as console:
        curve = results.read(workdir / "results.json") if resume else {}
        for phase in phases:
            if done >= phase.last < config.steps:
                continue  # it is finished
            with parts(phase.config, workdir, phases[-1].config) as p:
                workdir.mkdir(parents=True, exist_ok=True)
                config_lib.write(config, workdir)
                if phase.name:
                    console.write(f"step {max(phase.first, done)}/{config.steps}  phase {phase.name}")
                _train(phase, p, workdir, curve, console, resume=resume or phase.first > 0)
        seconds = time.monotonic() - start
        results.write(curve, workdir / "results.json", seconds=seconds)
        results.plot(curve, _training_success(workdir), workdir / "learning_curve.png", workdir.name)
        console.write(f"\n{results.table(curve)}\n\n{seconds:.0f} s; all of it is in {workdir}")


def _train(
    phase: config_lib.Phase,
    p: Parts,
    workdir: Path,
    curve: dict[int, dict[str, Score]],
    console: Console,
    *,
    resume: bool,
) -> None:
    """One phase of a run."""
    config = phase.config

    def evaluate(step: int) -> dict[str, float]:
        with contextlib.closing(EpisodeWriter(workdir / "episodes", traces=config.record_traces)) as out:

            def write(name: str, request: Request, trajectory: Trajectory) -> None:
                out.write(f"eval-{step:06d}", f"{name}/{request.id}", trajectory, version=request.version)

            played = _scores(p, config, everything=step in (0, config.steps), on_end=write)
        scores = {name: score for name, (score, _) in played.items()}
        for name, score in scores.items():
            console.write(f"step {step}/{config.steps}  {name}: {score}")
        curve[step] = scores
        results.write(curve, workdir / "results.json")
        return {key: value for name, s in scores.items() for key, value in s.metrics(name).items()}

    def tasks() -> TaskStream:
        return build.build_tasks(config, p.pool.tasks, workdir / "episodes", phase.first)

    with contextlib.closing(Together([TensorBoardTracker(workdir), console])) as tracker:
        loop.train(
            policy=p.policy,
            state=p.state,
            algorithm=p.algorithm,
            optimizer=p.optimizer,
            mesh=p.mesh,
            backend=p.backend,
            episode=p.episode,
            tasks=tasks if phase.first else tasks(),
            steps=config.steps,
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            rows=config.batch.rows,
            length=config.batch.length,
            workdir=workdir,
            seed=config.seed,
            minibatches=config.batch.minibatches,
            align=config.batch.align,
            merge_equal=config.batch.merge_equal,
            share_prompts=config.batch.share_prompts,
            reference=p.reference,
            tracker=tracker,
            checkpoint_every=config.checkpoint_every,
            keep=config.checkpoints_kept,
            max_workers=config.max_workers,
            retries=config.retries,
            timeout_s=config.episode_timeout_s or None,
            staleness=config.rollout.staleness,
            in_order=config.rollout.in_order,
            refill=config.rollout.refill,
            evaluate=evaluate if p.evaluations else None,
            evaluate_every=config.evaluate_every or config.steps,
            max_distance=config.max_distance,
            rules=build.build_rules(config),
            peak_flops=matmul_rate(build.dtype(config.model.compute_dtype), devices=p.mesh.devices.flat),
            record_traces=config.record_traces,
            first=phase.first,
            last=phase.last,
            resume=resume,
        )


def _scores(
    p: Parts,
    config: Config,
    *,
    everything: bool,
    on_end: Callable[[str, Request, Trajectory], None] | None = None,
) -> dict[str, tuple[Score, Sequence[Group]]]:
    """Runs the evaluations, or only those that are made during training: scores and episodes. `on_end` gets
    each episode, with the evaluation's name."""
    return {
        name: e.run(config, p.backend.version, on_end and functools.partial(on_end, name))
        for name, e in p.evaluations.items()
        if everything or e.during
    }


def evaluate(config: Config, workdir: Path | None, predictions: Path | None = None) -> results.Curve:
    """Measures the newest checkpoint of a run, or without one the model as it comes; prints the table.

    `predictions` is a folder for SWE-bench predictions files, one for each evaluation and attempt.
    """
    if not config.evaluate:
        raise InputError("the config says nothing under `evaluate`: there is nothing to measure.")
    if workdir is not None and not (workdir / "checkpoints").is_dir():
        raise InputError(f"{workdir} has no checkpoints.")
    config = config_lib.phases(config)[-1].config
    with tempfile.TemporaryDirectory() as scratch, parts(config, Path(scratch)) as p:
        step = 0
        if workdir is not None:
            found = checkpoint.load(workdir / "checkpoints", checkpoint.abstract(p.state))
            if found is None:
                raise InputError(f"{workdir} has no checkpoints.")
            step, state, _ = found
            p.backend.load(state.params, int(state.version))
        played = _scores(p, config, everything=True)
    curve = {step: {name: score for name, (score, _) in played.items()}}
    if predictions is not None:
        for name, (_, groups) in played.items():
            _predict(groups, str(config.model.name), predictions / name)
    if workdir is not None:
        results.write(curve, workdir / "evaluation.json")
    print(f"{results.table(curve)}\n\n{results.token_table(curve[step])}")
    return curve


def _predict(groups: Sequence[Group], model: str, path: Path) -> None:
    """Writes what each attempt changed: PATH.jsonl, PATH-2.jsonl, ..."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(max((len(g.trajectories) for g in groups), default=0)):
        played = [g.trajectories[number] for g in groups if number < len(g.trajectories)]
        file = path.with_name(f"{path.name}-{number + 1}.jsonl" if number else f"{path.name}.jsonl")
        datasets.predictions([(t.task.id, t.patch or b"") for t in played], model, file)


def _training_success(workdir: Path) -> dict[int, float]:
    """Step -> mean outcome of the training episodes, from metrics.jsonl."""
    lines = read_jsonl(workdir / "metrics.jsonl")
    return {line["step"]: line["outcome/mean"] for line in lines if "outcome/mean" in line}


def _check_workdir(config: Config, workdir: Path, resume: bool) -> None:
    """Raises InputError if the folder's run is not to be touched, or is another one than is to be resumed."""
    recorded = workdir / "config.json"
    if workdir.exists() and not workdir.is_dir():
        raise InputError(f"{workdir} is not a folder.")
    if not resume:
        if recorded.exists():
            raise InputError(
                f"{workdir} holds a run already: --resume goes on with it, --workdir names another."
            )
        return
    if not recorded.is_file():
        raise InputError(f"there is no run to resume in {workdir}: it has no config.json.")
    try:
        before = config_lib.fields(json.loads(recorded.read_text()))
    except ValueError as error:
        raise InputError(f"{recorded} is damaged ({error}): the run can't be resumed without it.") from None
    now = config_lib.fields(json.loads(json.dumps(config_lib.public(config))))
    changed = [
        k for k in sorted(before | now) if before.get(k) != now.get(k) and not k.startswith(FREE_ON_RESUME)
    ]
    if changed:
        shown = ", ".join(f"{k} was {before.get(k)!r} and is {now.get(k)!r}" for k in changed[:5])
        raise InputError(
            f"the run in {workdir} was begun with another config: {shown}. "
            f"Only {', '.join(FREE_ON_RESUME)} may change; --workdir=OTHER starts a new run."
        )


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    known = "\n".join(f"  {name:20s} {what}" for name, what in config_lib.available().items())
    parser = argparse.ArgumentParser(
        f"metagym {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"configs that come along (FILE is a path or one of these names):\n{known}\n\n"
        "A field is set with --config.path.to.field=value; experiments/config.py lists them all.\n"
        "--flagfile=FILE stands for such arguments, one a line.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a Python file with get_config(), or a name from below"
    )
    return parser


def train_command(arguments: Sequence[str]) -> int:
    """`metagym train`; returns the exit code."""
    parser = _parser("train", "Trains a model as a config file says, and measures it before and after.")
    parser.add_argument(
        "--workdir", metavar="DIR", type=Path, help="the run directory; default: a new one in runs/"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    options, config = config_lib.parse(arguments, parser)
    if options.resume and options.workdir is None:
        raise InputError("--resume needs --workdir=DIR, the run to go on with.")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("metagym").setLevel(logging.INFO)
    name = f"{Path(options.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    train(config, options.workdir or Path("runs") / name, resume=options.resume)
    return 0


def eval_command(arguments: Sequence[str]) -> int:
    """`metagym eval`; returns the exit code."""
    parser = _parser("eval", "Measures a model as the `evaluate` section of a config says.")
    text = (
        "a run: its newest checkpoint is measured, into its evaluation.json; default: the model as it comes"
    )
    parser.add_argument("--workdir", metavar="DIR", type=Path, help=text)
    text = "write what was changed in worlds of software engineering, as SWE-bench predictions files"
    parser.add_argument("--predictions", metavar="DIR", type=Path, help=text)
    options, config = config_lib.parse(arguments, parser)
    evaluate(config, options.workdir, options.predictions)
    return 0
