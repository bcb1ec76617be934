"""What is exported is what was recorded."""

import json

import numpy as np
import pytest

from metagym.errors import InputError
from metagym.proxy import export
from metagym.proxy.render import Renderer
from metagym.proxy.session import Request, Session
from metagym.testing import ScriptedBackend
from metagym.types import Message

from .conftest import BASH, KEEPS_THOUGHTS, hermes


@pytest.fixture
def session(model_dir):
    renderer = Renderer.from_dir(model_dir, KEEPS_THOUGHTS)
    said = ["<think>\nhm\n</think>\n\nI run.\n" + hermes(command="ls"), "done", "other"]
    backend = ScriptedBackend([[*renderer.encode_text(r), 2] for r in said])
    session = Session(backend, renderer, context=4096)
    talk = [Message("system", "S"), Message("user", "go")]
    for _ in range(2):
        call = session.submit(session.plan(Request(tuple(talk), tools=(BASH,))))
        reply = session.record(call, call.future.result()).message
        talk += [reply, *(Message("tool", "x", tool_call_id=c["id"]) for c in reply.tool_calls)]
    session.chat([Message("user", "b")])
    return session


def test_rows_come_back_bit_by_bit(session, tmp_path):
    path = tmp_path / "rows.jsonl"
    export.write_rows(path, export.rows(session, reward=0.25, name="s", task="t"))
    rows = export.read_rows(path)
    assert [(r["session"], r["task"], r["branch"]) for r in rows] == [("s", "t", 0), ("s", "t", 1)]
    ((played,),) = (g.trajectories for g in export.groups_of_rows(rows))
    assert (played.task.id, played.reward, len(played.traces)) == ("t", 0.25, 2)
    assert [r["reward"] for r in rows] == [0.25, 0.25]
    assert [r["kind"] for r in rows] == ["main", "side"]
    for back, trace in zip(export.traces_of_rows(rows), session.traces, strict=True):
        for name in ("tokens", "sampled", "trainable", "version", "turn", "why", "routing"):
            np.testing.assert_array_equal(getattr(back, name), getattr(trace, name))
            assert getattr(back, name).dtype == getattr(trace, name).dtype, name
        assert back.logprobs.tobytes() == trace.logprobs.tobytes()
        assert back.kind == trace.kind


def test_bad_rows_are_told(session, tmp_path):
    good = export.rows(session)[0]
    for bad in (
        {},
        {**good, "tokens": good["tokens"][1:]},
        {**good, "logprobs": [0.0] * len(good["tokens"])},
        [],
    ):
        with pytest.raises(InputError, match="row 0"):
            export.traces_of_rows([bad])
    (tmp_path / "x").write_text("{")
    with pytest.raises(InputError, match="native rows"):
        export.read_rows(tmp_path / "x")


def test_messages(session):
    first, second = export.messages(session, reward=1.0)
    assert [m["role"] for m in first["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    said = first["messages"][2]
    assert (said["content"], said["reasoning_content"]) == ("I run.", "hm")
    assert said["tool_calls"][0]["function"]["arguments"] == {"command": "ls"}
    assert first["tools"] == [BASH]
    assert [m["content"] for m in second["messages"]] == ["b", "other"]


def test_atif(session):
    told = json.loads(json.dumps(export.atif(session, reward=1.0)))
    assert [s["source"] for s in told["steps"]] == ["system", "user", "agent", "agent"]
    assert [s["step_id"] for s in told["steps"]] == [1, 2, 3, 4]
    step = told["steps"][2]
    assert step["tool_calls"][0]["arguments"] == {"command": "ls"}
    assert step["observation"]["results"] == [
        {"source_call_id": step["tool_calls"][0]["tool_call_id"], "content": "x"}
    ]
    node = session.nodes[0]
    assert step["metrics"]["completion_token_ids"] == node.generation.tokens.tolist()
    assert step["metrics"]["prompt_tokens"] == len(node.prompt)
    assert told["final_metrics"]["total_completion_tokens"] == session.metrics["sampled_tokens"]
    assert len(told["extra"]["other_branches"]) == 1
