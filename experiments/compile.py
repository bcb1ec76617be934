"""`metagym doctor --compile CONFIG --topology v5p:8x8x4`: a training step for TPUs that are elsewhere.

The programs are those that training runs, lowered for the devices of a TPU topology and compiled by libtpu,
with its Pallas kernels and its limits of memory; no TPU is needed. What they take is read from the compiler;
how long they take is its estimate, with the model's FLOPs at the chips' peak beside it.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from metagym.errors import InputError, MissingExtraError, TrainingError


@dataclass(frozen=True)
class Chip:
    """Published numbers of one chip."""

    memory: float  # GB
    peak: float  # TFLOP/s of bf16 products
    links: float  # GB/s to other chips, all links together
    clock: float  # GHz; the peak is that of 8, 4, 8 and 16 products of 128 x 128 in every tick


CHIPS = {
    "v4": Chip(32.0, 275.0, 300.0, 1.05),
    "v5e": Chip(16.0, 197.0, 200.0, 1.5),
    "v5p": Chip(95.0, 459.0, 600.0, 1.75),
    "v6e": Chip(32.0, 918.0, 448.0, 1.75),
}
COLLECTIVE = re.compile(
    r"^\s*(?:ROOT )?%?\S+ = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|"
    r"collective-permute)(?:-start)?\((.*)$"
)
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.-]+)|_computations=\{([^}]*)\}"
)
LOOP = re.compile(r" while\(.*condition=%?([\w.-]+)")
CONSTANT = re.compile(r"^\s*%?([\w.-]+) = s32\[\]\S* constant\((\d+)\)")
BELOW = re.compile(r"^\s*ROOT .* compare\(.*?%?([\w.-]+)\), direction=LT")
GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]|mesh\[([^\]]*)\] \{([^}]*)\})")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
ARRAY = re.compile(r"\b(pred|[subf]\d+|bf16)\[([\d,]*)\]")
BYTES = {"pred": 1, "bf16": 2}


@dataclass(frozen=True)
class Collective:
    """One kind of exchange between chips."""

    kind: str
    shape: str  # of the result, or the largest of several
    bytes: int  # that a chip sends, if the chips lie in a ring
    times: int  # in a run of the program


@dataclass(frozen=True)
class Program:
    """One compiled program, per chip. Memory in bytes; what is donated counts once."""

    name: str
    arguments: int
    outputs: int  # beyond the donated arguments
    temporaries: int
    resident: int  # the rest of the training state, which waits meanwhile
    host: int  # of the host's memory: what is offloaded
    flops: float  # as the compiler counts: a loop's body once, kernels as they say
    cycles: int  # the compiler's estimate of all but kernels and exchange, loops as often as they run
    collectives: tuple["Collective", ...]  # the largest first
    compile_s: float

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs + self.temporaries + self.resident


@dataclass(frozen=True)
class Report:
    topology: str
    chips: int
    tokens: int  # of a step's micro-batch
    parameters: int
    limit: float  # bytes of a chip
    model_flops: float  # of a step, all chips, recomputation not counted
    compute_s: float  # the compiler's cycles
    attention_s: float  # the FLOPs of the attention kernels, recomputation included, at the chips' peak
    exchange_s: float  # what the collectives move, at the speed of a chip's links
    programs: tuple[Program, ...]

    @property
    def peak(self) -> int:
        return max(p.peak for p in self.programs)

    @property
    def seconds(self) -> tuple[float, float]:
        """An estimate of a step: the exchange all hidden behind the computing, and none of it."""
        computing = self.compute_s + self.attention_s
        return max(computing, self.exchange_s), computing + self.exchange_s

    @property
    def mfu(self) -> tuple[float, float]:
        """The share of the chips' peak that the model's FLOPs are of it, in the same two cases."""
        peak = CHIPS[self.topology.partition(":")[0]].peak * 1e12 * self.chips
        best, worst = (self.model_flops / (s * peak) for s in self.seconds)
        return best, worst

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit


def model_flops(c: Any, rows: int, length: int) -> float:
    """FLOPs of forward and backward over full rows of one segment each: 6 for each weight that a token meets
    (the embedding is no product), and causal attention, 12 L^2 / 2 for each head's channel."""
    attention = c.hidden_size * c.head_dim * 2 * (c.num_attention_heads + c.num_key_value_heads)
    if c.num_experts:
        mlp = c.num_experts_per_tok * 3 * c.hidden_size * c.moe_intermediate_size
        mlp += c.num_experts * c.hidden_size
    else:
        mlp = 3 * c.hidden_size * c.intermediate_size
    weights = c.num_hidden_layers * (attention + mlp) + c.vocab_size * c.hidden_size
    return float(rows * length * 6 * weights) + score_flops(c, rows, length)


