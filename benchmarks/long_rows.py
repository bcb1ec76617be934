"""Memory of a training pass over one row of 8k to 131k tokens on 8 virtual CPU devices: docs/scale.md.

    python benchmarks/long_rows.py [--run LENGTH]      with --run, one pass over a row of documents of 8,192
                                                       tokens is computed too

A tiny model (2 layers, width 32), all devices on the mesh axis `context`.
"""

import argparse
import os
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from flax import nnx

from metagym.models import Decoder, ModelConfig, batch_sharding, make_mesh, make_policy, param_shardings
from metagym.rl.batching import empty_batch

CONFIG = ModelConfig(512, 32, 64, 2, 2, 1, 16, max_position_embeddings=131072)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=int, default=0)
    run = parser.parse_args().run
    mesh = make_mesh((1, 1, 1, 8))
    graphdef, params = nnx.split(Decoder(CONFIG, seed=0))
    where, rows = param_shardings(params, mesh), batch_sharding(mesh)
    policy = make_policy(graphdef, chunk=256, memory=0, mesh=mesh)

    def loss(params, batch):
        return -(policy(params, batch)[0] * batch.mask).sum() / batch.tokens.size

    step = jax.jit(jax.value_and_grad(loss), in_shardings=(where, rows), out_shardings=(None, where))
    lengths = [8192 * 2**i for i in range(5)]
    for length in [run] if run else lengths:
        batch = empty_batch(1, length)
        documents = np.arange(length) // 8192
        batch.tokens[0] = np.random.default_rng(0).integers(0, 512, length)
        batch.targets[0] = np.roll(batch.tokens[0], -1)
        batch.positions[0], batch.segments[0] = np.arange(length) % 8192, documents + 1
        batch.mask[0] = 1
        compiled = step.lower(params, batch).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes
        line = f"{length:7d} tokens: {memory / 1e6:7.1f} MB a device, {memory / length:5.0f} bytes a token"
        if run:
            placed = jax.device_put((params, batch), (where, rows))
            start = time.monotonic()
            value, gradient = jax.block_until_ready(compiled(*placed))
            norm = float(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(gradient)) ** 0.5)
            line += f"; loss {float(value):.3f}, gradient norm {norm:.4f}, {time.monotonic() - start:.0f} s"
        print(line, flush=True)


if __name__ == "__main__":
    main()
