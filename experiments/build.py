"""From a config to the parts of a run: small functions, each reads its own section of the config.

Whatever a config can get wrong is an InputError here, before anything is trained.
"""

import dataclasses
import functools
import importlib.util
import inspect
import json
import logging
import math
import queue
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, get_args

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

import metagym.agents
from metagym.episode import Agent, run
from metagym.errors import InputError, MetaGymError, UnknownNameError
from metagym.experiments import config as config_lib
from metagym.experiments.config import Config
from metagym.models import (
    EXACT_ALIGNMENT,
    Llama,
    Lora,
    ModelConfig,
    ModelError,
    load,
    make_mesh,
    make_policy,
    make_tiled_policy,
    resolve,
    save,
    stretched,
    trainable,
)
from metagym.models.config import TARGETS
from metagym.models.shapes import SHAPES
from metagym.models.sharding import AXES
from metagym.prefix import branches
from metagym.protocols import Backend
from metagym.proxy.backends.embedded import EmbeddedBackend, Tiles
from metagym.proxy.backends.sglang import Push, SGLangBackend
from metagym.proxy.backends.sglang_remote import Pause
from metagym.proxy.backends.sglang_server import SGLangProcess
from metagym.proxy.render import Renderer
from metagym.proxy.session import Session
from metagym.rl import advantages, algorithms, credit, losses, shaping
from metagym.rl.health import Rule
from metagym.rl.metrics import read_jsonl
from metagym.rl.rollouts import Episode, Request, TaskStream
from metagym.rl.shaping import Penalty
from metagym.rl.train_step import Policy, make_optimizer
from metagym.rl.types import Algorithm, Reduction
from metagym.types import Branch, Sampling, StopReason, Task, Trajectory

log = logging.getLogger("metagym.build")
AGENTS = {name: getattr(metagym.agents, name) for name in metagym.agents.__all__}
ALGORITHMS = {
    name: function
    for name, function in vars(algorithms).items()
    if inspect.isfunction(function) and function.__module__ == algorithms.__name__ and name[0] != "_"
}
# What an algorithm's arguments may name.
TERMS = {
    "kl": {"k1": losses.k1, "k2": losses.k2, "k3": losses.k3},
    "correction": {
        "tis": losses.truncated_importance,
        "icepop": losses.icepop,
        "sequence_tis": losses.sequence_importance,
        "sequence_mask": losses.sequence_mask,
        "off_policy_mask": losses.off_policy_mask,
    },
    "credit": {"turn": advantages.by_turn, "step": advantages.by_step, "prefix": credit.by_prefix},
    "select": {"complete": shaping.complete, "successes": shaping.successes},
}
PENALTIES = {
    "length": shaping.length_penalty,
    "overlong": shaping.overlong_penalty,
    "format": shaping.format_penalty,
}
CHOICES = {"reduction": get_args(Reduction), "kl_in": ("loss", "reward")}
MAX_CURRICULUM = 1_000_000
DTYPES = ("float32", "bfloat16")
ENGINES = ("embedded", "sglang")
Engine: TypeAlias = EmbeddedBackend | SGLangBackend


def call(what: str, function: Callable[..., Any], kwargs: Mapping[str, Any], more: Iterable[str] = ()) -> Any:
    """Calls a function with a mapping of the config. Raises InputError for a name that neither it takes nor
    `more` has."""
    _check_names(what, function, kwargs, more)
    try:
        return function(**kwargs)
    except TypeError as error:  # a missing argument, or one of a wrong type
        raise InputError(f"{what}: {error}") from error


def _check_names(
    what: str, function: Callable[..., Any], given: Mapping[str, Any], more: Iterable[str] = ()
) -> None:
    parameters = inspect.signature(function).parameters.values()
    known = [*(p.name for p in parameters if p.kind != p.VAR_KEYWORD), *more]
    for name in given:
        if name not in known:
            raise UnknownNameError(f"argument of {what}", name, known)


