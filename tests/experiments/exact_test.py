"""Exact mode: what it sets, that it is exact, and what it says that it costs."""

import argparse

import pytest
from flax import nnx

from metagym.experiments import build, config, exact
from metagym.models import Decoder, ModelConfig


@pytest.fixture(scope="module")
def exactly():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    set_to = {"exact": True, "batch.rows": 2, "batch.length": 64, "engine.slots": 4, "engine.page_size": 4}
    words = [f"--config.{k}={v}" for k, v in set_to.items()]
    made = config.parse(["--config=debug", "--config.model.engine_dtype=bfloat16", *words], parser)[1]
    made.sampling.context, made.sampling.max_tokens = 32, 12
    return made


def test_it_sets_what_it_needs(exactly):
    assert exactly.engine.deterministic
    assert exactly.model.tiled
    assert exactly.model.compute_dtype == exactly.model.engine_dtype == "float32"
    assert exactly.batch.align % exactly.engine.page_size == 0


def test_its_cost_is_measured_beside_the_default_mode(exactly):
    shape = ModelConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = Decoder(shape, seed=1)
    mode = exact.measure(exactly, model)
    assert mode.distance_max == 0
    plain = exactly.copy_and_resolve_references()
    plain.engine.deterministic = plain.model.tiled = False
    other = exact.measure(plain, model)
    assert 0 < other.distance_mean < other.distance_max < 1e-4
    assert min(mode.sampling_s, mode.gradient_s, other.sampling_s, other.gradient_s) > 0
    assert isinstance(nnx.state(model), nnx.State)  # the model is as it was
    assert build.build_mesh(exactly).size == 1
