"""An SGLang server as a process of ours: started, watched, ended with everything that it started."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from metagym.errors import EngineError
from metagym.live import Live

_GRACE_S = 5.0
# The group of the server ends when this process does, however it ends: then the pipe closes.
_KEEPER = """exec 3<&0
"$@" </dev/null 3<&- & server=$!
{ read _ <&3; rm -rf "$TMPDIR"; kill -KILL -$$; } & reader=$!
wait $server; code=$?
kill $reader; exit $code"""


class SGLangProcess(Live):
    """`python -m sglang.launch_server` on a port of this machine's loopback.

    Args:
      model: the folder that it serves first, and whose tokenizer it has.
      args: further flags, as SGLang has them ("--mem-fraction-static=0.4", "--tp=2").
      gpus: CUDA_VISIBLE_DEVICES of the server; None: as it is here.
      python: an interpreter that has sglang.
      log: file that its output is appended to.
      port: 0 takes a free one, and keeps it.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        args: Sequence[str] = (),
        gpus: str | None = None,
        python: str = "",
        port: int = 0,
        env: Mapping[str, str] | None = None,
    ):
        self.model, self.log = model, log
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._args, self._python = list(args), python or sys.executable
        self._env = {**os.environ, **(env or {}), **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})}
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None  # SGLang leaves its sockets there
        self._shared: set[Path] = set()  # and these, if it is killed

    def start(self, weights: Path | None = None, label: str = "default") -> None:
        """Starts it, or a new one in its place, with the weights of a folder. It is there when it answers."""
        self.stop()
        command = [self._python, "-m", "sglang.launch_server", "--model-path", str(weights or self.model)]
        command += ["--tokenizer-path", str(self.model), "--weight-version", label]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *self._args]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.TemporaryDirectory(prefix="metagym-sglang-", ignore_cleanup_errors=True)
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _KEEPER, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**self._env, "TMPDIR": self._scratch.name},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the process group; 0 before `start`."""
        return self._process.pid if self._process else 0

    def check(self) -> None:
        """Raises EngineError if it has ended, with the end of its output."""
        if self._process is None:
            return
        self._shared |= _shared(self._process.pid) if not self._shared else set()
        if (code := self._process.poll()) is None:
            return
        tail = self.log.read_bytes()[-2000:].decode(errors="replace") if self.log.exists() else ""
        raise EngineError(f"the SGLang server ended with code {code}; {self.log} ends with:\n{tail}")

    def stop(self) -> None:
        """Ends the server and all that it started. Idempotent."""
        if self._process is None:
            return
        self._shared |= _shared(self._process.pid)
        with contextlib.suppress(ProcessLookupError):  # raised once the whole group is gone
            os.killpg(self._process.pid, signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline:
                self._process.poll()
                os.killpg(self._process.pid, 0)
                time.sleep(0.05)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
        self._process = None
        for path in self._shared:
            path.unlink(missing_ok=True)
        self._shared.clear()
        if self._scratch is not None:
            self._scratch.cleanup()


def _shared(group: int) -> set[Path]:
    """Files in shared memory in which the processes of a group count what they do."""
    found: set[Path] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[2]) == group:
                lines = (stat.parent / "maps").read_text().splitlines()
                found |= {Path(line.split()[-1]) for line in lines if "/dev/shm/sglang_loads_" in line}
    return {path for path in found if path.exists()}


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
