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
assert mesh.size == 256, mesh
texts = {{}}
with jax.set_mesh(mesh):
    for name, (program, arguments) in programs.items():
        texts[name] = program.lower(*arguments).as_text()
parameters = sum(x.size for x in jax.tree.leaves(programs["update"][1][0].params))
print(round(parameters / 1e9, 1), "tensor<16x131072xi32>" in texts["gradient"], len(texts["update"]) > 10000)
print(config.algorithm.name, config.agent.max_turns, config.sampling.context)
"""
TOLD = {
    "swe_rft": "rft 40 65536",
    "swe_dapo_stage1": "dapo 40 65536",
    "swe_dapo_stage2": "dapo 80 131072",
}


@pytest.mark.parametrize("name", TOLD)
def test_the_step_of_72_billion_parameters_lowers(name):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=256"}
    done = subprocess.run(
        [sys.executable, "-c", LOWER.format(name=name)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = done.stdout.splitlines()
    assert first == "72.7 True True"
    assert second == TOLD[name]
