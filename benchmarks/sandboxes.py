"""How fast sandboxes are: start, command, snapshot, memory. Prints medians and the 90th percentile.

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
    p90 = sorted(values)[int(0.9 * len(values))]
    print(f"{name:44s} median {statistics.median(values):8.2f} ms   p90 {p90:8.2f} ms")


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


def measure(name: str, factory, start: Callable[[], object], times: int) -> None:
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
    measure("bubblewrap", factory, lambda: factory.start("host", mounts), 20)
    sandbox = factory.start("host", mounts)
    sandbox.exec("echo x >x", 10)
    image = factory.snapshot(sandbox)
    tell("bubblewrap: restore, to first command", timed(lambda: factory.start(image).exec(":", 10), 20))
    factory.close()
    before, factory = resident_kb(), BubblewrapFactory(ledger=folder / "ledger")
    live = [factory.start("host", mounts) for _ in range(64)]
    print(f"bubblewrap: {len(live)} live sandboxes take {(resident_kb() - before) / 1024:.0f} MB")
    factory.close()
    if len(sys.argv) > 1:
        docker = DockerFactory(host=os.environ.get("DOCKER_HOST"), ledger=folder / "ledger")
        usr = [Mount("/usr", "/usr")]
        measure("docker", docker, lambda: docker.start(sys.argv[1], usr), 5)
        docker.close()


if __name__ == "__main__":
    main()