def score_flops(c: Any, rows: int, length: int) -> float:
    """Those of them that are attention's: two products forward, four backward."""
    return float(rows * length * 6 * length * c.num_attention_heads * c.head_dim * c.num_hidden_layers)


def runs(text: str) -> dict[str, int]:
    """How often each computation of a compiled program runs. A loop up to a constant, as one over layers is,
    runs that often; one whose end is computed counts once."""
    calls: dict[str, list[tuple[str, str]]] = {}  # computation -> (called, condition of the loop or "")
    constants: dict[str, dict[str, int]] = {}
    trips: dict[str, int] = {}  # by condition
    entry = name = ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            name = match[2]
            calls[name], constants[name] = [], {}
            entry = name if match[1] else entry
            continue
        if match := CONSTANT.match(line):
            constants[name][match[1]] = int(match[2])
        elif (match := BELOW.match(line)) and match[1] in constants[name]:
            trips[name] = constants[name][match[1]]
        loop = LOOP.search(line)
        for one, several in CALLED.findall(line):
            for called in (one or several).split(","):
                calls[name].append((called.strip().lstrip("%"), loop[1] if loop else ""))
    total: dict[str, int] = {}

    def visit(name: str, times: int) -> None:
        total[name] = total.get(name, 0) + times
        for called, condition in calls.get(name, ()):
            visit(called, times * trips.get(condition, 1))

    visit(entry, 1)
    return total


def cycles(text: str) -> int:
    """The sum of the compiler's estimates over all that a program runs."""
    times, total, name = runs(text), 0, ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            name = match[2]
        elif (match := CYCLES.search(line)) and int(match[1]) < 1 << 62:  # beyond: it has none
            total += int(match[1]) * times.get(name, 0)
    return total


def _sent(kind: str, size: int, line: str) -> int:
    """Bytes that each of n chips in a ring sends, for a result of `size`."""
    group = GROUPS.search(line)
    n = 0
    if group and group[3]:
        sizes = dict(part.split("=") for part in group[3].split(","))
        n = math.prod(int(sizes[axis.strip()]) for axis in group[4].split(","))
    elif group:
        n = len(group[1].split(",")) if group[1] else int(group[2])
    if kind == "reduce-scatter":
        return size * max(1, n - 1)
    share = (n - 1) / n if n else 1.0
    return int(size * share * (2 if kind == "all-reduce" else 1)) if kind != "collective-permute" else size


def collectives(text: str) -> tuple[Collective, ...]:
    """The collective operations of a compiled program's text, by what they move in all, the most first."""
    times, found, name = runs(text), {}, ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            name = match[2]
        elif match := COLLECTIVE.match(line):
            sizes = []
            for kind, shape in ARRAY.findall(match[1]):
                item = BYTES.get(kind) or int(re.sub(r"\D", "", kind)[:2] or 8) // 8
                sizes.append((item * math.prod(map(int, filter(None, shape.split(",")))), f"{kind}[{shape}]"))
            if sizes and times.get(name, 0):
                largest, shape = max(sizes)
                if f"{match[2]}-start" not in line and len(sizes) > 1:  # several at once
                    largest, shape = sum(size for size, _ in sizes), f"{shape} and {len(sizes) - 1} more"
                key = (match[2], _sent(match[2], largest, line), shape)
                found[key] = found.get(key, 0) + times[name]
    made = [Collective(kind, shape, size, n) for (kind, size, shape), n in found.items()]
    return tuple(sorted(made, key=lambda c: -c.bytes * c.times))


