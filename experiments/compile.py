"""`metagym doctor --compile CONFIG --topology v5p:8x8x4`: a training step for TPUs that are elsewhere.

The programs are those that training runs, lowered for the devices of a TPU topology and compiled by libtpu,
with its Pallas kernels and its limits of memory; no TPU is needed. What they take is read from the compiler;
how long they take is its estimate, with the model's FLOPs at the chips' peak beside it.
"""

import argparse
import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from metagym.errors import InputError, MissingExtraError

# Of one device of a topology: HBM in GB, peak bf16 TFLOP/s (Google's published numbers).
CHIPS = {
    "v4": (32.0, 275.0),
    "v5e": (16.0, 197.0),
    "v5p": (95.0, 459.0),
    "v6e": (32.0, 918.0),
}
COLLECTIVE = re.compile(
    r"^\s*(?:ROOT )?%?\S+ = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|"
    r"collective-permute)(?:-start)?\((.*)$"
)
ARRAY = re.compile(r"\b(pred|[subf]\d+|bf16)\[([\d,]*)\]")
BYTES = {"pred": 1, "bf16": 2}


@dataclass(frozen=True)
class Program:
    """One compiled program, per chip. Memory in bytes; what is donated counts once."""

    name: str
    arguments: int
    outputs: int  # beyond the donated arguments
    temporaries: int
    resident: int  # the rest of the training state, which waits meanwhile
    flops: float  # as the compiler counts; kernels without a count are not in it
    seconds: float  # the compiler's estimate; 0: none
    collectives: tuple[tuple[str, str, int], ...]  # (kind, shapes, bytes of the result), largest first
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
    roofline_s: float  # the model's FLOPs at the chips' peak
    programs: tuple[Program, ...]

    @property
    def peak(self) -> int:
        return max(p.peak for p in self.programs)

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


def collectives(text: str, most: int = 5) -> tuple[tuple[str, str, int], ...]:
    """The largest collective operations of a compiled program's text: (kind, shapes, bytes of the result)."""
    found = {}
    for line in text.splitlines():
        if match := COLLECTIVE.match(line):
            arrays = ARRAY.findall(match[1])
            sizes = []
            for kind, shape in arrays:
                item = BYTES.get(kind) or int(re.sub(r"\D", "", kind)[:2] or 8) // 8
                n = 1
                for d in filter(None, shape.split(",")):
                    n *= int(d)
                sizes.append((item * n, f"{kind}[{shape}]"))
            if sizes:
                size, shape = max(sizes)
                found[match[2], shape] = size
    ranked = sorted(((k, s, n) for (k, s), n in found.items()), key=lambda x: -x[2])
    return tuple(ranked[:most])


def compile_step(config: Any, topology: str) -> Report:
    """Compiles the gradient and the update of a config's training step for a topology, "v5p:8x8x4".

    Raises InputError for a topology or mesh that makes no sense, and if the compiler finds that a program
    does not fit.
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
    from metagym.rl.train_step import abstract_state, batch_sharding, make_train_step, state_shardings

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
    state = abstract_state(params, optimizer, mesh)
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
            if isinstance(x.dtype, np.dtype)
        )

    def compiled(name: str, program: Any, arguments: Sequence[Any], resident: int) -> Program:
        start = time.monotonic()
        try:
            with jax.set_mesh(mesh):
                done = program.lower(*arguments).compile()
        except jax.errors.JaxRuntimeError as error:
            raise InputError(f"{name} on {topology}: {' '.join(str(error).split())[:1500]}") from error
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
    limit, peak = CHIPS[generation]
    flops = model_flops(shape, rows, length)
    parameters = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))
    seconds = flops / (peak * 1e12 * mesh.size)
    return Report(topology, mesh.size, rows * length, parameters, limit * 1e9, flops, seconds, programs)


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
            f"  compiler: {p.flops / 1e12:.1f} TFLOP a chip, {p.seconds:.2f} s; it took {p.compile_s:.0f} s",
            *(f"  {kind:18s} {size / 1e6:9.1f} MB  {shape}" for kind, shape, size in p.collectives),
        ]
    peak = CHIPS[report.topology.partition(":")[0]][1]
    estimate = sum(p.seconds for p in report.programs)
    lines.append(
        f"model: {report.model_flops / 1e15:.2f} PFLOP a step, {report.roofline_s:.2f} s at the chips' "
        f"{peak:.0f} TFLOP/s"
    )
    if estimate:
        mfu = report.roofline_s / estimate
        lines.append(f"the compiler's estimate is {estimate:.2f} s a step: an MFU of {mfu:.0%}")
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
        import json

        print(json.dumps({**dataclasses.asdict(report), "peak": report.peak, "fits": report.fits}, indent=2))
    else:
        print(show(report))
    return 0 if report.fits else 1
