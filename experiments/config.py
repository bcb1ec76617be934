"""Configs: what a config holds, and how a file and the command line make one.

A config file is a Python file with `get_config()`, which takes `base()` and says what is different. `base()`
is locked: a field that it does not have can't be set, in a file or on the command line. ConfigDicts end here
and in train.py; below, everything takes plain arguments.
"""

import argparse
import copy
import dataclasses
import itertools
import json
import math
import re
import runpy
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from absl import flags
from ml_collections import ConfigDict, config_flags

from metagym.errors import InputError, MetaGymError, UnknownNameError
from metagym.rl.metrics import write_whole

Config: TypeAlias = Any  # a ConfigDict; its fields have no static types

CONFIGS = Path(__file__).parent / "configs"
SECRET = re.compile(r"token$|secret|password|passwd|api_?key|credential", re.IGNORECASE)
FIELD = re.compile(r"--?(no)?config\.([^=]*)")  # what an argument sets
HIDDEN = "<secret, not recorded>"
# Mappings that a config file fills with names of its own.
OPEN = (
    *("world.kwargs", "agent.args", "algorithm.args", "penalties", "phases", "stop_rules", "evaluate"),
    *("actor.agent.args", "ict.world_kwargs", "ict.transcript", "ict.evaluate"),
)
POSITIVE = (
    "steps",
    "group_size",
    "groups_per_step",
    "max_workers",
    "rollout.branch_points",
    "sampling.max_tokens",
    "sampling.context",
    "batch.rows",
    "batch.length",
    "batch.minibatches",
    "engine.slots",
    "engine.page_size",
    *("sglang.servers", "sglang.timeout_s", "sglang.start_s"),
    "model.chunk",
    "batch.align",
    "checkpoints_kept",
    "max_distance",
    "optimizer.clip_norm",
    *("ict.k", "ict.meta_turns", "ict.runs", "ict.max_prompt"),
    *("actor.max_tokens", "actor.context", "actor.slots", "actor.top_p"),
)
NOT_NEGATIVE = (
    "seed",
    "curriculum.at_least",
    "curriculum.at_most",
    "engine.context",
    "retries",
    "rollout.staleness",
    "rollout.refill",
    "rollout.branches",
    "agent.max_turns",
    "sampling.token_budget",
    "engine.num_pages",
    *("sglang.retries", "sglang.restarts"),
    "model.lora_rank",
    "model.yarn",
    "checkpoint_every",
    "evaluate_every",
    "optimizer.learning_rate",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    *("ict.temperature", "ict.valid_weight", "actor.temperature", "actor.max_turns", "actor.timeout_s"),
)
# What a phase may change; the rest is the run's.
PHASE = (
    *("algorithm", "penalties", "curriculum", "optimizer", "batch", "sampling", "agent", "world", "rollout"),
    *("groups_per_step", "group_size", "max_workers", "retries", "episode_timeout_s", "max_distance"),
)
OPTIONS = ("--config", "--workdir", "--resume", "--flagfile", "--help")


