"""Memory of training on one row of 8k to 131k tokens, on 8 virtual CPU devices: docs/scale.md.

    python benchmarks/long_rows.py [LENGTH ...] [--document TOKENS] [--steps N]

A tiny model (2 layers, width 32), all devices on the mesh axis `context`; the row is packed with documents of
that many tokens (8,192). For each length, in a process of its own: what the compiler reserves on a device for
the training step, by how much the process grew at most while it compiled and made N steps (3) of AdamW, the
losses, and the seconds of the last step.
"""

import argparse
import os
import resource
import subprocess
import sys
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

LENGTHS = [8192 * 2**i for i in range(5)]


def measure(length: int, document: int, steps: int) -> str:
    import jax
    import numpy as np
    import optax
    from flax import nnx

    from metagym.models import (
        Decoder,
        ModelConfig,
        batch_sharding,
        make_mesh,
        make_policy,
        param_shardings,
    )
    from metagym.rl.batching import empty_batch

    config = ModelConfig(512, 32, 64, 2, 2, 1, 16, max_position_embeddings=131072)
    mesh = make_mesh((1, 1, 1, 8))
    graphdef, params = nnx.split(Decoder(config, seed=0))
    where, rows = param_shardings(params, mesh), batch_sharding(mesh)
    policy = make_policy(graphdef, chunk=256, memory=0, mesh=mesh)
    optimizer = optax.adamw(1e-2)

    def step(params, moments, batch):
        def loss(params):
            return -(policy(params, batch)[0] * batch.mask).sum() / batch.tokens.size

        value, gradient = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    batch = empty_batch(1, length)
    batch.tokens[0] = np.random.default_rng(0).zipf(1.5, length) % 512
    batch.targets[0] = np.roll(batch.tokens[0], -1)
    batch.positions[0], batch.segments[0] = np.arange(length) % document, np.arange(length) // document + 1
    batch.mask[0] = 1
    params, batch = jax.block_until_ready(jax.device_put((params, batch), (where, rows)))
    moments = jax.jit(optimizer.init)(params)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, moments, batch).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    reserved = analysis.temp_size_in_bytes
    losses, seconds = [], 0.0
    for _ in range(steps):
        start = time.monotonic()
        params, moments, value = compiled(params, moments, batch)
        losses.append(f"{float(value):.3f}")
        seconds = time.monotonic() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return (
        f"{length:7d} tokens: {reserved / 1e6:6.1f} MB a device, {reserved / length:4.0f} bytes a token; "
        f"process {grown / 1e6:6.1f} MB; loss {', '.join(losses)}; {seconds:.1f} s a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--document", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    if len(args.lengths) == 1:
        print(measure(args.lengths[0], args.document, args.steps), flush=True)
        return
    for length in args.lengths:
        rest = [f"--document={args.document}", f"--steps={args.steps}"]
        subprocess.run([sys.executable, __file__, str(length), *rest], check=True)


if __name__ == "__main__":
    main()
