"""The one persistent shell behind every sandbox: deadlines, output caps, decoding, ending what runs.

A supervisor (`SUPERVISOR`, a bash script) is the sandbox's process 1. It starts a bash that reads commands
from the same input, and starts another when that one ends. For the command

    printf '\\0B<nonce>\\0'; eval '<the command>' </dev/null; printf '\\0E<nonce> <exit code> <folder>\\0'

the output is what stands between the two marks, whose nonce is new each time: output of any kind, late output
of earlier commands included, can't be taken for another's. A deadline counts from the first mark, so that a
slow machine or daemon is never the command's fault. At the deadline the supervisor gets SIGUSR1 and ends
every process but itself (`kill -9 -1`, which the kernel does at once, so that a fork bomb can't outrun it).

Only bash is needed in the sandbox; files are read with `cat` and written with `head -c`.
"""

import os
import re
import secrets
import select
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from metagym.errors import SandboxError
from metagym.live import Live
from metagym.types import ExecResult

SUPERVISOR = r"""
exec 3<&0 </dev/null 2>/dev/null
trap 'kill -9 -1' USR1
while read -r go <&3; do
  (echo 500 >/proc/self/oom_score_adj; exec bash --noprofile --norc <&3 3<&-) 2>&1 &
  shell=$!
  while :; do wait $shell; status=$?; kill -0 $shell 2>/dev/null || break; done
  printf '\0X%s\0' $status
done
""".strip()
"""Process 1. As a child of another process 1 (`LocalSandbox`), `kill -9 -1` must be replaced."""

OUTPUT_CAP = 64 << 10  # bytes of output that a command may return
START_TIMEOUT_S = 60.0  # for a shell to answer at all: longer is infra
END_TIMEOUT_S = 20.0  # for everything to be ended after a deadline
_CHUNK = 1 << 16

_MARKS = re.compile(r"\0[BEX][0-9a-f]{1,16}[^\0]{0,4200}\0")  # of a command that ended as it was ended
_SIGNS = re.compile(r"Resource temporarily unavailable|Cannot allocate memory|No space left|Killed")

Limit = Literal["memory", "pids", "disk"]


class Channel(Protocol):
    """The supervisor's input and output."""

    def fileno(self) -> tuple[int, int]:
        """Descriptors to wait on: (readable, writable), both non-blocking."""
        ...

    def receive(self) -> bytes | None:
        """What has come; None: nothing yet; b"": the other end is gone. Raises OSError."""
        ...

    def send(self, data: memoryview) -> int:
        """Sends some of it; how many bytes. Raises OSError."""
        ...

    def close(self) -> None: ...


class Pipes:
    """A channel of two pipes."""

    def __init__(self, read: int, write: int):
        self._read, self._write = read, write
        os.set_blocking(read, False)
        os.set_blocking(write, False)

    def fileno(self) -> tuple[int, int]:
        return self._read, self._write

    def receive(self) -> bytes | None:
        try:
            return os.read(self._read, _CHUNK)
        except BlockingIOError:
            return None

    def send(self, data: memoryview) -> int:
        try:
            return os.write(self._write, data[:_CHUNK])
        except BlockingIOError:
            return 0

    def close(self) -> None:
        for descriptor in (self._read, self._write):
            if descriptor >= 0:
                os.close(descriptor)
        self._read = self._write = -1


class Capped:
    """Bytes of which the beginning and the end are kept, half of `cap` each."""

    def __init__(self, cap: int):
        self._half = cap // 2
        self._head, self._tail = bytearray(), bytearray()
        self.dropped = 0

    def add(self, data: bytes | bytearray | memoryview) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 2 * self._half + _CHUNK:
            self._trim()

    def _trim(self) -> None:
        over = len(self._tail) - self._half
        if over > 0:
            self.dropped += over
            del self._tail[:over]

    def bytes(self) -> bytes:
        self._trim()
        return bytes(self._head + self._tail)

    def text(self) -> str:
        """Decoded, what is not UTF-8 replaced, with a note where something was left out."""
        self._trim()
        parts = (self._head, self._tail) if self.dropped else (self._head + self._tail,)
        texts = [_MARKS.sub("", bytes(part).decode("utf-8", "replace")) for part in parts]
        return f"\n[... {self.dropped} bytes left out ...]\n".join(texts)


@dataclass(frozen=True)
class _Ran:
    status: int | None  # None: at the deadline
    ended: bool  # the shell ended with the command
    output: Capped
    seconds: float


