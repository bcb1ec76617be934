"""Runs a package's tests once for each of many changed files, each in a fork of a process that has pytest.

Standard input is JSON: `args` for pytest, `mutants` (a list of [path, content]), `timeout_s` of each, and
`report`, the path to write to.
The report is a list in the same order: what the tests did, or null where they did not end.
"""

import json
import os
import signal
import sys

from runner import Recorder


def one(path, content, spec, report):
    """In the fork: changes the file and runs the tests."""
    os.setsid()
    with open(path, "w", newline="") as file:
        file.write(content)
    signal.alarm(int(spec["timeout_s"]))
    import pytest

    recorder = Recorder(None)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    pytest.main(spec["args"], plugins=[recorder])
    with open(report, "w") as file:
        told = {"outcomes": recorder.outcomes, "errors": recorder.errors, "messages": recorder.messages}
        json.dump(told, file)


def main():
    spec = json.loads(sys.stdin.read())
    sys.stdin = open(os.devnull)  # noqa: SIM115
    import pytest  # noqa: F401

    found = []
    for path, content in spec["mutants"]:
        with open(path, newline="") as file:
            before = file.read()
        part = spec["report"] + ".part"
        if os.path.exists(part):
            os.unlink(part)
        child = os.fork()
        if child == 0:
            try:
                one(path, content, spec, part)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with open(path, "w", newline="") as file:
            file.write(before)
        try:
            with open(part) as file:
                found.append(json.load(file))
        except (OSError, ValueError):
            found.append(None)
    with open(spec["report"], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
