"""MFU of a training step on the devices that are here: AdamW, bf16 products, a published model's shape.

    python benchmarks/mfu.py [--model Qwen/Qwen2.5-1.5B-Instruct] [--rows 4] [--length 4096] --peak TFLOPS

`--peak` is one device's published TFLOP/s of bf16 products (H100: 989). The FLOPs are the model's alone: what
the backward pass computes again is not counted. All devices are on the mesh axis `fsdp`. Prints the seconds
of each of five steps after one to compile, and the MFU of the median.
"""

import argparse
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from metagym.experiments.compile import model_flops
from metagym.models import Decoder, ModelConfig, make_mesh, make_policy, param_shardings
from metagym.models.shapes import SHAPES
from metagym.rl.algorithms import grpo
from metagym.rl.batching import empty_batch
from metagym.rl.train_step import init_state, make_optimizer, make_train_step, state_shardings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer of them than the model has")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--memory", type=float, default=1.0, help="GB of results kept for the backward pass")
    parser.add_argument("--peak", type=float, required=True)
    args = parser.parse_args()
    config = ModelConfig.from_dict(SHAPES[args.model], args.model)
    config = dataclasses.replace(config, num_hidden_layers=args.layers or config.num_hidden_layers)
    mesh = make_mesh()
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config)))
    where = param_shardings(shapes, mesh)
    params = jax.jit(lambda: nnx.state(Decoder(config, seed=0)), out_shardings=where)()
    optimizer = make_optimizer(1e-6)
    state = init_state(params, optimizer, jax.random.key(0), mesh)
    del params
    memory = int(args.memory * 1e9)
    policy = make_policy(graphdef, compute_dtype=jnp.bfloat16, chunk=1024, memory=memory, mesh=mesh)
    step = make_train_step(policy, grpo(), optimizer, mesh, state_shardings(state))
    shape = (args.rows, args.length)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (args.rows, args.length + 1))
    ones = np.ones(shape, np.float32)
    batch = dataclasses.replace(
        empty_batch(*shape),
        tokens=tokens[:, :-1].astype(np.int32),
        targets=tokens[:, 1:].astype(np.int32),
        mask=ones,
        weight=ones / ones.size,
        advantages=ones,
        positions=np.tile(np.arange(args.length, dtype=np.int32), (args.rows, 1)),
        segments=np.ones(shape, np.int32),
    )
    seconds = []
    for _ in range(6):
        start = time.monotonic()
        state, metrics = step(state, [[batch]])
        jax.block_until_ready(state)
        seconds.append(time.monotonic() - start)
        assert metrics["update/applied"] == 1
    flops = model_flops(config, *shape)
    share = flops / statistics.median(seconds[1:]) / (args.peak * 1e12 * mesh.size)
    each = ", ".join(f"{s:.3f}" for s in seconds[1:])
    where = f"{mesh.size} x {jax.devices()[0].device_kind}"
    print(f"{where}: {each} s a step of {flops / 1e12:.1f} TFLOP, MFU {share:.1%}")


if __name__ == "__main__":
    main()
