"""`metagym doctor --compile`: what it reads from programs, what it refuses, and one real compilation."""

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from flax import nnx

from metagym import cli
from metagym.experiments import build, compile, config, scale
from metagym.models import Decoder, ModelConfig
from metagym.models.shapes import SHAPES

ROOT = Path(__file__).parents[2]
TINY = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def test_flops_by_hand():
    """One layer, D 4, one head of 2, F 3, V 5: weights of attention 4 x 4 x 2, MLP 3 x 4 x 3, head 5 x 4."""
    c = ModelConfig(5, 4, 3, 1, 1, 1, 2)
    assert compile.model_flops(c, 2, 10) == 2 * 10 * (6 * (32 + 36 + 20) + 6 * 10 * 1 * 2)
    moe = dataclasses.replace(c, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=3)
    assert compile.model_flops(moe, 1, 1) == 6 * (32 + 2 * 36 + 8 * 4 + 20) + 6 * 2


@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes_have_their_published_sizes(name):
    billions = {"1.5B": 1.54, "7B": 7.62, "72B": 72.71, "30B-A3B": 30.53}
    c = ModelConfig.from_dict(SHAPES[name], name)
    shapes = nnx.state(nnx.eval_shape(lambda: Decoder(c)))
    weights = sum(x.size for x in jax.tree.leaves(shapes))
    assert weights / 1e9 == pytest.approx(next(v for k, v in billions.items() if k in name), abs=0.006)


