"""The terminal and TensorBoard: what is shown where, and what is on disk when a run is killed."""

import io
import math
import os
import signal
import subprocess
import sys

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from metagym.experiments.tracking import Console, Together
from metagym.rl.metrics import TensorBoardTracker


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_file_gets_plain_lines():
    out = io.StringIO()
    console = Console(3, {"loss": "loss"}, out)
    console.log(0, {"loss": 0.123456, "other": 1.0})
    console.log(1, {"loss": -2.0, "kl": math.nan})
    console.close()
    first, second = out.getvalue().splitlines()
    assert first == "step 0/3  loss 0.123"
    assert second.startswith("step 1/3  loss -2  kl nan")
    assert second.endswith("left")
    assert "\r" not in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_one_line_that_is_written_over():
    out = Terminal()
    console = Console(3, {"loss": "loss"}, out)
    console.log(1, {"loss": 0.5})
    console.log(2, {"loss": 0.5})
    console.log(2, {"eval/room": 0.5})
    assert "\n" not in out.getvalue()
    console.write("evaluated")
    console.log(3, {"loss": 0.5})
    console.close()
    assert out.getvalue().count("\n") == 2
    assert "\r\x1b[Kevaluated\n" in out.getvalue()


def events(folder):
    """The scalars of the event files of a folder: (step, name, value), checksums verified."""
    found = []
    for path in sorted(folder.glob("events.*")):
        data, at = path.read_bytes(), 0
        while at + 12 <= len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            body = data[at + 12 : at + 12 + length]
            assert int.from_bytes(data[at + 12 + length : at + 16 + length], "little") == masked_crc32c(body)
            event = Event.FromString(body)
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            at += 16 + length
    return found


def test_steps_are_on_disk_when_the_process_is_killed(tmp_path):
    code = (
        "import os, pathlib, sys\nfrom metagym.rl.metrics import TensorBoardTracker\n"
        "board = TensorBoardTracker(pathlib.Path(sys.argv[1]))\n"
        "for step in range(3): board.log(step, {'reward': step / 2})\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=os.environ)
    assert done.returncode == -signal.SIGKILL
    assert [e for e in events(tmp_path) if e[1] == "reward"] == [(s, "reward", s / 2) for s in range(3)]


def test_nan_stays_nan(tmp_path):
    board = Together([TensorBoardTracker(tmp_path), Console(1, {}, io.StringIO())])
    board.log(1, {"loss": math.nan, "kl": math.inf})
    board.close()
    values = {name: value for _, name, value in events(tmp_path)}
    assert math.isnan(values["loss"])
    assert values["kl"] == math.inf