def base() -> Config:
    """Every field with its default and its meaning, locked."""
    c: Config = ConfigDict()
    c.seed = 0  # of everything: tasks, worlds, sampling
    c.steps = 10  # training steps

    c.exact = False  # sampler and trainer compute the same bits; sets fields of model, engine and batch; slow

    c.model = ConfigDict()
    c.model.name = (
        "smollm2-135m"  # or a Hugging Face directory, or a hub id; "random": tiny, of random weights
    )
    c.model.chat_template = ""  # the model's own; "plain": the texts joined as they are; or a Jinja file
    c.model.compute_dtype = "float32"  # of products in training; weights, sums and norms are always float32
    c.model.engine_dtype = "float32"  # of weights and cache in the embedded engine
    c.model.chunk = 256  # tokens whose logits exist at the same time
    c.model.memory = 1.0  # GB of intermediate results that the backward pass does not compute again
    c.model.offload = False  # the inputs of the layers wait for the backward pass in the host's memory
    c.model.replay = (
        False  # tokens go to the experts that were recorded while sampling; mixtures of experts only
    )
    c.model.lora_rank = 0  # train an adapter of this rank beside frozen weights; 0: train all weights
    c.model.lora_alpha = 32.0  # the adapter counts alpha / rank times
    c.model.lora_targets = ()  # the matrices that get one, q_proj, ..., down_proj; none given: all
    c.model.yarn = 0.0  # positions are stretched by this factor with YaRN; 0: as config.json says
    c.model.tiled = False  # training computes in the deterministic engine's tiles: the same log-probs; slow

    c.world = ConfigDict()
    c.world.id = "metagym/Toy-v0"
    c.world.types = ()  # task types; none: all
    c.world.split = "train"
    c.world.kwargs = ConfigDict()  # what else `gymnasium.make` gets

    c.agent = ConfigDict()
    c.agent.kind = "plain"  # how a reply becomes an action: a function of metagym.agents; or "harness"
    c.agent.args = ConfigDict()  # what that function takes besides what stands here: goal, format, ...
    c.agent.template = ""  # if given, the text of every turn's message, with {observation} in it
    c.agent.system = ""  # empty: no system message at all
    c.agent.prefix = ""  # a begun reply, rendered and not sampled
    c.agent.history = True  # False: every turn is a conversation of its own
    c.agent.max_turns = 0  # replies of an episode; 0: the world's own limit

    c.sampling = ConfigDict()
    c.sampling.max_tokens = (
        16  # of one reply. The rest is the training contract: temperature 1, nothing cut off
    )
    c.sampling.stop = ()  # texts of one token each that end a reply, besides the end of the turn
    c.sampling.context = 512  # tokens of a conversation
    c.sampling.token_budget = 0  # sampled tokens of an episode; 0: no limit

    c.groups_per_step = 8  # tasks a step
    c.group_size = 8  # episodes of each task
    c.max_workers = 64  # episodes at the same time

    c.rollout = ConfigDict()
    c.rollout.staleness = 0  # pushes of weights that episodes may be behind; 0: played while training waits
    c.rollout.in_order = True  # steps take groups in the order of their tasks; False: as they are complete
    c.rollout.refill = 0  # groups of a step that are replaced because their outcomes are equal, at most
    c.rollout.branches = 0  # continuations from each of some turns; for algorithm.args.credit = "prefix"
    c.rollout.branch_points = 2  # these turns, at most

    c.algorithm = ConfigDict()
    c.algorithm.name = "grpo"
    c.algorithm.args = ConfigDict()  # what the algorithm's function takes

    c.penalties = ConfigDict()  # what is added to the reward: length, overlong, format -> their arguments

    c.curriculum = ConfigDict()  # of the tasks that the phases before this one played, those stay that were
    c.curriculum.at_least = 0  # solved so often
    c.curriculum.at_most = 1.0  # and at most this share of the times

    c.optimizer = ConfigDict()  # AdamW
    c.optimizer.learning_rate = 2e-5
    c.optimizer.warmup_steps = 0
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.95
    c.optimizer.eps = 1e-8
    c.optimizer.weight_decay = 0.0
    c.optimizer.clip_norm = 1.0  # of the whole gradient
    c.optimizer.offload = False  # the moments wait in the host's memory between updates

    c.batch = ConfigDict()
    c.batch.rows = 8  # rows of a micro-batch, whose gradient is computed at once
    c.batch.length = 512  # tokens of a row
    c.batch.minibatches = 1  # optimizer updates a step
    c.batch.align = 1  # a segment of a row starts at a multiple of this
    c.batch.share_prompts = False  # a group's prompt is computed once; for rows of some hundred tokens
    c.batch.merge_equal = True  # equal segments are computed once, with their advantages added up

    c.engine = ConfigDict()
    c.engine.kind = "embedded"  # or "sglang"; the embedded one has the fields that follow
    c.engine.slots = 32  # sequences that decode at the same time
    c.engine.page_size = 16  # tokens of a cache page
    c.engine.context = 0  # tokens of a conversation that it can hold; 0: sampling.context of any phase
    c.engine.num_pages = 0  # 0: as many as the slots can need
    c.engine.deterministic = False  # the same seed, the same bits, whatever runs at the same time; slower

    c.sglang = ConfigDict()  # engine.kind = "sglang"; docs/serving.md
    c.sglang.urls = ()  # running servers; none: they are started, on this machine
    c.sglang.router = ""  # an SGLang router in front of them
    c.sglang.servers = 1  # how many are started
    c.sglang.gpus = ()  # CUDA_VISIBLE_DEVICES of each: ("1", "2"); none given: as it is here
    c.sglang.args = ()  # further flags: ("--tp=2", "--mem-fraction-static=0.4")
    c.sglang.python = ""  # an interpreter that has sglang; empty: this one
    c.sglang.push = "disk"  # how weights get there; or "tensor"
    c.sglang.weights_dir = ""  # where they are written; empty: in memory. Shared, if servers are elsewhere
    c.sglang.pause = "retract"  # what a push does to replies: retract, in_place, abort, wait
    c.sglang.retries = 2  # of a reply that was lost
    c.sglang.timeout_s = 600.0  # of a reply
    c.sglang.start_s = 1800.0  # of a server's start
    c.sglang.restarts = 10  # of each

    c.mesh = ConfigDict()  # devices along each axis; -1: all that are left
    c.mesh.data = 1
    c.mesh.fsdp = -1
    c.mesh.tensor = 1
    c.mesh.context = 1
    c.mesh.expert = 1

    c.phases = ConfigDict()  # what changes on the way: a name -> phase(after=step, ...)

    c.retries = 2  # of an episode that failed for a reason that is not the agent's
    c.episode_timeout_s = 0.0  # after which an episode counts as failed, because something hangs; 0: never
    c.max_distance = 1.0  # nats between the sampler's and the trainer's log-prob of a token, or the run stops
    c.stop_rules = ConfigDict()  # when else a run stops: a name -> rule(...)
    c.checkpoint_every = 0  # steps; 0: only at the end
    c.checkpoints_kept = 2  # the newest
    c.record_traces = False  # token ids and log-probs in episodes/*.jsonl
    c.evaluate_every = 0  # steps; 0: only before and after
    c.evaluate = ConfigDict()  # what is measured: a name -> evaluation(...)

    c.actor = ConfigDict()  # the frozen actor of a meta-environment
    c.actor.kind = ""  # engine: a model in the embedded engine; endpoint: OpenAI-compatible; rule_follower
    c.actor.model = ""  # engine: as model.name, empty: the same; endpoint: its name there
    c.actor.chat_template = ""  # engine: as model.chat_template
    c.actor.url = ""  # endpoint: up to and without /chat/completions
    c.actor.key_variable = ""  # endpoint: the environment variable that holds the API key
    c.actor.max_tokens = 16  # of one reply
    c.actor.temperature = 1.0
    c.actor.top_p = 1.0
    c.actor.stop = ()  # engine: as sampling.stop
    c.actor.context = 1024  # engine: tokens of a conversation
    c.actor.slots = 32  # engine: sequences that decode at the same time
    c.actor.max_turns = 0  # replies of an inner episode; 0: the world's own limit
    c.actor.timeout_s = 0.0  # of an inner episode; 0: none
    c.actor.agent = ConfigDict()  # as `agent`, whose `system` is what the reflector writes
    c.actor.agent.kind = "plain"
    c.actor.agent.args = ConfigDict()
    c.actor.agent.template = ""
    c.actor.agent.prefix = ""
    c.actor.agent.history = True

    c.ict = ConfigDict()  # In-Context Training: what `metagym ict` reads; training reads the tuples it wrote
    c.ict.world = "metagym/Toy-v0"  # the inner world
    c.ict.world_kwargs = ConfigDict()
    c.ict.types = ()  # meta-train types; none: all
    c.ict.held_out = ()  # types that must not be trained on
    c.ict.split = "train"  # of the tasks in the tuples
    c.ict.k = 3  # tasks of a batch
    c.ict.meta_turns = 4  # prompts of a run
    c.ict.prompt = ""  # the initial one; empty: no system message at all
    c.ict.mixed = False  # a batch has tasks of all types
    c.ict.transcript = ConfigDict()  # how a batch becomes text: fields of metagym.meta.Transcript
    c.ict.max_prompt = 4000  # characters of a prompt
    c.ict.valid_weight = 0.0  # what an episode is worth besides its return, if every turn had an action
    c.ict.data = "runs/ict/tuples.jsonl"  # where collected tuples are
    c.ict.collect = "untrained"  # who writes the prompts of the collected runs
    c.ict.runs = 1  # collected runs of each type
    c.ict.temperature = 1.0  # of the reflector in `metagym ict`
    c.ict.evaluate = ConfigDict()  # what `metagym ict eval` measures: a name -> ict_evaluation(...)
    c.lock()
    for mapping in (c.world.kwargs, c.agent.args, c.algorithm.args, c.penalties, c.phases):
        mapping.unlock()
    for mapping in (c.stop_rules, c.evaluate):
        mapping.unlock()
    for mapping in (c.actor.agent.args, c.ict.world_kwargs, c.ict.transcript, c.ict.evaluate):
        mapping.unlock()
    return c