def test_collectives_and_cycles_are_found_and_counted():
    """A loop of ten, in it a fusion with a gather among 8 chips; a loop whose end is computed; two results
    reduced at once among 4 and scattered among 2."""
    text = """
%gather (p: bf16[8,16]) -> bf16[64,16] {
  %all-gather-start.1 = (bf16[8,16]{1,0}, bf16[64,16]{1,0}) all-gather-start(%p), replica_groups=[2,8]<=[16]
}

%region_1.2 (t: (s32[], f32[100])) -> (s32[], f32[100]) {
  %f = bf16[64,16]{1,0} fusion(bf16[8,16]{1,0} %x), kind=kCustom, calls=%gather, \
backend_config={"window_config":{"estimated_cycles":"30"}}
  %ar = f32[100]{0:T(128)} all-reduce(f32[100]{0} %x), replica_groups={{0,1,2,3}}, to_apply=%add
}

%region_2.3 (t: (s32[], f32[100])) -> pred[] {
  %constant.4 = s32[]{:T(128)} constant(10)
  %get-tuple-element.5 = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%get-tuple-element.5, %constant.4), direction=LT
}

%region_3.4 (t: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {
  %p = f32[8]{0} collective-permute(f32[8]{0} %x), source_target_pairs={{0,1},{1,0}}
}

%region_5.6 (t: (s32[], s32[], f32[8])) -> pred[] {
  ROOT %lt.2 = pred[]{:T(512)} compare(%get-tuple-element.6, %get-tuple-element.7), direction=LT
}

ENTRY %main (a: f32[100]) -> f32[100] {
  %w = (s32[], f32[100]) while(%t), condition=%region_2.3, body=%region_1.2
  %v = (s32[], s32[], f32[8]) while(%u), condition=%region_5.6, body=%region_3.4
  ROOT %rs.2 = (s32[4]{0}, pred[2,3]{1,0}) reduce-scatter(s32[16]{0} %y, pred[8,3] %z), dimensions={0}, \
replica_groups=mesh['a'=2,'b'=4] {'b'}
  %fusion = f32[4096]{0} fusion(f32[4096]{0} %all-reduce), kind=kLoop, backend_config={"estimated_cycles":"5"}
}
"""
    assert compile.cycles(text) == 10 * 30 + 5
    assert compile.collectives(text) == (
        compile.Collective("all-gather", "bf16[64,16]", 64 * 16 * 2 * 7 // 8, 10),
        compile.Collective("all-reduce", "f32[100]", 2 * 400 * 3 // 4, 10),
        compile.Collective("reduce-scatter", "s32[4] and 1 more", (16 + 6) * 3, 1),
        compile.Collective("collective-permute", "f32[8]", 32, 1),
    )


def test_what_does_not_fit_is_said_and_is_exit_code_1(monkeypatch, capsys):
    program = compile.Program("gradient", 10**9, 10**9, 2 * 10**9, 11 * 10**9, 3 * 10**9, 5e12, 7, (), 1.0)
    report = compile.Report("v5e:2x2", 4, 2048, 10**9, 16e9, 7.88e14, 1.5, 0.5, 0.5, (program,))
    assert program.peak == 15 * 10**9
    assert report.fits
    assert report.seconds == (2.0, 2.5)
    assert report.mfu == pytest.approx((0.5, 0.4))  # 788 TFLOP in a second are the peak of four chips
    assert "fits: 15.00 of 16 GB" in compile.show(report)
    assert "on the host 3.00 GB" in compile.show(report)
    small = dataclasses.replace(report, limit=14e9)
    monkeypatch.setattr(compile, "compile_step", lambda *_: small)
    assert cli.main(["doctor", "--compile=debug", "--topology=v5e:2x2"]) == 1
    assert "DOES NOT FIT: 15.00 of 14 GB" in capsys.readouterr().out
    assert cli.main(["doctor", "--compile=debug", "--topology=v5e:2x2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--compile=debug"], "needs --topology"),
        (["--compile=nothing", "--topology=v5e:2x2"], "'nothing'"),
        (["--compile=debug", "--topology=h100:8"], "'h100:8': expected GENERATION:SHAPE"),
        (["--compile=debug", "--topology=v5e:2x2", "--config.mesh.rows=2"], "'mesh.rows'"),
    ],
)
def test_what_makes_no_sense_is_told(words, why, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert cli.main(["doctor", *words]) == 2
    assert why in capsys.readouterr().err


def test_without_libtpu_it_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert cli.main(["doctor", "--compile=debug", "--topology=v5e:2x2"]) == 2
    assert "tpu-compile" in capsys.readouterr().err


@pytest.mark.parametrize("row", scale.ROWS, ids=lambda r: f"{r.config} {r.topology}")
def test_rows_of_the_table_are_runs_that_could_be(row):
    """Configs, fields and meshes fit together, and docs/scale.md shows the command."""
    made = config.override(config.load(row.config), [w for w in row.command if w.startswith("--config.")])
    config.check(made)
    chips = math.prod(map(int, row.topology.partition(":")[2].split("x")))
    assert math.prod(made.mesh.values()) == chips
    assert made.batch.rows % (made.mesh.data * made.mesh.fsdp * made.mesh.expert) == 0
    assert made.batch.length % (256 * made.mesh.context) == 0
    assert made.batch.length <= build.model_config(made).context
    assert " ".join(row.command) in (ROOT / "docs" / "scale.md").read_text()


def test_a_tiny_step_compiles_for_a_tpu(tmp_path):
    """The whole way: topology, mesh with context parallelism, splash attention, both programs; the layers'
    inputs and the moments wait on the host."""
    python = ROOT / ".venv-tpu" / "bin" / "python"
    if not python.exists() and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: make scale does")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    fields = {
        "model.name": tmp_path / "model",
        "model.compute_dtype": "bfloat16",
        "model.memory": 0.0,
        "model.offload": True,
        "optimizer.offload": True,
        "mesh.fsdp": 2,
        "mesh.context": 2,
        "batch.rows": 2,
        "batch.length": 1024,
    }
    words = [f"--config.{k}={v}" for k, v in fields.items()]
    command = ["-m", "metagym.cli", "doctor", "--compile=debug", "--topology=v5e:2x2", "--json", *words]
    done = subprocess.run(
        [python if python.exists() else sys.executable, *command],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    gradient, update = report["programs"]
    assert report["chips"] == 4
    assert 0 < gradient["temporaries"] < 1e9
    each = report["parameters"] * 4 / 4  # bytes on a chip of one f32 copy
    assert update["arguments"] == pytest.approx(2 * each, rel=0.1)  # weights and gradient
    assert update["host"] == pytest.approx(2 * each, rel=0.1)  # moments
    assert gradient["host"] == 2 * 512 * 256 * 4  # of two layers, 512 tokens of a chip, width 256
    assert gradient["cycles"] > 0
    assert {"all-gather"} <= {c["kind"] for c in gradient["collectives"]}
