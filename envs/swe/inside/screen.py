"""Runs a package's tests once for each of many changed files, each in a fork of a process that has pytest.

Standard input is JSON: `args` for pytest, `mutants` (a list of [path, content, node ids]), `timeout_s` and
`cpu_s` of each, and `report`, the path to write to.
The report is a list in the same order: what the tests did, or null where they did not end. Without `mutants`
the tests run once as they are, and the report says which functions each of them called: `functions` (a list
of [path, first line]) and `tests` (node id to indices; "" stands for what ran before any test), and `cpu_s`,
what a run takes that is not watched.
"""

import json
import os
import signal
import sys
import threading

from runner import Recorder


class Tracer(Recorder):
    """Notes the code that each test runs."""

    def __init__(self):
        super().__init__(None)
        self.code = {"": set()}
        self.now = self.code[""]

    def pytest_runtest_logstart(self, nodeid, location):
        self.now = self.code.setdefault(nodeid, set())

    def start(self):
        def note(frame, event, arg):
            if event == "call":
                self.now.add(frame.f_code)

        threading.setprofile(note)
        sys.setprofile(note)

    def report(self):
        sys.setprofile(None)
        root = os.getcwd() + os.sep
        places, tests = {}, {}
        for test, codes in self.code.items():
            inside = [c for c in codes if c.co_filename.startswith(root)]
            keys = sorted({(c.co_filename[len(root) :], c.co_firstlineno) for c in inside})
            tests[test] = [places.setdefault(key, len(places)) for key in keys]
        return {"functions": list(places), "tests": tests, "outcomes": self.outcomes}


def run(args, recorder):
    import pytest

    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    pytest.main(args, plugins=[recorder])


def trace(spec):
    """In the fork: runs the tests as they are."""
    tracer = Tracer()
    tracer.start()
    run(spec["args"], tracer)
    return tracer.report()


def one(spec, path, content, tests):
    """In the fork: changes the file and runs the tests."""
    os.setsid()
    with open(path, "w", newline="") as file:
        file.write(content)
    signal.alarm(int(spec["timeout_s"]))
    signal.setitimer(signal.ITIMER_PROF, spec["cpu_s"])
    recorder = Recorder(set(tests))
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    run([*spec["args"], *files], recorder)
    return {"outcomes": recorder.outcomes, "errors": recorder.errors, "messages": recorder.messages}


def forked(part, function, *args):
    """(what the function returns in a fork, None if that does not end by itself; its CPU seconds)."""
    if os.path.exists(part):
        os.unlink(part)
    child = os.fork()
    if child == 0:
        try:
            told = function(*args)
            with open(part, "w") as file:
                json.dump(told, file)
        finally:
            os._exit(0)
    used = os.wait4(child, 0)[2]
    cpu = used.ru_utime + used.ru_stime
    try:
        with open(part) as file:
            return json.load(file), cpu
    except (OSError, ValueError):
        return None, cpu


def main():
    spec = json.loads(sys.stdin.read())
    sys.stdin = open(os.devnull)  # noqa: SIM115
    import pytest  # noqa: F401

    part = spec["report"] + ".part"
    if spec["mutants"] is None:
        cpu = forked(part, run, spec["args"], Recorder(None))[1]
        found = forked(part, trace, spec)[0]
        if found is not None:
            found["cpu_s"] = cpu
    else:
        found = []
        for path, content, tests in spec["mutants"]:
            with open(path, newline="") as file:
                before = file.read()
            found.append(forked(part, one, spec, path, content, tests)[0])
            with open(path, "w", newline="") as file:
                file.write(before)
    with open(spec["report"], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
