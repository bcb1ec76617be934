"""`make scale`: the rows of docs/scale.md, each compiled in a process of its own, against its bound."""

import json
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A training step and the GB of a chip that it has to fit in."""

    config: str
    topology: str
    bound: float
    fields: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        fields = [f"--config.{f}" for f in self.fields]
        return ["metagym", "doctor", f"--compile={self.config}", f"--topology={self.topology}", *fields]


ROWS = (
    Row("scale_qwen25_7b", "v6e:4x4", 32),
    Row("scale_qwen25_72b", "v5p:8x8x4", 46),
    Row("scale_qwen25_72b", "v5p:4x4x8", 51, ("mesh.fsdp=8", "batch.rows=8")),
    Row("scale_qwen25_72b", "v5p:4x4x4", 61, ("mesh.fsdp=4", "batch.rows=4")),
    Row("scale_qwen3_30b", "v5p:4x4x4", 95),
)


def main(words: list[str]) -> int:
    """Prints a line a row (those whose command holds every one of `words`); 1 if one is beyond its bound."""
    failed = False
    for row in ROWS:
        command = " ".join(row.command)
        if not all(w in command for w in words):
            continue
        program = [sys.executable, "-m", "metagym.cli", *row.command[1:], "--json"]
        done = subprocess.run(program, stdout=subprocess.PIPE, text=True)
        report = json.loads(done.stdout) if done.stdout.strip() else None
        peak = report["peak"] / 1e9 if report else float("inf")
        failed |= peak > row.bound
        verdict = "ok  " if peak <= row.bound else "FAIL"
        print(f"{verdict} {peak:6.2f} of {row.bound:.0f} GB a chip: {command}", flush=True)
        if report:
            (best, worst), (most, least) = report["seconds"], report["mfu"]
            compiled = sum(p["compile_s"] for p in report["programs"])
            print(
                f"     {report['model_flops'] / 1e15:.1f} PFLOP, {best:.1f} to {worst:.1f} s a step, MFU "
                f"{least:.0%} to {most:.0%}, compiled in {compiled:.0f} s",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