def evaluation(
    *,
    types: Sequence[str] = (),
    split: str = "test",
    episodes: int = 100,
    kwargs: Mapping[str, Any] | None = None,
    agent: Mapping[str, Any] | None = None,
    during: bool = False,
    attempts: int = 1,
) -> Config:
    """One row of the final table: one episode of each of the first `episodes` tasks of a split.

    `types` and `kwargs` replace those of `config.world`, `agent` fields of `config.agent`, where given.
    `during`: every `evaluate_every` steps too. `attempts`: so many episodes of each task, which give Pass@k.
    """
    row = {"types": tuple(types), "split": split, "episodes": episodes, "during": during}
    row["attempts"] = attempts
    return ConfigDict({**row, "kwargs": dict(kwargs or {}), "agent": dict(agent or {})})


def ict_evaluation(
    *,
    world: str = "",
    world_kwargs: Mapping[str, Any] | None = None,
    types: Sequence[str] = (),
    split: str = "test",
    k: Sequence[int] = (3,),
    meta_turns: int = 4,
    runs: int = 1,
    held_out: bool = True,
    validation: int = 0,
    validation_split: str = "validation",
    best_of: int = 8,
    reflectors: Sequence[str] = ("initial", "untrained", "trained"),
) -> Config:
    """A row of what `metagym ict eval` measures: `runs` runs of each type for each k and reflector.

    world, world_kwargs: another world than that of training, if given. held_out: the types must not be among
    those of training, where the world is the same. validation: tasks of `validation_split` on which a prompt
    is chosen; 0: none is. best_of: prompts that the reflector "best_of" chooses from.
    """
    row = {"world": world, "types": tuple(types), "split": split, "k": tuple(k), "meta_turns": meta_turns}
    row |= {"runs": runs, "held_out": held_out, "validation": validation, "best_of": best_of}
    row |= {"validation_split": validation_split, "reflectors": tuple(reflectors)}
    return ConfigDict({**row, "world_kwargs": dict(world_kwargs or {})})


