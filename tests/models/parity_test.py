"""Logits of transformers on tiny random models (benchmarks/conformance/transformers_parity.py made them)."""

import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from metagym.models import load

ROOT = Path(__file__).parents[2]
GOLDEN = np.load(Path(__file__).with_name("data") / "llama_parity.npz")


@pytest.fixture(scope="module")
def peer():
    spec = importlib.util.spec_from_file_location(
        "transformers_parity", ROOT / "benchmarks/conformance/transformers_parity.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["smollm2", "llama3"])
@pytest.mark.parametrize("layout", ["plain", "padded and packed"])
def test_logits_equal_transformers(peer, tmp_path, name, layout):
    config = json.loads(str(GOLDEN[f"{name}/config"]))
    peer.write_directory(tmp_path, config, int(GOLDEN[f"{name}/seed"]))
    model, _ = load(tmp_path)
    tokens, want = GOLDEN[f"{name}/tokens"], GOLDEN[f"{name}/logits"]  # [2, 150], [2, 22, V]
    positions = np.tile(np.arange(150, dtype=np.int32), (2, 1))
    segments = np.ones_like(positions)
    if layout != "plain":
        tokens, positions, segments = (
            np.pad(np.concatenate([x[0], x[1] * scale])[None], ((0, 0), (0, 21)))
            for x, scale in ((tokens, 1), (positions, 1), (segments, 2))
        )
    hidden = model.hidden(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segments))
    got = np.asarray(model.logits(hidden)).reshape(-1, config["vocab_size"])[:300].reshape(2, 150, -1)[:, ::7]
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