class Shell:
    """The host's end of a supervisor.

    `interrupt` has the supervisor end everything (SIGUSR1, or what does the same). Raises SandboxError from
    every method once the supervisor is gone or does not answer.
    """

    def __init__(self, channel: Channel, interrupt: Callable[[], None], cwd: str):
        self._channel, self._interrupt = channel, interrupt
        self.cwd = cwd
        self._buffer = bytearray()
        self._broken: str | None = None
        self._begin()

    def _begin(self) -> None:
        """Starts a bash, in the last known folder."""
        where = shlex.quote(self.cwd)
        self._write(f"go\nexec 9>&1 2>&1; cd {where} 2>/dev/null || cd /\n".encode())

    def run(self, script: str, timeout: float, cap: int = OUTPUT_CAP, data: bytes | None = None) -> _Ran:
        """Runs a line of shell. `data` is what a command in it that reads descriptor 0 finds there."""
        nonce = secrets.token_hex(8)
        body = script if data is not None else f"eval {shlex.quote(script)} </dev/null >&9 2>&1"
        mark = f'command printf "\\0E{nonce} %s %s\\0" "$?" "$PWD" >&9'
        sent = f"command printf '\\0B{nonce}\\0' >&9; {body}\n".encode()
        after = f"{mark}\n".encode()
        output = Capped(cap)
        self._wait(f"\0B{nonce}\0".encode(), sent, START_TIMEOUT_S)
        begun = time.monotonic()
        found = self._until_end(nonce, (data or b"") + after, begun + timeout, output)
        seconds = time.monotonic() - begun
        if found is None:
            self._interrupt_all(output)
            return _Ran(None, True, output, seconds)
        if found[:1] == b"X":
            self._begin()
            return _Ran(int(found[1:]), True, output, seconds)
        _, status, cwd = found.split(b" ", 2)
        self.cwd = os.fsdecode(cwd)
        return _Ran(int(status), False, output, seconds)

    def _interrupt_all(self, output: Capped) -> None:
        try:
            self._interrupt()
        except ProcessLookupError as error:
            raise self._fail("it ended during a command") from error
        end = self._until_end("", b"", time.monotonic() + END_TIMEOUT_S, output)
        if end is None:
            raise self._fail(f"its processes could not be ended within {END_TIMEOUT_S:g} s")
        self._begin()

    def _until_end(self, nonce: str, data: bytes, deadline: float, output: Capped) -> bytes | None:
        """What the end mark says (`E... status folder` or `Xstatus`), None if the deadline came first."""
        mark = re.compile(
            rb"\0(E%s [0-9]+ [^\0]*|X[0-9]+)\0" % nonce.encode() if nonce else rb"\0(X[0-9]+)\0"
        )
        rest = memoryview(data)
        while True:
            match = mark.search(self._buffer)
            if match:
                found = bytes(match[1])
                output.add(self._buffer[: match.start()])
                del self._buffer[: match.end()]
                return found
            # A mark is at most a path long: what is before that can't be the beginning of one.
            cut = self._buffer.rfind(b"\0", max(0, len(self._buffer) - 4200))
            keep = len(self._buffer) - cut if cut >= 0 else 0
            output.add(self._buffer[: len(self._buffer) - keep])
            del self._buffer[: len(self._buffer) - keep]
            if not self._pump(rest, deadline):
                output.add(self._buffer)
                self._buffer.clear()
                return None
            rest = rest[self._sent :]

    def _wait(self, mark: bytes, data: bytes, timeout: float) -> None:
        """Drops everything up to a mark."""
        deadline, rest = time.monotonic() + timeout, memoryview(data)
        while (at := self._buffer.find(mark)) < 0:
            del self._buffer[: -len(mark)]
            if not self._pump(rest, deadline):
                raise self._fail(f"its shell did not answer within {timeout:g} s")
            rest = rest[self._sent :]
        del self._buffer[: at + len(mark)]

    def _pump(self, rest: memoryview, deadline: float) -> bool:
        """Sends and receives something; False at the deadline. How much was sent is in `_sent`."""
        if self._broken:
            raise SandboxError(f"the sandbox is gone: {self._broken}.")
        self._sent = 0
        readable, writable = self._channel.fileno()
        wait = deadline - time.monotonic()
        if wait <= 0:
            return False
        poller = select.poll()
        poller.register(readable, select.POLLIN)
        if len(rest):
            poller.register(writable, select.POLLOUT | (select.POLLIN if writable == readable else 0))
        events = dict(poller.poll(min(wait, 3600.0) * 1000))
        try:
            if len(rest) and events.get(writable, 0) & (select.POLLOUT | select.POLLERR | select.POLLHUP):
                self._sent = self._channel.send(rest)
            if events.get(readable, 0) & ~select.POLLOUT:
                data = self._channel.receive()
                if data == b"":
                    raise self._fail("it ended")
                self._buffer += data or b""
        except OSError as error:
            raise self._fail(f"{type(error).__name__}: {error}") from error
        return True

    def _write(self, data: bytes) -> None:
        rest, deadline = memoryview(data), time.monotonic() + START_TIMEOUT_S
        while len(rest):
            if not self._pump(rest, deadline):
                raise self._fail("it takes no input")
            rest = rest[self._sent :]

    def _fail(self, why: str) -> SandboxError:
        self._broken = self._broken or why
        return SandboxError(f"the sandbox is gone: {why}.")

    def close(self) -> None:
        self._broken = self._broken or "it was closed"
        self._channel.close()