def changed(config: Config, **values: Any) -> Config:
    """A copy with other values; `model__name` stands for model.name."""
    made = copy.deepcopy(config)
    for name, value in values.items():
        *path, last = name.split("__")
        section = made
        for part in path:
            section = section[part]
        section[last] = value
    return made


def phase(*, after: int, **changes: Any) -> Config:
    """What changes after so many steps; `algorithm__name` stands for algorithm.name. A mapping is replaced
    whole. Later phases go on from the changes of the earlier ones."""
    return ConfigDict({"after": after, "changes": changes})


@dataclasses.dataclass(frozen=True)
class Phase:
    """The steps after `first` up to `last`, and their config."""

    name: str
    first: int
    last: int
    config: Config


def phases(config: Config) -> list[Phase]:
    """The phases of a run in their order; the first one, "", is the config as it stands.

    Raises InputError for a phase that changes what is the whole run's, or sets a field that does not exist.
    """
    rows = sorted(config.phases.items(), key=lambda item: item[1].after)
    starts = [0, *(row.after for _, row in rows)]
    if any(b <= a for a, b in itertools.pairwise(starts)):
        raise InputError(f"phases begin after different steps, the first after 1 or later; got {starts[1:]}.")
    found = [Phase("", 0, config.steps, config)]
    for name, row in rows:
        if row.after >= config.steps:
            break
        for path in row.changes:
            section = path.split("__")[0]
            if section not in PHASE:
                raise UnknownNameError(f"field that phase {name!r} may change", section, PHASE)
        try:
            now = changed(found[-1].config, **row.changes.to_dict())
        except (AttributeError, KeyError, TypeError) as error:
            raise InputError(f"phase {name!r}: {' '.join(str(error).split())}.") from error
        found[-1] = dataclasses.replace(found[-1], last=row.after)
        found.append(Phase(name, row.after, config.steps, now))
    return found


