"""Settings of all tests: 8 virtual devices on the CPU, and no unexpected skip in CI."""

import os
from pathlib import Path

# Before anything imports jax. The device count is what the sharding tests split over.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest

ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")


def allowed_skips() -> tuple[str, ...]:
    """The node ids, or beginnings of node ids, of the tests that may be skipped in CI."""
    lines = (line.split("#")[0].split() for line in ALLOWED_SKIPS.read_text().splitlines())
    return tuple(words[0] for words in lines if words)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a test that was skipped without being on the list fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get("CI"):
        return
    unlisted = [r for r in reporter.stats.get("skipped", []) if not r.nodeid.startswith(allowed_skips())]
    for report in unlisted:
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        reporter.write_line(f"not in tests/allowed_skips.txt: {report.nodeid}: {reason}", red=True)
    if unlisted:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
