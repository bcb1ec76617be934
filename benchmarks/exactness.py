"""How much log-probs depend on what else the engine does: the numbers of docs/reliability.md.

    python benchmarks/exactness.py [MODEL]      MODEL: a folder or name that metagym.models.load takes;
                                                by default a small one of random weights

The same 48 requests alone, each without anything in the cache, and all at once in another order.
"""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from metagym.models import Llama, ModelConfig, load
from metagym.proxy.backends.embedded import EmbeddedBackend
from metagym.types import Sampling

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
        context=128,
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


def main() -> None:
    model = load(sys.argv[1])[0] if len(sys.argv) > 1 else Llama(SMALL, seed=0)
    print(f"jax {jax.__version__} on {jax.devices()[0].platform}, {sys.argv[1:] or 'a small model'}\n")
    print("| engine | dtype | same tokens | same bits | largest difference |")
    print("|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        for deterministic in (False, True):
            print(compare(model, dtype, deterministic), flush=True)


if __name__ == "__main__":
    main()