def rule(metric: str, *, low: float = -math.inf, high: float = math.inf, steps: int = 1) -> Config:
    """A rule of `stop_rules`: the run stops when the metric was outside of [low, high] in so many steps in a
    row."""
    return ConfigDict({"metric": metric, "low": float(low), "high": float(high), "steps": steps})


def fields(config: Config, prefix: str = "") -> dict[str, Any]:
    """Every leaf by its dotted path."""
    found = {}
    for name, value in config.items():
        path = f"{prefix}{name}"
        found |= fields(value, f"{path}.") if isinstance(value, Mapping | ConfigDict) else {path: value}
    return found


def public(config: Config) -> dict[str, Any]:
    """The config as plain data for config.json. Values under names that look like secrets are left out."""

    def clean(value: Any) -> Any:
        if isinstance(value, ConfigDict | Mapping):
            return {k: HIDDEN if SECRET.search(k) and v is not None else clean(v) for k, v in value.items()}
        return [clean(v) for v in value] if isinstance(value, list | tuple) else value

    return clean(config)


def write(config: Config, workdir: Path) -> None:
    write_whole(workdir / "config.json", json.dumps(public(config), indent=2) + "\n")


def available() -> dict[str, str]:
    """The config files that come along: name -> first line of its docstring."""
    found = {}
    for path in sorted(CONFIGS.glob("[!_]*.py")):
        head = re.match(r'\s*"""(.*)', path.read_text())
        found[path.stem] = head[1].rstrip('"') if head else ""
    return found


def load(file: str) -> Config:
    """The config that a file makes. FILE is a path, or the name of a file in experiments/configs/.

    Raises InputError, with the line, for whatever goes wrong in the file.
    """
    path = next((p for p in (Path(file), CONFIGS / f"{file}.py") if p.is_file()), None)
    if path is None:
        known = [f"experiments/configs/{name}.py" if "/" in file else name for name in available()]
        raise UnknownNameError("config file", file, known)
    try:
        config = runpy.run_path(str(path))["get_config"]()
    except KeyError as error:
        if error.args != ("get_config",):
            raise _in_file(path, error) from error
        raise InputError(f"{path} has no function get_config().") from error
    except MetaGymError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:  # it is the user's code: anything may come
        raise _in_file(path, error) from error
    if not isinstance(config, ConfigDict):
        raise InputError(f"{path}: get_config() must return a ConfigDict, got {type(config).__name__}.")
    return config


