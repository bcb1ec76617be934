"""What real harnesses sent, replayed: the conversation stays one trace, and branches are what they should be.

`data/shapes.jsonl` has small requests in the shapes of each dialect's harnesses. Recordings of nine harnesses
(texts replaced by lengths and hashes) are used where they are there.
"""

import json
import os
from pathlib import Path

import pytest

from metagym.proxy.render import Renderer
from metagym.proxy.server import Proxy
from metagym.testing import ScriptedBackend
from metagym.types import Sampling

from .conftest import KEEPS_THOUGHTS
from .server_test import post

SHAPES = Path(__file__).parent / "data" / "shapes.jsonl"
SHARED = Path(os.environ.get("METAGYM_SHARED", Path(__file__).parents[3] / "shared"))
RECORDED = SHARED / "data" / "proxy_requests"


def said(reply):
    """What the model must have said for a recorded reply, in the Hermes format; and the ids of its calls."""
    thoughts, text, calls = None, "", []
    if "choices" in reply:
        m = reply["choices"][0]["message"]
        thoughts, text = m.get("reasoning_content"), m.get("content") or ""
        calls = [
            (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"]))
            for c in m.get("tool_calls", ())
        ]
    elif "output" in reply:
        for o in reply["output"]:
            if o["type"] == "reasoning":
                thoughts = o["summary"][0]["text"]
            elif o["type"] == "message":
                text = o["content"][0]["text"]
            else:
                calls.append((o["call_id"], o["name"], json.loads(o["arguments"])))
    else:
        for block in reply["content"]:
            if block["type"] == "thinking":
                thoughts = block["thinking"]
            elif block["type"] == "text":
                text = block["text"]
            else:
                calls.append((block["id"], block["name"], block["input"]))
    told = "" if thoughts is None else f"<think>\n{thoughts}\n</think>\n\n"
    blocks = [
        f"<tool_call>\n{json.dumps({'name': n, 'arguments': a}, ensure_ascii=False)}\n</tool_call>"
        for _, n, a in calls
    ]
    return told + "\n".join([*([text] if text or not calls else []), *blocks]), [c[0] for c in calls]


def given_ids(path, answer):
    if path.endswith("messages"):
        return [b["id"] for b in answer["content"] if b["type"] == "tool_use"]
    if path.endswith("responses"):
        return [o["call_id"] for o in answer["output"] if o["type"].endswith("call")]
    return [c["id"] for c in answer["choices"][0]["message"].get("tool_calls", ())]


def replay(model_dir, entries):
    """Plays recorded requests against the proxy. Returns the session."""
    renderer = Renderer.from_dir(model_dir, KEEPS_THOUGHTS)
    entries = [e for e in entries if isinstance(e.get("reply"), dict) and "fault" not in e["reply"]]
    script = []
    backend = ScriptedBackend(lambda prompt: [*renderer.encode_text(script[-1]), 2])
    proxy = Proxy(backend, renderer, context=10**6, sampling=Sampling(max_tokens=10_000)).start()
    try:
        opened = proxy.open(seed=1)
        ids: dict[str, str] = {}
        for entry in entries:
            path = "/v1/" + entry["path"].split("/v1/")[1]
            body = json.dumps(entry["body"], ensure_ascii=False)
            for old, new in ids.items():
                body = body.replace(json.dumps(old), json.dumps(new))
            if path.endswith("count_tokens"):
                assert post(opened.url, body.encode(), opened.key, path)[2]["input_tokens"] > 0
                continue
            text, old = said(entry["reply"])
            script.append(text)
            kept = {k: v for k, v in entry["headers"].items() if k.lower().startswith(("x-", "anthropic"))}
            asked = {**json.loads(body), "stream": False}
            status, _, answer = post(opened.url, asked, opened.key, path, **kept)
            assert status == 200, answer
            ids |= dict(zip(old, given_ids(path, answer), strict=True))
            streamed = {**json.loads(body), "stream": True}
            assert len(streamed) >= len(asked) - 1
        prompts = [list(p) for p, _ in backend.calls]
        for trace in opened.session.traces:
            for turn in set(trace.turn[trace.sampled].tolist()):
                start = int(((trace.turn == turn) & trace.sampled).argmax())
                assert trace.tokens[:start].tolist() == prompts[turn]
        return opened.session
    finally:
        proxy.close()


SHAPE_LINES = [json.loads(line) for line in SHAPES.read_text().splitlines()]


@pytest.mark.parametrize("shape", SHAPE_LINES, ids=lambda s: s["name"])
def test_shapes(model_dir, shape):
    session = replay(model_dir, shape["requests"])
    assert [[t.kind, len(set(t.turn[t.sampled].tolist()))] for t in session.traces] == shape["branches"]
    said = [r for r in shape["requests"] if "fault" not in r["reply"] and "count" not in r["path"]]
    assert session.metrics["calls"] == len(said)


# Recording: kinds of its branches, each with the number of replies in it.
BRANCHES = {
    "claude1": [("side", 1), ("main", 3)],
    "claude_min": [("main", 3)],
    "codex1": [("main", 3)],
    "codex_hang": [("main", 3)],
    "mini1": [("main", 3)],
    "mini_flt": [("main", 3)],
    "oh1": [("main", 3)],
    "ohcli1": [("main", 3)],
    "opencode1": [("side", 1), ("main", 3)],
    "pi1": [("main", 3)],
    "qwen1": [("main", 3)],
    "term1": [("main", 4)],
    "aider1": [("main", 1)],
}


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recordings are not there")
@pytest.mark.parametrize("name", BRANCHES)
def test_recorded_requests(model_dir, name):
    entries = [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]
    session = replay(model_dir, [e for e in entries if not e.get("_meta") and e.get("body")])
    assert [(t.kind, len(set(t.turn[t.sampled].tolist()))) for t in session.traces] == BRANCHES[name]
    assert session.metrics["not_append_only"] == 0


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recordings are not there")
@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.jsonl")) or [None], ids=lambda p: p and p.stem)
def test_every_recorded_request_is_answered(model_dir, path):
    """Compactions, faults and retries too: nothing is lost, and nothing trains twice."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    session = replay(model_dir, [e for e in entries if not e.get("_meta") and e.get("body")])
    trained = [t for trace in session.traces for t in set(trace.turn[trace.trainable].tolist())]
    assert len(trained) == len(set(trained))
    if "_cmp" in path.stem or path.stem in ("qwen_400", "opencode_400"):
        kinds = {t.kind for t in session.traces}
        assert "main" in kinds
