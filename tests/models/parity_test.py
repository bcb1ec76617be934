"""Logits of transformers on tiny random models (benchmarks/conformance/transformers_parity.py made them)."""

import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from metagym.models import load, save
from metagym.models.families import FAMILIES

ROOT = Path(__file__).parents[2]
GOLDEN = np.load(Path(__file__).with_name("data") / "parity.npz")


@pytest.fixture(scope="module")
def peer():
    spec = importlib.util.spec_from_file_location(
        "transformers_parity", ROOT / "benchmarks/conformance/transformers_parity.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted({key.split("/")[0] for key in GOLDEN}))
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


def test_every_family_has_golden_numbers():
    kinds = {json.loads(str(GOLDEN[key]))["model_type"] for key in GOLDEN if key.endswith("/config")}
    assert kinds == set(FAMILIES)


@pytest.mark.parametrize("name", ["qwen2.5 with yarn", "qwen3", "qwen3 moe"])
def test_what_is_saved_has_the_tensors_and_config_that_came(peer, tmp_path, name):
    """Name by name and bit by bit, so what reads the published files reads ours."""
    config = json.loads(str(GOLDEN[f"{name}/config"]))
    peer.write_directory(tmp_path / "theirs", config, 5)
    ours = save(load(tmp_path / "theirs")[0], tmp_path / "ours")
    got, want = (load_file(d / "model.safetensors") for d in (ours, tmp_path / "theirs"))
    assert got.keys() == want.keys()
    for tensor in want:
        np.testing.assert_array_equal(got[tensor], want[tensor])
    written = json.loads((ours / "config.json").read_text())
    assert {k: v for k, v in config.items() if k not in written or written[k] != v}.keys() <= {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "rope_scaling",
    }
    if "rope_scaling" in config:
        assert config["rope_scaling"].items() <= written["rope_scaling"].items()