def _in_file(path: Path, error: Exception) -> InputError:
    """The error of a config file, with its line in the file; a wrong field name with near matches."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    where = f"{path}, line {error.lineno if isinstance(error, SyntaxError) else (lines or [0])[-1]}"
    what = " ".join(str(error).split()).replace("\\'", "'")
    return InputError(f"{where}: {type(error).__name__}: {what}. Fields are listed in experiments/config.py.")


def override(config: Config, arguments: Sequence[str], options: Sequence[str] = OPTIONS) -> Config:
    """Sets fields as `--config.path.to.field=value` says, with ml_collections' config_flags; in place.

    `--flagfile=FILE` stands for the lines of FILE. `options`: what an unknown one could have been. Raises
    InputError for an unknown field or a wrong type.
    """
    values = flags.FlagValues()
    try:
        arguments = values.read_flags_from_files(list(arguments), force_gnu=True)
        _check_options(arguments, options)
        for argument in arguments:
            _check_name(config, argument)
        config_flags.DEFINE_config_dict(
            "config", config, flag_values=values, sys_argv=["metagym", *arguments]
        )
        left = values(["metagym", *arguments])[1:]
    except (flags.Error, TypeError, ValueError, SyntaxError) as error:
        raise InputError(f"{' '.join(str(error).split())}.") from error
    if left:
        raise InputError(
            f"unexpected argument {left[0]!r}. A field is set with --config.path.to.field=value."
        )
    return config


def _check_options(arguments: Sequence[str], known: Sequence[str]) -> None:
    """Raises UnknownNameError for an argument that looks like an option and sets no field."""
    for argument in arguments:
        if argument.startswith("-") and not FIELD.match(argument):
            raise UnknownNameError("option", argument.split("=")[0], [*known, "--config.FIELD"])


def _check_name(config: Config, argument: str) -> None:
    """Raises UnknownNameError if an argument sets something that is not a field of the config."""
    if not (match := FIELD.match(argument)):
        return
    path, known = match[2], fields(config)
    if path in known or path in OPEN or any(name.startswith(f"{path}.") for name in known):
        return
    owner = next((o for o in OPEN if path.startswith(f"{o}.")), None)
    hint = f"Other names in {owner}: set it whole, --config.{owner}=\"{{'name': value}}\"." if owner else ""
    raise UnknownNameError("config field", path, known, hint)


def check(config: Config) -> None:
    """Raises InputError if the config lacks a field of `base()`, has one more, or a value can't be right."""
    known, got = fields(base()), fields(config)
    for path in got:
        if path not in known and not path.startswith(tuple(f"{o}." for o in OPEN)):
            raise UnknownNameError("config field", path, known, "Start from base() in experiments/config.py.")
    for path in known:
        if path not in got and path not in OPEN:
            raise InputError(f"the config has no field {path!r}. Start from base() in experiments/config.py.")
    for path, value in got.items():
        if isinstance(value, list | tuple) and any(isinstance(v, Mapping | ConfigDict) for v in value):
            raise InputError(
                f"config field {path!r} is a list of dicts: one run takes one value of each field. "
                "For a sweep, start a run for each."
            )
    for path in POSITIVE:
        if not got[path] > 0:
            raise InputError(f"config field {path!r} must be positive, got {got[path]!r}.")
    for path in NOT_NEGATIVE:
        if not got[path] >= 0:
            raise InputError(f"config field {path!r} must not be negative, got {got[path]!r}.")
    for name, row in config.phases.items():
        if not isinstance(row, ConfigDict) or set(row) != {"after", "changes"}:
            raise InputError(
                f"config field 'phases.{name}' must be made by phase(...) in experiments/config.py."
            )
    for later in phases(config)[1:]:
        alone = changed(later.config, phases=ConfigDict())
        try:
            check(alone)
        except InputError as error:
            raise InputError(f"phase {later.name!r}: {error}") from None
    for name, row in config.ict.evaluate.items():
        if not isinstance(row, ConfigDict) or set(row) != set(ict_evaluation()):
            raise InputError(
                f"config field 'ict.evaluate.{name}' must be made by ict_evaluation(...) in "
                "experiments/config.py."
            )
    for name, row in config.stop_rules.items():
        if not isinstance(row, ConfigDict) or set(row) != set(rule("")):
            raise InputError(
                f"config field 'stop_rules.{name}' must be made by rule(...) in experiments/config.py."
            )
    for name, row in config.evaluate.items():
        if not isinstance(row, ConfigDict) or set(row) != set(evaluation()):
            raise InputError(
                f"config field 'evaluate.{name}' must be made by evaluation(...) in experiments/config.py."
            )
        for field in ("episodes", "attempts"):
            if not (count := got[f"evaluate.{name}.{field}"]) > 0:
                raise InputError(f"config field 'evaluate.{name}.{field}' must be positive, got {count!r}.")


def parse(arguments: Sequence[str], parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Config]:
    """The options that `parser` knows (`--config=FILE` among them), and the config with its overrides.

    Raises InputError for what is wrong in any of it: it names the field and what it could have been.
    """
    options, rest = parser.parse_known_args(list(arguments))
    known = [*re.findall(r"--[\w-]+", parser.format_usage()), "--flagfile", "--help"]
    if not options.config:
        _check_options([a for a in rest if not re.match("--?flagfile(=|$)", a)], known)
        raise InputError(f"no config given: --config=FILE. Known: {', '.join(available())}.")
    config = override(load(options.config), rest, known)
    if config.get("exact"):
        make_exact(config)
    check(config)
    return options, config


def make_exact(config: Config) -> None:
    """Sets what exact mode needs, in place; see `exact.py`."""
    align, page = config.batch.align, config.engine.page_size
    config.engine.deterministic = config.model.tiled = True
    config.model.compute_dtype = config.model.engine_dtype = "float32"
    config.batch.align = math.lcm(align, page)
