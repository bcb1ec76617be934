"""What runs inside a sandbox beside a foreign program: a way to the proxy, and an end for all it started.

    python3 forward.py PATH_OF_SOCKET PORT          forwards a port of the loopback to a unix socket
    python3 forward.py run SPEC.json                also runs a program: see `run`

Needs nothing but Python's standard library (3.8 or newer), so that the file can be mounted and run anywhere.
Prints the port once it listens; port 0 takes a free one.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys


async def _copy(reader, writer):
    with contextlib.suppress(ConnectionError):
        while True:
            data = await reader.read(1 << 16)
            if not data:
                break
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(RuntimeError, OSError):
        writer.write_eof()


async def serve(path, port):
    """Forwards connections to `port` of the loopback to the socket at `path`. Returns the asyncio server."""

    async def connected(reader, writer):
        try:
            there, back = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        up = asyncio.ensure_future(_copy(reader, back))
        down = asyncio.ensure_future(_copy(there, writer))
        # A program that hangs up must be seen at the other end.
        await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        if up.done() and not down.done():
            back.close()
        await asyncio.wait((down,))
        up.cancel()
        for end in (writer, back):
            end.close()

    return await asyncio.start_server(connected, "127.0.0.1", port)


async def run(spec):
    """Runs `spec["command"]`, a shell command, and ends everything that it started.

    `spec` has socket and port (socket None: nothing is forwarded), command, cwd, env, log (its output goes
    there) and status (a file that gets the exit code as JSON when all is over). SIGTERM ends it early.
    """
    if hasattr(ctypes, "CDLL"):  # what its children leave behind becomes ours, so that it can be found
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if spec["socket"]:
        await serve(spec["socket"], spec["port"])
    with open(spec["log"], "ab") as log:
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", spec["command"],
            cwd=spec["cwd"], env={**os.environ, **spec["env"]}, start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    waits = [asyncio.ensure_future(process.wait()), asyncio.ensure_future(stop.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    stopped = process.returncode is None
    if stopped:
        for pid in descendants(os.getpid()):
            _kill(pid, signal.SIGTERM)
        await asyncio.wait(waits[:1], timeout=2)
    empty = 0
    while empty < 3:  # a look at /proc can miss a process whose parent ends at that moment
        left = descendants(os.getpid())
        for pid in left:
            _kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        empty = 0 if left else empty + 1
        await asyncio.sleep(0.02)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(waits[0], 1)
    temporary = spec["status"] + ".new"
    with open(temporary, "w") as file:
        json.dump({"exit_code": process.returncode, "stopped": stopped}, file)
    os.rename(temporary, spec["status"])


def descendants(root):
    """Process ids below `root`, zombies left out."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
                if state != b"Z":
                    parents[int(name)] = int(parent)
    found, more = set(), {root}
    while more:
        more = {pid for pid, parent in parents.items() if parent in more} - found
        found |= more
    return found


def _kill(pid, number):
    with contextlib.suppress(OSError):
        os.kill(pid, number)


async def main(arguments):
    if arguments[0] == "run":
        with open(arguments[1]) as file:
            await run(json.load(file))
        return
    server = await serve(arguments[0], int(arguments[1]))
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
