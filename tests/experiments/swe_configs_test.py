"""The recipe for software engineering at full size: its steps are lowered for their mesh, without weights."""

import os
import subprocess
import sys

import pytest

LOWER = """
import jax
from metagym.experiments import compile, config as config_lib
config = config_lib.load("{name}")
config_lib.check(config)
mesh, programs = compile.step_programs(config, jax.devices())
assert mesh.size == {chips}, mesh
texts = {{}}
with jax.set_mesh(mesh):
    for name, (program, arguments) in programs.items():
        texts[name] = program.lower(*arguments).as_text()
parameters = sum(x.size for x in jax.tree.leaves(programs["update"][1][0].params))
print(round(parameters / 1e9, 1), "tensor<{tokens}xi32>" in texts["gradient"], len(texts["update"]) > 10000)
print(config.model.replay, "tensor<{tokens}x384xi32>" in texts["gradient"])
print(config.algorithm.name, config.agent.max_turns, config.sampling.context)
"""
QWEN_72B = (256, "16x131072", "72.7 True True", "False False")
# 30B-A3B replays what 48 layers chose, eight experts for each token: 384 numbers.
QWEN_30B = (64, "8x65536", "30.5 True True", "True True")
TOLD = {
    "swe_rft": (*QWEN_72B, "rft 40 65536"),
    "swe_dapo_stage1": (*QWEN_72B, "dapo 40 65536"),
    "swe_dapo_stage2": (*QWEN_72B, "dapo 80 131072"),
    "swe_harness": (*QWEN_30B, "gspo 100 65536"),
}


@pytest.mark.parametrize("name", TOLD)
def test_the_step_at_full_size_lowers(name):
    chips, tokens, *told = TOLD[name]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={chips}"
    code = LOWER.format(name=name, chips=chips, tokens=tokens)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == told