def step_programs(config: Any, devices: Sequence[Any]) -> tuple[Any, dict[str, tuple[Any, tuple[Any, ...]]]]:
    """The mesh of a config's training step over devices, and its programs by name, each with what it takes:
    shapes, with their shardings; there are no weights."""
    import jax
    import numpy as np
    from flax import nnx

    from metagym.experiments import build
    from metagym.models import Decoder, param_shardings
    from metagym.rl.batching import empty_batch
    from metagym.rl.train_step import abstract_state, batch_sharding, make_train_step, state_shardings

    mesh = build.build_mesh(config, devices)
    shape = build.model_config(config)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(shape)))

    def on(x: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.tree.map(on, params, param_shardings(params, mesh))
    optimizer = build.build_optimizer(config)
    state = abstract_state(params, optimizer, mesh, offload=config.optimizer.offload)
    policy = build.build_policy(config, mesh)(graphdef)
    step = make_train_step(policy, build.build_algorithm(config), optimizer, mesh, state_shardings(state))
    rows, length = config.batch.rows, config.batch.length
    batch = empty_batch(1, length, shape.routing_width if config.model.replay else 0)
    where = batch_sharding(mesh)
    batch = jax.tree.map(lambda x: on(np.broadcast_to(x, (rows, *x.shape[1:])), where), batch)
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    grads = jax.tree.map(lambda x: on(x, x.sharding), params)
    flag = jax.ShapeDtypeStruct((), np.bool_, sharding=whole)
    return mesh, {
        "gradient": (step.gradient, (state.params, batch, flag)),
        "update": (step.apply, (state, grads)),
    }


def compile_step(config: Any, topology: str) -> Report:
    """Compiles the gradient and the update of a config's training step for a topology, "v5p:8x8x4".

    Raises InputError for a topology or mesh that makes no sense, TrainingError with the compiler's words for
    a program that it refuses, as it does one that does not fit.
    """
    generation = topology.partition(":")[0]
    if generation not in CHIPS or ":" not in topology:
        raise InputError(
            f"topology {topology!r}: expected GENERATION:SHAPE, of {', '.join(CHIPS)}; v5p:4x4x4."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise MissingExtraError("metagym doctor --compile", "tpu-compile", ModuleNotFoundError("libtpu"))
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nor one to share
    import jax
    import numpy as np
    from jax.experimental import topologies

    from metagym.experiments import build
    from metagym.rl.train_step import HOST

    try:
        devices = topologies.get_topology_desc(topology, platform="tpu").devices
    except Exception as error:  # the plugin raises errors of its own
        raise InputError(f"topology {topology!r}: {' '.join(str(error).split())[:300]}") from error
    mesh, programs = step_programs(config, devices)
    shape = build.model_config(config)
    state = programs["update"][1][0]
    rows, length = config.batch.rows, config.batch.length

    def held(tree: Any) -> int:
        return sum(
            int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
            if x.sharding.memory_kind != HOST
        )

    def compiled(name: str, program: Any, arguments: Sequence[Any], resident: int) -> Program:
        start = time.monotonic()
        try:
            with jax.set_mesh(mesh):
                done = program.lower(*arguments).compile()
        except jax.errors.JaxRuntimeError as error:
            raise TrainingError(f"{name} on {topology}: {' '.join(str(error).split())[:1500]}") from error
        memory, cost, text = done.memory_analysis(), done.cost_analysis() or {}, done.as_text()
        return Program(
            name,
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes - memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
            resident,
            memory.host_argument_size_in_bytes
            + memory.host_output_size_in_bytes
            - memory.host_alias_size_in_bytes
            + memory.host_temp_size_in_bytes,
            float(cost.get("flops", 0.0)),
            cycles(text),
            collectives(text),
            time.monotonic() - start,
        )

    programs = (
        compiled("gradient", *programs["gradient"], held(state.opt_state)),
        compiled("update", *programs["update"], 0),
    )
    chip = CHIPS[generation]
    # Forward, again in the backward pass, and there seven products, as the kernels make them: of two each.
    scores = score_flops(shape, rows, length) * (2 + 2 + 7) / 6
    return Report(
        topology,
        mesh.size,
        rows * length,
        sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
        chip.memory * 1e9,
        model_flops(shape, rows, length),
        sum(p.cycles for p in programs) / (chip.clock * 1e9),
        scores / (chip.peak * 1e12 * mesh.size),
        sum(c.bytes * c.times for p in programs for c in p.collectives) / (chip.links * 1e9),
        programs,
    )


def show(report: Report) -> str:
    """The report as text."""
    gb = 1e9
    lines = [
        f"{report.topology}: {report.chips} chips, {report.parameters / 1e9:.2f} billion parameters, "
        f"{report.tokens:,} tokens a micro-batch"
    ]
    for p in report.programs:
        lines += [
            f"{p.name}: {p.peak / gb:.2f} GB a chip = arguments {p.arguments / gb:.2f} + other state "
            f"{p.resident / gb:.2f} + results {p.outputs / gb:.2f} + temporaries {p.temporaries / gb:.2f}; "
            f"limit {report.limit / gb:.0f} GB" + (f"; on the host {p.host / gb:.2f} GB" if p.host else ""),
            f"  compiled in {p.compile_s:.0f} s; the compiler counts {p.flops / 1e12:.2f} TFLOP a chip, loop "
            f"bodies once, and {p.cycles / 1e9:.2f} billion cycles",
            *(
                f"  {c.kind:18s} {c.bytes * c.times / gb:8.3f} GB = {c.times} x {c.shape}"
                for c in p.collectives[:5]
            ),
        ]
    chip = CHIPS[report.topology.partition(":")[0]]
    best, worst = report.seconds
    lines += [
        f"model: {report.model_flops / 1e15:.2f} PFLOP a step, at least "
        f"{report.model_flops / (chip.peak * 1e12 * report.chips):.2f} s at {chip.peak:.0f} TFLOP/s a chip",
        f"estimate: the compiler's cycles {report.compute_s:.2f} s at {chip.clock} GHz, attention kernels "
        f"{report.attention_s:.2f} s at peak, exchange {report.exchange_s:.2f} s at {chip.links:.0f} GB/s: "
        f"{best:.2f} to {worst:.2f} s a step, MFU {report.mfu[1]:.0%} to {report.mfu[0]:.0%}",
    ]
    verdict = "fits" if report.fits else "DOES NOT FIT"
    lines.append(f"{verdict}: {report.peak / gb:.2f} of {report.limit / gb:.0f} GB")
    return "\n".join(lines)


def command(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """The part of `metagym doctor` behind --compile; returns the exit code: 1 where it does not fit."""
    if not options.topology:
        raise InputError("--compile needs --topology, v5p:4x4x4 for example.")
    os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU at hand is left alone
    from metagym.experiments.config import check, load, override

    config = override(load(options.compile), rest)
    check(config)
    report = compile_step(config, options.topology)
    if options.json:
        about = {
            **dataclasses.asdict(report),
            "peak": report.peak,
            "fits": report.fits,
            "seconds": report.seconds,
            "mfu": report.mfu,
        }
        print(json.dumps(about, indent=2))
    else:
        print(show(report))
    return 0 if report.fits else 1
