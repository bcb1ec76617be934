"""How exact log-probs are: the numbers of docs/reliability.md and, of experts, docs/models.md.

    python benchmarks/exactness.py [MODEL]      MODEL: a folder or name that metagym.models.load takes;
                                                by default a small one of random weights

First the engine against itself: the same 48 requests alone, each without anything in the cache, and all at
once in another order. Then the engine against the trainer, of a dense model and of a mixture of experts, with
and without a replay of its routing.
"""

import dataclasses
import itertools
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from metagym.models import Llama, ModelConfig, load, make_policy, make_tiled_policy
from metagym.proxy.backends.embedded import EmbeddedBackend, Tiles
from metagym.rl.batching import empty_batch
from metagym.types import Generation, Sampling

SMALL = ModelConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    tie_word_embeddings=True,
)


EXPERTS = dataclasses.replace(
    SMALL,
    model_type="qwen3_moe",
    qk_norm=True,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=128,
    tie_word_embeddings=False,
)
CONTEXT = 128


def requests(vocabulary: int) -> list[tuple[list[int], Sampling]]:
    """Groups of two; prompts share beginnings of every length."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, vocabulary, 80).tolist()
    made = []
    for i in range(24):
        ids = base[: int(rng.integers(1, 80))] + rng.integers(0, vocabulary, int(rng.integers(0, 9))).tolist()
        made += [(ids, Sampling(max_tokens=int(rng.integers(1, 24)), seed=100 * i + m)) for m in range(2)]
    return made


def compare(model: Llama, dtype: str, deterministic: bool) -> str:
    """One row of the table."""
    page_size = 4 if deterministic else 16
    engine = EmbeddedBackend(
        model,
        slots=16,
        context=CONTEXT,
        page_size=page_size,
        dtype=jnp.dtype(dtype),
        deterministic=deterministic,
    )
    asked = requests(model.config.vocab_size)
    alone = []
    for request in asked:
        engine._table.clear()
        alone.append(engine.submit(*request).result())
    engine._table.clear()
    order = np.random.default_rng(1).permutation(len(asked))
    futures = {int(i): engine.submit(*asked[i]) for i in order}
    together = [futures[i].result() for i in range(len(asked))]
    engine.close()
    same, bits, most = 0, [], 0.0
    for a, b in zip(alone, together, strict=True):
        same += a.tokens.tolist() == b.tokens.tolist()
        n = sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(a.tokens, b.tokens, strict=False)))
        bits += (a.logprobs[:n] == b.logprobs[:n]).tolist()
        most = max([most, *np.abs(a.logprobs[:n] - b.logprobs[:n]).tolist()])
    kind = "deterministic" if deterministic else "fast"
    return f"| {kind} | {dtype} | {same} of {len(asked)} | {np.mean(bits):.0%} | {most:.2g} |"


def sampled(model: Llama, dtype: str, deterministic: bool) -> list[tuple[list[int], Generation]]:
    """Prompts and what the engine samples, all at once."""
    page_size = 4 if deterministic else 16
    how = {"slots": 16, "context": CONTEXT, "page_size": page_size, "deterministic": deterministic}
    engine = EmbeddedBackend(model, dtype=jnp.dtype(dtype), **how)
    asked = requests(model.config.vocab_size)
    futures = [engine.submit(*request) for request in asked]
    made = [(prompt, f.result()) for (prompt, _), f in zip(asked, futures, strict=True)]
    engine.close()
    return made


def distance(model: Llama, made: Sequence, dtype: str, *, replay: bool = False, tiled: bool = False) -> str:
    """Between the sampled log-probs and the trainer's, and the share that is equal; two cells of a table."""
    batch = empty_batch(len(made), CONTEXT, model.config.routing_width)
    batch.routing[:] = -1
    want = np.full(batch.tokens.shape, np.nan, np.float32)
    for row, (prompt, g) in enumerate(made):
        ids = np.concatenate([prompt, g.tokens])
        n = len(ids) - 1
        batch.tokens[row, :n], batch.targets[row, :n] = ids[:-1], ids[1:]
        batch.positions[row, :n], batch.segments[row, :n] = np.arange(n), 1
        batch.mask[row, len(prompt) - 1 : n] = 1
        want[row, len(prompt) - 1 : n] = g.logprobs
        if model.config.num_experts:
            batch.routing[row, :n] = np.concatenate([g.prompt_routing, g.routing])[:n]
    graphdef, params = nnx.split(model)
    if tiled:
        rows = Tiles.fixed(16, CONTEXT, 4).decode[0]
        policy = make_tiled_policy(graphdef, rows=rows, page_size=4, context=CONTEXT)
    else:
        policy = make_policy(graphdef, compute_dtype=jnp.dtype(dtype), replay=replay)
    got = np.asarray(jax.jit(policy)(params, batch)[0])
    off = np.abs(got - want)[np.isfinite(want)]
    return f"{np.mean(off == 0):.0%} | {off.max():.2g} | {np.quantile(off, 0.99):.2g} | {off.mean():.2g}"


def main() -> None:
    model = load(sys.argv[1])[0] if len(sys.argv) > 1 else Llama(SMALL, seed=0)
    print(f"jax {jax.__version__} on {jax.devices()[0].platform}, {sys.argv[1:] or 'a small model'}\n")
    print("| engine | dtype | same tokens | same bits | largest difference |")
    print("|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        for deterministic in (False, True):
            print(compare(model, dtype, deterministic), flush=True)
    print("\n| engine | trainer | same bits | max | p99 | mean |")
    print("|---|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        cells = distance(model, sampled(model, dtype, False), dtype)
        print(f"| fast, {dtype} | {dtype} | {cells} |", flush=True)
    cells = distance(model, sampled(model, "float32", True), "float32", tiled=True)
    print(f"| deterministic, float32 | tiled, float32 | {cells} |", flush=True)
    experts = Llama(EXPERTS, seed=0)
    for engine, trainer in itertools.product(("float32", "bfloat16"), repeat=2):
        made = sampled(experts, engine, False)
        for replay in (False, True):
            cells, what = distance(experts, made, trainer, replay=replay), "replay" if replay else "no replay"
            print(f"| experts, {engine} | {trainer}, {what} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
