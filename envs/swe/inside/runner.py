"""Runs pytest in a sandbox and writes what happened as JSON. Needs Python 3.6 and pytest, nothing of ours.

Standard input is JSON: `nonce` (repeated in the report, so that a report can't be made beforehand), `args`
for pytest, `only` (node ids; null: all), `report` (the path to write to).
"""

import json
import os
import sys


class Recorder:
    """A pytest plugin that notes every test and collector."""

    def __init__(self, only):
        self.only = only
        self.collected = []
        self.outcomes = {}
        self.errors = {}
        self.messages = {}

    def pytest_collection_modifyitems(self, config, items):
        if self.only is not None:
            # Published names may be cut off at their first blank, others have no parameters.
            items[:] = [i for i in items if self.names(i.nodeid) & self.only]

    @staticmethod
    def names(test):
        return {test, test.split(" ")[0], test.split("[")[0]}

    def pytest_collection_finish(self, session):
        self.collected = [item.nodeid for item in session.items]

    def pytest_exception_interact(self, node, call, report):
        if node.nodeid not in self.errors:
            self.errors[node.nodeid] = call.excinfo.typename
            self.messages[node.nodeid] = call.excinfo.exconly()[:300]

    def pytest_collectreport(self, report):
        if report.failed:
            self.outcomes[report.nodeid] = "error"

    def pytest_runtest_logreport(self, report):
        outcome = self.outcomes.get(report.nodeid, "passed")
        if report.failed:
            outcome = "failed" if report.when == "call" else "error"
        elif report.skipped and outcome == "passed":
            outcome = "xfailed" if hasattr(report, "wasxfail") else "skipped"
        self.outcomes[report.nodeid] = outcome


def main():
    spec = json.loads(sys.stdin.read())
    sys.stdin = open(os.devnull)  # noqa: SIM115
    import pytest

    only = spec["only"]
    recorder = Recorder(None if only is None else set(only))
    code = int(pytest.main(spec["args"], plugins=[recorder]))
    report = {
        "nonce": spec["nonce"],
        "exit_code": code,
        "collected": recorder.collected,
        "outcomes": recorder.outcomes,
        "errors": recorder.errors,
    }
    with open(spec["report"], "w") as file:
        json.dump(report, file)
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