class ShellSandbox(Live):
    """A `Sandbox` on a shell. Subclasses say how limits are looked at and how it ends."""

    def __init__(self, id: str, shell: Shell, cap: int = OUTPUT_CAP):
        self.id, self.cap = id, cap
        self._shell = shell
        self._lock = threading.Lock()
        self.closed = False

    def exec(
        self,
        command: str,
        timeout: float,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        script = command.replace("\0", "")
        if stdin is not None:
            file = f"/tmp/.stdin-{secrets.token_hex(8)}"
            self.write(file, stdin)
            script = f"{{ rm -f {file}; eval {shlex.quote(script)}; }} <{file}"
        if cwd is not None or env:
            sets = "".join(f"export {name}={shlex.quote(value)}; " for name, value in (env or {}).items())
            where = f"cd {shlex.quote(cwd)} || exit 1; " if cwd is not None else ""
            script = f"( {where}{sets}eval {shlex.quote(script)} )"
        with self._lock:
            try:
                ran = self._shell.run(script, timeout, self.cap)
            except SandboxError:
                if limit := self._limit(None, gone=True):
                    text = f"[the sandbox was ended: it hit its {limit} limit]"
                    return ExecResult(text, None, limit=limit)
                raise
            text = ran.output.text()
            limit = self._limit(ran.status) if ran.status != 0 or _SIGNS.search(text) else None
        result = ExecResult(text, ran.status, ran.status is None, limit, ran.output.dropped, ran.seconds)
        if result.timed_out:
            note = f"[no end within {timeout:g} s: every process was ended, a new shell was started]"
        elif ran.ended:
            note = "[the shell ended; a new one was started, exported variables are gone]"
        else:
            return result
        text = result.output
        return replace(result, output=text + ("\n" if text and not text.endswith("\n") else "") + note + "\n")

    def read(self, path: str, limit: int = 64 << 20) -> bytes:
        with self._lock:
            script = f"test -f {shlex.quote(path)} && cat -- {shlex.quote(path)} 2>/dev/null"
            ran = self._shell.run(script, START_TIMEOUT_S, 2 * limit + 2)
        if ran.status != 0:
            raise FileNotFoundError(f"no file {path!r} can be read in the sandbox")
        content = ran.output.bytes()
        if len(content) > limit:
            raise OSError(f"{path!r} is longer than {limit} bytes")
        return content

    def write(self, path: str, content: bytes) -> None:
        where, folder = shlex.quote(path), shlex.quote(os.path.dirname(path) or ".")
        script = f"mkdir -p -- {folder} && : > {where}"
        if content:  # every byte is taken, whatever fails: none must be left for the shell to read
            script = (
                f"head -c {len(content)} | "
                f"{{ {{ mkdir -p -- {folder} && cat > {where}; }}; s=$?; cat >/dev/null; exit $s; }}"
            )
        with self._lock:
            ran = self._shell.run(script, START_TIMEOUT_S, data=content or None)
        if ran.status != 0:
            raise OSError(f"{path!r} can't be written in the sandbox: {ran.output.text().strip()[-300:]}")

    def _limit(self, status: int | None, gone: bool = False) -> Limit | None:
        """The limit that was hit since the last look, by a command of that exit code. `gone`: the sandbox
        ended by itself."""
        return None

    def close(self) -> None:
        raise NotImplementedError
