"""A session of the real program, exported, is read by those who made the format."""

import json
import subprocess

import pytest

from metagym.proxy import export

from .conftest import harnesses
from .end_to_end_test import scripted

READ = """
import json, sys
from harbor.models.trajectories import Trajectory
read = Trajectory.model_validate(json.load(sys.stdin))
print(read.schema_version, len(read.steps), sum(s.metrics is not None for s in read.steps))
"""


@harnesses(["terminus-2"])
@pytest.mark.timeout(600)
def test_atif_is_read_by_harbor(harness, play):
    session = play(harness, scripted(harness)).opened.session
    told = export.atif(session, reward=1.0, name="terminus")
    command = [harness.folder / "bin" / "python", "-c", READ]
    read = subprocess.run(command, input=json.dumps(told), capture_output=True, text=True)
    assert read.returncode == 0, read.stderr[-3000:]
    version, steps, sampled = read.stdout.split()
    assert version == told["schema_version"]
    assert (int(steps), int(sampled)) == (len(told["steps"]), int(session.metrics["calls"]))
