"""`metagym export`: a checkpoint becomes a Hugging Face directory."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from metagym import cli
from metagym.experiments import build, config
from metagym.models import load, make_mesh
from metagym.rl import checkpoint
from metagym.rl.train_step import init_state


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run of one step leaves, its weights other than those it began with; and these weights."""
    made = config.load("debug")
    folder = tmp_path_factory.mktemp("run")
    config.write(made, folder)
    directory = build.random_model(folder / "random_model", made.seed)
    mesh = make_mesh((1, 1), devices=jax.devices()[:1])
    _, params = nnx.split(load(directory, mesh=mesh)[0])
    params = jax.tree.map(lambda x: x + 1, params)
    state = init_state(params, build.build_optimizer(made), jax.random.key(0), mesh)
    checkpoint.save(folder / "checkpoints", 1, state, {})
    return folder, params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_newest_checkpoint_is_written_with_its_tokenizer(run, tmp_path, capsys, dtype):
    folder, params = run
    out = tmp_path / "out"
    assert cli.main(["export", str(folder), str(out), f"--dtype={dtype}"]) == 0
    assert f"step 1 of {folder} is in {out}" in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (folder / "random_model" / name).read_bytes()
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == dtype
    got = nnx.state(load(out)[0])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b.astype(dtype).astype("float32"))


def test_what_cannot_be_exported_is_told(run, tmp_path, capsys):
    folder, _ = run
    assert cli.main(["export", str(folder), str(folder)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "is not the record of a run" in capsys.readouterr().err
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    build.random_model(tmp_path / "random_model", 0)
    assert cli.main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "no complete checkpoint" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"seed": 1, "model": {}}')
    assert not (tmp_path / "out").exists()
