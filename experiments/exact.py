"""Exact mode, `config.exact`: the sampler's log-probs are the trainer's, bit for bit; and what that costs.

The engine is deterministic and computes tile by tile, the trainer in the same tiles, both in float32 on one
device. `cost` measures it on a model: the time of sampling and of a gradient in both modes, and how
far sampler and trainer are apart in each.
"""

import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from metagym.experiments import build
from metagym.experiments.config import Config
from metagym.models import Decoder
from metagym.rl.batching import empty_batch
from metagym.types import Sampling


@dataclass(frozen=True)
class Mode:
    """One way to compute, measured: seconds, and nats between sampler and trainer, of a token."""

    sampling_s: float
    gradient_s: float
    distance_max: float
    distance_mean: float


def measure(config: Config, model: Decoder) -> Mode:
    """Samples from as many prompts as the engine has slots and takes the gradient of one micro-batch of them,
    each once to compile and once on the clock."""
    mesh = build.build_mesh(config)
    rows, length = config.batch.rows, config.batch.length
    context = min(config.sampling.context, length)
    new = min(config.sampling.max_tokens, context - 1)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.config.vocab_size, (config.engine.slots, context - new))
    backend = build.build_backend(config, model)

    def sample(seed: int) -> list[Any]:
        asked = [Sampling(max_tokens=new, seed=seed + i) for i in range(len(prompts))]
        futures = [backend.submit(p.tolist(), s) for p, s in zip(prompts, asked, strict=True)]
        return [f.result() for f in futures]

    try:
        sample(0)
        prompts = rng.integers(0, model.config.vocab_size, prompts.shape)  # nothing of them in the cache
        start = time.monotonic()
        made = sample(1000)
        sampling_s = time.monotonic() - start
    finally:
        backend.close()
    batch = empty_batch(rows, length, model.config.routing_width)
    sampled = np.full((rows, length), np.nan, np.float32)
    for row, (prompt, g) in enumerate(zip(prompts[:rows], made, strict=False)):
        ids = np.concatenate([prompt, g.tokens])
        n = len(ids) - 1
        batch.tokens[row, :n], batch.targets[row, :n] = ids[:-1], ids[1:]
        batch.positions[row, :n], batch.segments[row, :n] = np.arange(n), 1
        batch.mask[row, len(prompt) - 1 : n] = 1
        sampled[row, len(prompt) - 1 : n] = g.logprobs
    graphdef, params = nnx.split(model)
    policy = build.build_policy(config, mesh)(graphdef)

    def loss(params: Any) -> Any:
        logprobs, _ = policy(params, batch)
        return logprobs.sum(), logprobs

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    jax.block_until_ready(gradient(params))
    start = time.monotonic()
    logprobs = jax.block_until_ready(gradient(params))[1]
    gradient_s = time.monotonic() - start
    off = np.abs(np.asarray(logprobs) - sampled)[np.isfinite(sampled)]
    return Mode(sampling_s, gradient_s, float(off.max()), float(off.mean()))


def cost(config: Config, model: Decoder) -> str:
    """Two lines: what exact mode costs beside the default mode, and what it brings."""
    plain = config.copy_and_resolve_references()
    plain.engine.deterministic = plain.model.tiled = False
    exact, default = measure(config, model), measure(plain, model)
    return (
        f"exact mode: sampling takes {exact.sampling_s / default.sampling_s:.1f} and a gradient "
        f"{exact.gradient_s / default.gradient_s:.1f} times as long as in the default mode\n"
        f"distance of sampler and trainer: {exact.distance_max:.1e} nats at most; default mode "
        f"{default.distance_max:.1e} at most, {default.distance_mean:.1e} on average"
    )
