"""How fast sandboxes are: start, command, snapshot, memory. Prints medians and the 99th percentile.

python benchmarks/sandboxes.py              bubblewrap
python benchmarks/sandboxes.py IMAGE        and Docker, with that image and /usr from here, at $DOCKER_HOST
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from metagym.envs.swe.bubblewrap import BubblewrapFactory, own
from metagym.envs.swe.docker import DockerFactory
from metagym.protocols import Sandbox, SandboxFactory
from metagym.types import Mount

LIVE = 64


def timed(call: Callable[[], object], times: int, after: Callable[[], object] = lambda: None) -> list[float]:
    """Milliseconds of each call. `after` follows each, and is not counted."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e3)
        after()
    return found


def tell(name: str, values: list[float]) -> None:
    high = sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
    middle = statistics.median(values)
    print(f"{name:45s} {middle:8.2f} ms   p99 {high:8.2f}   n {len(values)}", flush=True)


def resident_kb() -> int:
    """Proportional memory of every process of this machine, in kB."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = (folder / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def measure(
    name: str,
    factory: SandboxFactory,
    image: str,
    mounts: Sequence[Mount],
    again: Sequence[Mount],
    times: int,
) -> None:
    """`again` are the mounts that a snapshot is started with."""
    made: list[Sandbox] = []

    def start(image: str, mounts: Sequence[Mount]) -> None:
        made.append(factory.start(image, mounts))
        made[-1].exec(":", 60)

    def end() -> None:
        made.pop().close()

    start(image, mounts)
    end()
    tell(f"{name}: start to first command", timed(lambda: start(image, mounts), times, end))
    sandbox = factory.start(image, mounts)
    sandbox.exec(":", 60)
    tell(f"{name}: a command that does nothing", timed(lambda: sandbox.exec(":", 60), 2000))
    sandbox.exec("for i in 1 2 3 4 5; do echo $i >f$i; done", 60)
    images: list[str] = []
    tell(f"{name}: snapshot", timed(lambda: images.append(factory.snapshot(sandbox)), times))
    tell(f"{name}: restore, to first command", timed(lambda: start(images[0], again), times, end))
    sandbox.close()
    before = resident_kb()
    live = [factory.start(image, mounts) for _ in range(LIVE)]
    print(f"{name}: {LIVE} live sandboxes take {(resident_kb() - before) / 1e6:.2f} GB", flush=True)
    for each in live:
        each.close()
    factory.close()


def main() -> None:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    (folder / "repo").mkdir()
    (folder / "repo" / "a.txt").write_text("a\n")
    own(folder / "repo")
    folder.chmod(0o755)
    repo, usr = Mount(str(folder / "repo"), "/testbed", write=True), Mount("/usr", "/usr")
    measure("bubblewrap", BubblewrapFactory(ledger=folder / "ledger"), "host", [repo], [], 200)
    if len(sys.argv) > 1:
        docker = DockerFactory(host=os.environ.get("DOCKER_HOST"), ledger=folder / "ledger")
        measure("docker", docker, sys.argv[1], [repo, usr], [usr], 20)


if __name__ == "__main__":
    main()