def named(kind: str, value: Any, table: Mapping[str, Callable[..., Any]]) -> list[Callable[..., Any]]:
    """The functions that a config names: one name, or a mapping from names to keyword arguments.

    Raises InputError for a name that is not in the table, for an argument that its function does not take,
    and for one that it needs.
    """
    found = []
    for name, given in ({value: {}} if isinstance(value, str) else value).items():
        function = pick(kind, name, table)
        parameters = inspect.signature(function).parameters.values()
        takes = [p for p in parameters if p.kind == p.KEYWORD_ONLY]
        for argument in given:
            if argument not in {p.name for p in takes}:
                raise UnknownNameError(f"argument of {kind} {name}", argument, [p.name for p in takes])
        missing = [p.name for p in takes if p.default is p.empty and p.name not in given]
        if missing:
            raise InputError(f"{kind} {name} needs {missing[0]!r}: {{{name!r}: {{{missing[0]!r}: ...}}}}")
        found.append(functools.partial(function, **given) if given else function)
    return found


def pick(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    if name not in table:
        raise UnknownNameError(kind, name, table)
    return table[name]


def dtype(name: str) -> Any:
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, DTYPES)
    return jnp.dtype(name)


def plain(value: Any) -> dict[str, Any]:
    """A section of a config as a dict of plain values."""
    return value.to_dict()


