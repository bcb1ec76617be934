"""Logits of transformers and PEFT on tiny random models: benchmarks/conformance/transformers_parity.py."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from metagym.models import Lora, load, load_adapter, save, save_adapter
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


NAMES = sorted({key.split("/")[0] for key in GOLDEN})


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(peer, tmp_path, name):
    """Rows that are whole, padded on either side, and packed; of transformers computed in the same layout."""
    config, seed = json.loads(str(GOLDEN[f"{name}/config"])), int(GOLDEN[f"{name}/seed"])
    peer.write_directory(tmp_path / "base", config, seed)
    model, _ = load(tmp_path / "base")
    if name.endswith("with an adapter"):
        peer.write_adapter(
            tmp_path / "adapter", config, targets := peer.ADAPTERS[name.split(" with")[0]], seed
        )
        model, _ = load(tmp_path / "base", lora=Lora(peer.RANK, peer.ALPHA, targets))
        load_adapter(model, tmp_path / "adapter")
    for layout, logits in peer.our_logits(model, GOLDEN[f"{name}/tokens"]).items():
        got, want = logits[:: peer.EVERY], GOLDEN[f"{name}/{layout}"]
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max(), layout


def test_adapters_come_out_as_they_went_in(peer, tmp_path):
    """What PEFT computes with them is in the golden numbers; the files that we write are the same."""
    config = peer.CONFIGS["qwen2"]
    peer.write_directory(tmp_path / "base", config, 0)
    peer.write_adapter(tmp_path / "theirs", config, targets := peer.ADAPTERS["qwen2"], 0)
    model, _ = load(tmp_path / "base", lora=Lora(peer.RANK, peer.ALPHA, targets))
    load_adapter(model, tmp_path / "theirs")
    ours = save_adapter(model, tmp_path / "ours")
    got, want = (load_file(d / "adapter_model.safetensors") for d in (ours, tmp_path / "theirs"))
    assert got.keys() == want.keys()
    for tensor in want:
        np.testing.assert_array_equal(got[tensor], want[tensor])
    written, read = (json.loads((d / "adapter_config.json").read_text()) for d in (ours, tmp_path / "theirs"))
    assert set(written.pop("target_modules")) == set(read.pop("target_modules"))
    assert read.items() <= {**written, "base_model_name_or_path": None}.items()


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
