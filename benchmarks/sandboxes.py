"""How fast sandboxes are: start, command, snapshot, memory. Prints medians, and the 10th and 90th percentile.

python benchmarks/sandboxes.py              bubblewrap
python benchmarks/sandboxes.py IMAGE        and Docker with that image, at $DOCKER_HOST
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from metagym.envs.swe.bubblewrap import BubblewrapFactory, own
from metagym.envs.swe.docker import DockerFactory
from metagym.types import Mount


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Milliseconds of each call."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def tell(name: str, values: list[float]) -> None:
    low, high = (sorted(values)[int(share * len(values))] for share in (0.1, 0.9))
    middle = statistics.median(values)
    print(f"{name:40s} {middle:8.2f} ms   p10 {low:8.2f}   p90 {high:8.2f}   n {len(values)}", flush=True)


def resident_kb() -> int:
    """Proportional memory of every process of the sandboxes' user, in kB."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == 64000:
                lines = (folder / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except OSError:
            continue
    return total


def measure(name: str, factory, start: Callable[[], object], times: int, again=()) -> None:
    """`again` are the mounts that a snapshot is started with."""

    def first_command():
        sandbox = start()
        sandbox.exec(":", 10)
        made.append(sandbox)

    made: list = []
    tell(f"{name}: start to first command", timed(first_command, times))
    sandbox = made[0]
    own_time = timed(lambda: sandbox.exec(":", 10), 300)
    tell(f"{name}: a command that does nothing", own_time)
    sandbox.exec("for i in 1 2 3 4 5; do echo $i >f$i; done", 10)
    images: list[str] = []
    tell(f"{name}: snapshot", timed(lambda: images.append(factory.snapshot(sandbox)), times))

    def restore():
        made.append(factory.start(images[0], again))
        made[-1].exec(":", 10)

    tell(f"{name}: restore, to first command", timed(restore, times))
    for each in made:
        each.close()


def main() -> None:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    (folder / "repo").mkdir()
    (folder / "repo" / "a.txt").write_text("a\n")
    own(folder / "repo")
    folder.chmod(0o755)
    factory = BubblewrapFactory(ledger=folder / "ledger")
    mounts = [Mount(str(folder / "repo"), "/testbed", write=True)]
    measure("bubblewrap", factory, lambda: factory.start("host", mounts), 40)
    factory.close()
    before, factory = resident_kb(), BubblewrapFactory(ledger=folder / "ledger")
    live = [factory.start("host", mounts) for _ in range(64)]
    print(f"bubblewrap: {len(live)} live sandboxes take {(resident_kb() - before) / 1024:.0f} MB")
    factory.close()
    if len(sys.argv) > 1:
        docker = DockerFactory(host=os.environ.get("DOCKER_HOST"), ledger=folder / "ledger")
        usr = [Mount("/usr", "/usr")]
        measure("docker", docker, lambda: docker.start(sys.argv[1], usr), 10, usr)
        docker.close()


if __name__ == "__main__":
    main()
