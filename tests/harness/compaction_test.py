"""Told a small window, a program asks for a summary when the true counts fill it, and goes on from that."""

import json
from collections import defaultdict

import pytest

from .conftest import END, harnesses
from .end_to_end_test import SCRIPTS
from .faults_test import trained_once


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


WINDOWS = {"opencode": 53_000, "codex": 48_000, "claude-code": 62_000, "qwen-code": 90_000}
SUMMARY = "Summary so far: calc.py subtracts where it should add; its sign has to be changed."
# Qwen Code takes what stands in these tags, and no summary without them.
TAGGED = f"<analysis>\nThe file was read.\n</analysis>\n<state_snapshot>\n{SUMMARY}\n</state_snapshot>"
# A long answer of a tool first, so that the usage that is told fills the window.
LONG = {
    "codex": call("exec_command", cmd="head -c 24000 /dev/zero | tr '\\0' x"),
    "claude-code": call("Bash", command="head -c 24000 /dev/zero | tr '\\0' x", description="long"),
    "qwen-code": call(
        "run_shell_command", command="head -c 24000 /dev/zero | tr '\\0' x", is_background=False
    ),
    "opencode": call("bash", command="head -c 24000 /dev/zero | tr '\\0' x", description="long"),
}


@harnesses(LONG)
@pytest.mark.timeout(600)
def test_compaction_that_usage_forces(harness, play, renderer):
    """The summary trains, as a compaction where its request has no tools; what follows is a branch;
    every reply trains once."""
    fix = SCRIPTS[harness.name][1]
    summary = TAGGED if harness.name == "qwen-code" else SUMMARY

    def say(prompt):
        last = prompt.rpartition("<|im_start|>user")[2]
        asked = "summar" in last.lower() or "state_snapshot" in last
        if asked and SUMMARY not in last and "tool_response" not in last:
            return summary
        if "<tools>" not in prompt:
            return "A short title."
        if SUMMARY not in prompt:
            return "I look.\n" + LONG[harness.name]
        return "Fixed add." if fix[:7] in prompt.partition(SUMMARY)[2] else fix

    played = play(harness, say, window=WINDOWS[harness.name])
    session = played.opened.session
    told = (played.outcome, session.metrics, [t.kind for t in session.traces])
    assert "return a + b" in played.calc, told
    texts: dict[str, str] = defaultdict(str)
    for trace in session.traces:
        texts[trace.kind] += renderer.decode(trace.tokens[trace.trainable])
    # Claude Code's request for a summary has its tools: it goes on in the main branch.
    assert summary + END in texts["main" if harness.name == "claude-code" else "compaction"], told
    mains = [renderer.decode(t.tokens[~t.sampled]) for t in session.traces if t.kind == "main"]
    assert any(SUMMARY in prompt for prompt in mains), "the conversation goes on from the summary"
    assert trained_once(session) >= 4, told
