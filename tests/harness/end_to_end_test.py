"""The real programs read a file, edit it and finish; every token of it is where it came from."""

import json

import numpy as np
import pytest

from metagym.types import Why

from .conftest import END, harnesses


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


FILE = "/workspace/calc.py"
# What the model says in each turn, with the tools that each harness brings.
SCRIPTS = {
    "mini-swe-agent": [
        "I look.\n" + call("bash", command="cat calc.py") + "\n" + call("bash", command="git log --oneline"),
        "<think>\na sign\n</think>\n\nFixing.\n" + call("bash", command="sed -i 's/a - b/a + b/' calc.py"),
        "Done.\n" + call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git diff"),
    ],
    "claude-code": [
        "I look.\n" + call("Read", file_path=FILE) + "\n" + call("Bash", command="git log", description="l"),
        "<think>\na sign\n</think>\n\nFixing.\n"
        + call("Edit", file_path=FILE, old_string="a - b", new_string="a + b", replace_all=False),
        "Fixed add.",
    ],
    "codex": [
        "<think>\nlook first\n</think>\n\nI look.\n"
        + call("exec_command", cmd="cat calc.py") + "\n" + call("exec_command", cmd="git log --oneline"),
        "Fixing.\n" + call("exec_command", cmd="sed -i 's/a - b/a + b/' calc.py"),
        "Fixed add.",
    ],
    "qwen-code": [
        "<think>\nlook first\n</think>\n\nI look.\n"
        + call("read_file", file_path=FILE) + "\n"
        + call("run_shell_command", command="git log --oneline", is_background=False),
        "Fixing.\n" + call("edit", file_path=FILE, old_string="return a - b", new_string="return a + b"),
        "Fixed add.",
    ],
    "opencode": [
        "<think>\nlook first\n</think>\n\nI look.\n"
        + call("read", filePath=FILE) + "\n" + call("bash", command="git log --oneline", description="l"),
        "Fixing.\n" + call("edit", filePath=FILE, oldString="return a - b", newString="return a + b"),
        "Fixed add.",
    ],
    "openhands": [
        "I look.\n" + call("file_editor", command="view", path=FILE) + "\n" + call("terminal", command="ls"),
        "Fixing.\n"
        + call("file_editor", command="str_replace", path=FILE, old_str="a - b", new_str="a + b"),
        call("finish", message="Fixed add."),
    ],
    "terminus-2": [
        json.dumps({"analysis": "a", "plan": "p", "task_complete": False,
                    "commands": [{"keystrokes": f"cat {FILE}\n", "duration": 0.5}]}),
        json.dumps({"analysis": "a", "plan": "p", "task_complete": False,
                    "commands": [{"keystrokes": f"sed -i 's/a - b/a + b/' {FILE}\n", "duration": 0.5}]}),
        json.dumps({"analysis": "a", "plan": "p", "task_complete": True, "commands": []}),
        json.dumps({"analysis": "a", "plan": "p", "task_complete": True, "commands": []}),
    ],
}  # fmt: skip


def scripted(harness):
    """The model: the next turn of the main conversation; a title for requests without tools."""
    script = SCRIPTS[harness.name]
    with_tools = harness.name != "terminus-2"

    def say(prompt):
        if with_tools and "<tools>" not in prompt:
            return "A short title."
        turn = sum(prompt.count(f"<|im_start|>assistant\n{s[:12]}") > 0 for s in script[:-1])
        if harness.name == "terminus-2":
            turn = prompt.count("<|im_start|>assistant\n{")
        return script[min(turn, len(script) - 1)]

    return say


@harnesses(SCRIPTS, in_ci=("mini-swe-agent", "claude-code", "codex", "qwen-code", "opencode"))
@pytest.mark.timeout(600)
def test_the_whole_episode(harness, play, renderer):
    played = play(harness, scripted(harness))
    session = played.opened.session
    told = (played.outcome, session.metrics)
    assert "return a + b" in played.calc, told
    assert played.outcome.stopped == "", told
    assert played.left.strip() == "", "something of it is left"

    traces = session.traces
    (main,) = [t for t in traces if t.kind == "main"]
    said = [[*renderer.encode_text(s), renderer.end_of_turn] for s in SCRIPTS[harness.name]]
    # Token by token: the sampled spans are what the model said, in order; before each stands its prompt.
    assert main.tokens[main.sampled].tolist() == [t for s in said for t in s]
    assert (main.trainable == main.sampled).all()
    prompts = [list(p) for p, _ in played.backend.calls]
    for turn in sorted(set(main.turn[main.sampled].tolist())):
        start = int(np.flatnonzero((main.turn == turn) & main.sampled)[0])
        assert main.tokens[:start].tolist() == prompts[turn]
    text = renderer.decode(main.tokens)
    assert text.count("return a - b") >= 1, "the model saw the file"
    begun, ended = (main.tokens == renderer._tokenizer.token_to_id(c) for c in ("<|im_start|>", END))
    assert begun.sum() == ended.sum()
    # The template has a line's end between the two; the file has not.
    assert not (ended[:-1] & begun[1:]).any(), "what stands in the file is text"
    for other in traces:
        if other.kind == "side":
            assert not other.trainable.any()
            assert set(other.why[other.sampled].tolist()) == {Why.EXCLUDED}
    assert session.metrics["not_append_only"] == 0
    assert session.metrics["malformed_calls"] == 0
    assert session.metrics["superseded"] == 0
    assert sum(int(t.trainable.sum()) for t in traces) == sum(map(len, said))