def build_mesh(config: Config, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a config: as many devices as its axes need, all of them where one axis is -1."""
    shape = [config.mesh[name] for name in AXES]
    wanted = math.prod(shape)
    try:
        devices = jax.devices() if devices is None else devices
        return make_mesh(shape, devices=devices[:wanted] if wanted > 0 else devices)
    except ValueError as error:
        raise InputError(f"config.mesh: {error}.") from error


def model_config(config: Config) -> ModelConfig:
    """The shape of a config's model, without its weights: of a published model, or of a directory."""
    try:
        if config.model.name in SHAPES:
            shape = ModelConfig.from_dict(SHAPES[config.model.name], config.model.name)
        else:
            shape = ModelConfig.from_file(resolve(config.model.name) / "config.json")
    except ModelError as error:
        raise InputError(f"config.model.name = {config.model.name!r}: {error}") from error
    return dataclasses.replace(stretched(shape, config.model.yarn), lora=build_lora(config))


def build_lora(config: Config) -> Lora | None:
    """The adapter that a config trains; None: it trains all weights."""
    m = config.model
    if not m.lora_rank:
        return None
    return Lora(m.lora_rank, m.lora_alpha, tuple(m.lora_targets) or TARGETS)


def build_model(config: Config, mesh: Mesh, workdir: Path) -> tuple[Llama, Path]:
    """The model, and the folder with its tokenizer and configuration."""
    try:
        if config.model.name == "random":
            directory = random_model(workdir / "random_model", config.seed)
            return load(str(directory), mesh=mesh, lora=build_lora(config))[0], directory
        model, directory = load(config.model.name, mesh=mesh, yarn=config.model.yarn, lora=build_lora(config))
        return model, Path(directory)
    except (ModelError, FileNotFoundError) as error:
        raise InputError(f"config.model.name = {config.model.name!r}: {error}") from error


def random_model(directory: Path, seed: int, **fields: Any) -> Path:
    """Writes a tiny model of random weights with a tokenizer of bytes and a ChatML template: a Llama, unless
    `fields` of ModelConfig say otherwise."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tiny: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
    }
    shape = ModelConfig(**{**tiny, **fields})
    shutil.rmtree(directory, ignore_errors=True)
    save(Llama(shape, seed=seed), directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    about = {"eos_token": "<|im_end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return directory


def build_renderer(config: Config, directory: Path) -> Renderer:
    return Renderer.from_dir(directory, config.model.chat_template or None)


def engine_context(config: Config) -> int:
    """Tokens of the longest conversation that the engine holds: those of this phase, and of later ones."""
    return config.engine.context or max(p.config.sampling.context for p in config_lib.phases(config))


def build_backend(config: Config, model: Llama) -> EmbeddedBackend:
    return EmbeddedBackend(
        model,
        slots=config.engine.slots,
        context=engine_context(config),
        page_size=config.engine.page_size,
        num_pages=config.engine.num_pages or None,
        seed=config.seed,
        dtype=dtype(config.model.engine_dtype),
        deterministic=config.engine.deterministic,
    )


def build_engine(config: Config, model: Llama, directory: Path, workdir: Path) -> Engine:
    """What samples in training and evaluation. Logs of servers that it starts go to `workdir`."""
    kind = config.engine.kind
    if kind not in ENGINES:
        raise UnknownNameError("config.engine.kind", kind, ENGINES)
    if kind == "embedded":
        return build_backend(config, model)
    s = config.sglang
    for name, given, known in (("push", s.push, get_args(Push)), ("pause", s.pause, get_args(Pause))):
        if given not in known:
            raise UnknownNameError(f"config.sglang.{name}", given, known)
    return SGLangBackend(
        s.urls or sglang_servers(directory, workdir, s.servers, s.args, s.gpus, s.python),
        directory,
        model=model,
        router=s.router,
        context=engine_context(config),
        push=s.push,
        pause=s.pause,
        weights_dir=s.weights_dir or None,
        dtype=dtype(config.model.engine_dtype),
        routing=config.model.replay,
        retries=s.retries,
        timeout_s=s.timeout_s,
        start_s=s.start_s,
        restarts=s.restarts,
        seed=config.seed,
    )


def sglang_servers(
    directory: Path, workdir: Path, count: int, args: Sequence[str], gpus: Sequence[str], python: str
) -> list[SGLangProcess]:
    """Servers of the model in `directory`, to be started; their output goes to `workdir`."""
    if gpus and len(gpus) != count:
        raise InputError(
            f"{count} SGLang servers need as many entries that name their GPUs; got {list(gpus)}"
        )
    if not python and importlib.util.find_spec("sglang") is None:
        raise InputError(
            "SGLang is not installed beside MetaGym, nor has it to be: make it an environment of its own, "
            "and name that one's interpreter with config.sglang.python or --sglang-python (docs/serving.md)."
        )
    return [
        SGLangProcess(
            directory,
            workdir / f"sglang-{i}.log",
            args=args,
            gpus=gpus[i] if gpus else None,
            python=python,
        )
        for i in range(count)
    ]


def build_policy(config: Config, mesh: Mesh) -> Callable[[Any], Policy]:
    """A function from a model's graphdef to the model as training computes it. Raises InputError for tiles
    without an engine that has the same."""
    compute_dtype = dtype(config.model.compute_dtype)
    parts, length = config.mesh.context, config.batch.length
    if parts > 1 and length % (step := 2 * parts * EXACT_ALIGNMENT):
        raise InputError(
            f"config.mesh.context splits rows over {parts} devices: config.batch.length must be a multiple "
            f"of {step}, got {length}."
        )
    if config.model.replay and (config.model.name == "random" or not model_config(config).num_experts):
        raise InputError("config.model.replay is for mixtures of experts; this model is dense.")
    if config.engine.kind != "embedded" and (config.model.tiled or config.engine.deterministic):
        raise InputError("only the embedded engine computes as the trainer does, tile by tile.")
    if not config.model.tiled:
        return functools.partial(
            make_policy,
            compute_dtype=compute_dtype,
            chunk=config.model.chunk,
            memory=int(config.model.memory * 1e9),
            offload=config.model.offload,
            replay=config.model.replay,
            trees=config.batch.share_prompts,
            mesh=mesh,
        )
    page_size, context = config.engine.page_size, engine_context(config)
    needs = {
        "config.engine.deterministic": config.engine.deterministic,
        "the same compute_dtype and engine_dtype": config.model.compute_dtype == config.model.engine_dtype,
        "a mesh of one device": mesh.size == 1,
        "config.batch.share_prompts to be off": not config.batch.share_prompts,
        f"config.batch.align to be a multiple of config.engine.page_size, {page_size}": (
            config.batch.align % page_size == 0
        ),
    }
    for what, given in needs.items():
        if not given:
            raise InputError(f"config.model.tiled needs {what}.")
    return functools.partial(
        make_tiled_policy,
        rows=Tiles.fixed(config.engine.slots, context, page_size).decode[0],
        page_size=page_size,
        context=context,
        compute_dtype=compute_dtype,
    )


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm; its functions go by the names in TERMS, several corrections are multiplied."""
    name, given = config.algorithm.name, plain(config.algorithm.args)
    for argument, table in TERMS.items():
        if given.get(argument) is not None:
            found = named(argument, given[argument], table)
            if len(found) != 1 and argument != "correction":
                raise InputError(f"config.algorithm.args.{argument} takes one name, got {len(found)}.")
            given[argument] = found[0] if len(found) == 1 else losses.product(*found)
    for argument, known in CHOICES.items():
        if argument in given and given[argument] not in known:
            raise UnknownNameError(argument, given[argument], known)
    function = pick("algorithm", name, ALGORITHMS)
    return call(f"algorithm {name}", function, given, algorithms.Terms.__annotations__)


def build_penalties(config: Config) -> list[Penalty]:
    """What is added to the reward of a training episode."""
    return named("penalty", plain(config.penalties), PENALTIES)


def build_optimizer(config: Config) -> optax.GradientTransformation:
    o = config.optimizer
    # A schedule in any case, so that the optimizer's state has one structure in all phases.
    rate = (
        optax.linear_schedule(0.0, o.learning_rate, o.warmup_steps)
        if o.warmup_steps
        else (optax.constant_schedule(o.learning_rate))
    )
    optimizer = make_optimizer(
        rate, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, max_norm=o.clip_norm
    )
    if not config.model.lora_rank:
        return optimizer

    def labels(params: Any) -> Any:
        return jax.tree.map(lambda own: "adapter" if own else "frozen", trainable(params))

    return optax.multi_transform({"adapter": optimizer, "frozen": optax.set_to_zero()}, labels)


def build_agent(config: Config) -> Agent:
    a = config.agent
    given = {"system": a.system or None, "prefix": a.prefix, "history": a.history, **plain(a.args)}
    agent = call(f"agent {a.kind}", pick("agent", a.kind, AGENTS), given)
    if not a.template:
        return agent
    if "{observation}" not in a.template:
        raise InputError(f"config.agent.template has no {{observation}} in it: {a.template!r}.")
    template = a.template

    def prompt(observation: str, info: Mapping[str, Any], turn: int) -> str:
        return template.replace("{observation}", observation)

    return dataclasses.replace(agent, prompt=prompt)


def build_env(config: Config, **override: Any) -> gym.Env[str, str]:
    """The world of a config; `override` replaces arguments of `gymnasium.make`. Raises InputError."""
    world = config.world
    kwargs = {"split": world.split, "types": world.types or None, **plain(world.kwargs), **override}
    try:
        return gym.make(world.id, **kwargs)
    except MetaGymError:
        raise
    except gym.error.UnregisteredEnv as error:
        ours = [id for id in gym.registry if id.startswith("metagym/")]
        raise UnknownNameError("env", world.id, ours) from error
    except (TypeError, gym.error.Error) as error:
        raise InputError(f"{world.id}: {error}") from error


def stop_tokens(renderer: Renderer, texts: Iterable[str]) -> tuple[int, ...]:
    """The tokens of texts that end a reply. Raises InputError for a text that is not one token."""
    found = []
    for text in texts:
        ids = renderer.encode_text(text)
        if len(ids) != 1:
            raise InputError(f"a text that ends a reply must be one token; {text!r} is {len(ids)} tokens.")
        found.append(ids[0])
    return tuple(found)


def build_sampling(config: Config, renderer: Renderer) -> Sampling:
    stops = stop_tokens(renderer, config.sampling.stop)
    return Sampling(max_tokens=config.sampling.max_tokens, stop_token_ids=stops)


def build_rules(config: Config) -> list[Rule]:
    return [call(f"stop_rules.{name}", Rule, plain(row)) for name, row in config.stop_rules.items()]


def build_tasks(config: Config, tasks: Sequence[Task], episodes: Path, played: int) -> TaskStream:
    """The tasks of a phase that begins after `played` steps: what its curriculum leaves of them, by the
    records of the steps before in `episodes`."""
    limits = plain(config.curriculum)
    if not played or (limits["at_least"], limits["at_most"]) == (0, 1.0):
        return TaskStream(tasks, seed=config.seed)
    if len(tasks) > MAX_CURRICULUM:
        raise InputError(f"a curriculum chooses among {MAX_CURRICULUM:,} tasks at most; got {len(tasks):,}.")
    counts: dict[str, list[int]] = {}
    for file in sorted(episodes.glob("[0-9]*.jsonl")):
        for record in read_jsonl(file) if int(file.stem) <= played else ():
            if StopReason(record["stop"]).in_loss:
                count = counts.setdefault(record["task"], [0, 0])
                count[0] += record["outcome"] > 0.5
                count[1] += 1
    left = [t for t in tasks if shaping.solvable(*counts.get(t.id, (0, 0)), **limits)]
    log.info("curriculum: %d of %d tasks are left after step %d", len(left), len(tasks), played)
    if not left:
        raise InputError(f"the curriculum leaves none of {len(tasks)} tasks after step {played}: {limits}.")
    return TaskStream(left, seed=config.seed)


class EnvPool:
    """Envs that are made when needed and used again: as many as there are episodes at the same time."""

    def __init__(self, make: Callable[[], gym.Env[str, str]]):
        self._make = make
        self._free: queue.SimpleQueue[gym.Env[str, str]] = queue.SimpleQueue()
        self._all: list[gym.Env[str, str]] = [make()]  # so that a wrong config fails here
        self._free.put(self._all[0])
        self._lock = threading.Lock()

    @property
    def tasks(self) -> Any:
        """The tasks that the world's arguments selected."""
        return self._all[0].get_wrapper_attr("tasks")

    def play(self, play: Callable[[gym.Env[str, str]], Trajectory]) -> Trajectory:
        """Gives an env to a function, and takes it back."""
        try:
            env = self._free.get_nowait()
        except queue.Empty:
            env = self._make()
            with self._lock:
                self._all.append(env)
        try:
            return play(env)
        finally:
            self._free.put(env)

    def close(self) -> None:
        """Closes the envs; a world that is played again starts anew."""
        for env in self._all:
            env.close()


def build_episode(
    config: Config, backend: Backend, renderer: Renderer, agent: Agent, pool: EnvPool, *, training: bool
) -> Episode:
    """Plays one episode through a session of its own; the trajectory comes with its token traces."""
    limit = config.agent.max_turns or None
    penalties = build_penalties(config) if training else []
    given = {
        "sampling": build_sampling(config, renderer),
        "context": config.sampling.context,
        "token_budget": config.sampling.token_budget or None,
        "training": training,
    }

    points, count = (config.rollout.branch_points, config.rollout.branches) if training else (0, 0)
    if count and config.sampling.token_budget:
        raise InputError("config.rollout.branches and config.sampling.token_budget exclude each other.")

    def episode(request: Request) -> Trajectory:
        session = Session(backend, renderer, **given, seed=request.sampling_seed)

        def play(env: gym.Env[str, str]) -> Trajectory:
            settings: dict[str, Any] = {"agent": agent, "max_turns": limit}
            played = run(env, session, request.task, seed=request.seed, **settings)
            played = shaping.shaped(dataclasses.replace(played, traces=session.traces), penalties)
            if not count:
                return played
            found = branches(
                env,
                session,
                played,
                points=points,
                count=count,
                seed=request.sampling_seed,
                calls=lambda: int(session.metrics["calls"]),
                **settings,
            )
            return dataclasses.replace(played, branches=tuple(map(shape, found)))

        def shape(branch: Branch) -> Branch:
            """With its penalties; those for tokens see all that the continuation says."""
            own = [
                dataclasses.replace(t, trainable=t.sampled)
                for t in session.traces
                if branch.calls[0] <= t.turn[-1] < branch.calls[1]
            ]
            whole = shaping.shaped(dataclasses.replace(branch.trajectory, traces=tuple(own)), penalties)
            return dataclasses.replace(branch, trajectory=dataclasses.replace(whole, traces=()))

        try:
            played = pool.play(play)
        finally:
            session.close()
        failed = [c for b in played.branches if not b.trajectory.stop.in_loss for c in range(*b.calls)]
        traces = [
            dataclasses.replace(t, trainable=t.trainable & ~np.isin(t.turn, failed)) if failed else t
            for t in session.traces
        ]
        more = {"continuations": float(len(played.branches))} if count else {}
        metrics = {**played.metrics, **session.metrics, **more}
        return dataclasses.replace(played, traces=tuple(traces), metrics=metrics)

    return episode
