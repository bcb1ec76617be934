"""A tiny Llama, and attention over whole rows as the textbook has it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metagym.models import Llama, ModelConfig
from metagym.models.decoder import rms_norm, rotary


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    tokens: jax.Array
    targets: jax.Array
    mask: jax.Array
    positions: jax.Array
    segments: jax.Array


@pytest.fixture(scope="session")
def tiny() -> Llama:
    config = ModelConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    return Llama(config, seed=1)


@pytest.fixture(scope="session")
def dense_hidden():
    """hidden(model, tokens, positions, segments) with a whole [L, L] score matrix and no scan."""

    def hidden(model, tokens, positions, segments):
        c, L = model.config, tokens.shape[1]
        x = model.embed[...][tokens]
        cos, sin = rotary(c, positions)
        visible = (segments[:, :, None] == segments[:, None, :]) & jnp.tri(L, dtype=bool)
        for i in range(c.num_hidden_layers):
            w = {name: value[i] for name, value in model._stacked().items()}
            q, k, v = model._project(w, x, cos, sin, jnp.float32)
            s = jnp.einsum("bqkgh,btkh->bkgqt", q, k) * c.head_dim**-0.5
            p = jax.nn.softmax(jnp.where(visible[:, None, None], s, -jnp.inf), axis=-1)
            x = model._finish(w, x, jnp.einsum("bkgqt,btkh->bqkgh", p, v), jnp.float32)[0]
        return rms_norm(x, model.norm[...], c.rms_norm_eps)

    return hidden


@pytest.fixture(scope="session")
def random_batch():
    """random_batch(lengths): one row an entry, packed with segments of these lengths; B x the longest."""

    def make(lengths: list[list[int]], seed: int = 0, vocab: int = 320) -> Batch:
        rng = np.random.default_rng(seed)
        B, L = len(lengths), max(map(sum, lengths))
        tokens, targets = rng.integers(0, vocab, (2, B, L)).astype(np.int32)
        positions, segments = np.zeros((2, B, L), np.int32)
        for row, parts in enumerate(lengths):
            start = 0
            for i, n in enumerate(parts):
                positions[row, start : start + n] = np.arange(n)
                segments[row, start : start + n] = i + 1
                start += n
        return Batch(
            tokens=jnp.asarray(tokens),
            targets=jnp.asarray(targets),
            mask=jnp.asarray(segments > 0, jnp.float32),
            positions=jnp.asarray(positions),
            segments=jnp.asarray(segments),
        )

    return make
