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

# Of one chip: HBM in GB, peak bf16 TFLOP/s, and GB/s of all its links to other chips (published numbers).
CHIPS = {
    "v4": (32.0, 275.0, 300.0),
    "v5e": (16.0, 197.0, 200.0),
    "v5p": (95.0, 459.0, 600.0),
    "v6e": (32.0, 918.0, 448.0),
}
COLLECTIVE = re.compile(
    r"^\s*(?:ROOT )?%?\S+ = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|"
    r"collective-permute)(?:-start)?\((.*)$"
)
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=\{?((?:%?[\w.-]+(?:, )?)+)\}?")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
ARRAY = re.compile(r"\b(pred|[subf]\d+|bf16)\[([\d,]*)\]")
BYTES = {"pred": 1, "bf16": 2}


@dataclass(frozen=True)
class Collective:
    """One kind of exchange between chips."""

    kind: str
    shape: str
    bytes: int  # of the result, per chip
    times: int  # in a run of the program


@dataclass(frozen=True)
class Program:
    """One compiled program, per chip. Memory in bytes; what is donated counts once."""

    name: str
    arguments: int
    outputs: int  # beyond the donated arguments
    temporaries: int
    resident: int  # the rest of the training state, which waits meanwhile
    flops: float  # as the compiler counts: a loop's body once, kernels as they say
    seconds: float  # the compiler's estimate of the same; 0: none
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
    compute_s: float  # the model's FLOPs, and the forward pass computed again, at the chips' peak
    exchange_s: float  # what the collectives move, at the speed of a chip's links
    programs: tuple[Program, ...]

    @property
    def peak(self) -> int:
        return max(p.peak for p in self.programs)

    @property
    def seconds(self) -> tuple[float, float]:
        """An estimate of a step: the exchange all hidden behind the computing, and none of it."""
        return max(self.compute_s, self.exchange_s), self.compute_s + self.exchange_s

    @property
    def mfu(self) -> tuple[float, float]:
        """The share of the chips' peak that the model's FLOPs are of it, in the same two cases."""
        peak = CHIPS[self.topology.partition(":")[0]][1] * 1e12 * self.chips
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
    scores = 6 * length * c.num_attention_heads * c.head_dim * c.num_hidden_layers
    return float(rows * length * (6 * weights + scores))


def runs(text: str) -> dict[str, int]:
    """How often each computation of a compiled program runs: a loop's body as often as the compiler knows."""
    calls: dict[str, list[tuple[str, int]]] = {}
    entry = name = ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            name = match[2]
            calls[name] = []
            entry = name if match[1] else entry
        elif name and (found := CALLED.findall(line)):
            trips = TRIPS.search(line)
            times = int(trips[1]) if trips else 1
            calls[name] += [(c.strip().lstrip("%"), times) for group in found for c in group.split(",")]
    total: dict[str, int] = {}

    def visit(name: str, times: int) -> None:
        total[name] = total.get(name, 0) + times
        for called, n in calls.get(name, ()):
            visit(called, times * n)

    visit(entry, 1)
    return total


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
                key = (match[2], *max(sizes))
                found[key] = found.get(key, 0) + times[name]
    made = [Collective(kind, shape, size, n) for (kind, size, shape), n in found.items()]
    return tuple(sorted(made, key=lambda c: -c.bytes * c.times))


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
    from flax import nnx
    from jax.experimental import topologies

    from metagym.experiments import build
    from metagym.models import Decoder, param_shardings
    from metagym.rl.batching import empty_batch
    from metagym.rl.train_step import HOST, abstract_state, batch_sharding, make_train_step, state_shardings

    try:
        devices = topologies.get_topology_desc(topology, platform="tpu").devices
    except Exception as error:  # the plugin raises errors of its own
        raise InputError(f"topology {topology!r}: {' '.join(str(error).split())[:300]}") from error
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
        memory, cost = done.memory_analysis(), done.cost_analysis() or {}
        return Program(
            name,
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes - memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
            resident,
            float(cost.get("flops", 0.0)),
            max(0.0, float(cost.get("optimal_seconds", 0.0))),
            collectives(done.as_text()),
            time.monotonic() - start,
        )

    programs = (
        compiled("gradient", step.gradient, (state.params, batch, flag), held(state.opt_state)),
        compiled("update", step.apply, (state, grads), 0),
    )
    limit, peak, links = CHIPS[generation]
    flops = model_flops(shape, rows, length)
    return Report(
        topology,
        mesh.size,
        rows * length,
        sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
        limit * 1e9,
        flops,
        flops * (8 / 6) / (peak * 1e12 * mesh.size),
        sum(c.bytes * c.times for p in programs for c in p.collectives) / (links * 1e9),
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
            f"limit {report.limit / gb:.0f} GB",
            f"  compiled in {p.compile_s:.0f} s; the compiler counts {p.flops / 1e12:.2f} TFLOP a chip and "
            f"{p.seconds:.3f} s, loop bodies once",
            *(
                f"  {c.kind:18s} {c.bytes * c.times / gb:8.3f} GB = {c.times} x {c.shape}"
                for c in p.collectives[:5]
            ),
        ]
    chip = CHIPS[report.topology.partition(":")[0]]
    best, worst = report.seconds
    lines += [
        f"model: {report.model_flops / 1e15:.2f} PFLOP a step; computing takes {report.compute_s:.2f} s at "
        f"{chip[1]:.0f} TFLOP/s a chip (layers computed again included), exchange {report.exchange_s:.2f} s "
        f"at {chip[2]:.0f} GB/s",
        f"estimate: {best:.2f} to {worst:.2f} s a step, MFU {report.mfu[1]:.0%} to {report.mfu[0]:.0%}",
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
