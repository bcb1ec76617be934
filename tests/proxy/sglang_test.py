"""The SGLang backend and faults that a real server can't be made to show; `tests/sglang` has a real one.

The server here is a small one that answers as SGLang 0.5.23 was seen to, and breaks where it is told to.
"""

import base64
import contextlib
import json
import os
import secrets
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from metagym.errors import ContextOverflowError, EngineError, InputError
from metagym.experiments.build import random_model
from metagym.models import load
from metagym.proxy.backends import sglang, sglang_remote, sglang_wire
from metagym.proxy.backends.sglang import SGLangBackend
from metagym.proxy.backends.sglang_server import SGLangProcess
from metagym.proxy.session import Session
from metagym.testing import scripted_logprob
from metagym.types import Message, Sampling

VOCAB = 258
LOGITS = np.array([scripted_logprob(t) for t in range(VOCAB)])


class FakeServer:
    """`break_` is called with (path, body, answer) and returns an answer: (status, JSON), or None to hang up;
    it may also wait. `calls` holds (path, body)."""

    def __init__(self, break_=lambda path, body, answer: answer, about=()):
        self.break_, self.about = break_, dict(about)
        self.label, self.path, self.paused = "default", "/models/x", False
        self.calls, self.rng = [], np.random.default_rng(0)
        self.seen = lambda headers: None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.do_POST()

            def do_POST(self):
                raw = self.rfile.read(int(self.headers.get("content-length") or 0))
                body = json.loads(raw) if raw else None
                fake.calls.append((self.path, body))
                fake.seen(self.headers)
                answer = fake.break_(self.path, body, fake.answer(self.path, body))
                with contextlib.suppress(OSError):
                    if answer is None:
                        self.close_connection = True
                        return
                    text = json.dumps(answer[1]).encode()
                    self.send_response(answer[0])
                    self.send_header("content-length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, path, body):
        match path:
            case "/model_info":
                about = {"architectures": ["LlamaForCausalLM"], "model_path": self.path}
                return 200, {**about, "weight_version": self.label}
            case "/server_info":
                return 200, {"version": "fake", "max_req_input_len": 1000, **self.about}
            case "/tokenize":
                from tokenizers import Tokenizer

                tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
                return 200, {"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False).ids}
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/update_weights_from_disk":
                self.label, self.path = body["weight_version"], body["model_path"]
            case "/update_weights_from_tensor":
                self.label = body.get("weight_version", self.label)
            case "/generate":
                return 200, self.generate(body)
        return 200, {"success": True}

    def generate(self, body):
        s = body["sampling_params"]
        x = LOGITS / (s["temperature"] or 1.0)
        logprobs = x - np.log(np.exp(x).sum())
        tokens = self.rng.choice(VOCAB, s["max_new_tokens"], p=np.exp(logprobs)).tolist()
        stop = next((i for i, t in enumerate(tokens) if t in s["stop_token_ids"]), None)
        tokens = tokens if stop is None else tokens[: stop + 1]
        meta = {
            "finish_reason": {"type": "length" if stop is None else "stop"},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "output_token_logprobs": [[logprobs[t], t, None] for t in tokens],
            "weight_versions": [{"version": self.label, "start": 0, "end": len(tokens)}],
        }
        if "token_ids_logprob" in body:
            meta["output_token_ids_logprobs"] = [[[logprobs[t], t, None] for t in body["token_ids_logprob"]]]
        return {"output_ids": tokens, "meta_info": meta}

    def count(self, path):
        return sum(p == path for p, _ in self.calls)

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("model") / "m", 0)


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)[0]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(sglang_remote, "_POLL_S", 0.02)


@pytest.fixture
def start(folder, model):
    """Starts fake servers and a backend on them."""
    with contextlib.ExitStack() as stack:

        def make(*servers, **kwargs):
            for server in servers:
                server.folder = folder
                stack.callback(server.close)
            urls = [s.url for s in servers]
            backend = SGLangBackend(
                urls, folder, model=model, **{"start_s": 20.0, "timeout_s": 20.0, **kwargs}
            )
            stack.callback(backend.close)
            return backend

        yield make


def params(model, factor=1.0):
    return jax.tree.map(lambda x: x * factor, nnx.split(model)[1])


def on_generate(change):
    """Breaks generations, not the probe's."""

    def break_(path, body, answer):
        asked = path == "/generate" and "token_ids_logprob" not in body
        return change(body, answer) if asked else answer

    return break_


def test_everything_that_a_server_could_have_a_default_for_is_sent(start):
    server = FakeServer()
    backend = start(server)
    sampling = Sampling(
        5, temperature=0.7, top_p=0.9, top_k=12, min_p=0.1, stop_token_ids=(3, 4), seed=2**63 + 5
    )
    generation = backend.submit([1, 2, 3], sampling).result()
    assert generation.logprobs.dtype == np.float32
    assert set(generation.version) == {0}
    body = server.calls[-1][1]
    assert body["input_ids"] == [1, 2, 3]
    assert (body["return_logprob"], body["logprob_start_len"], body["stream"]) == (True, -1, False)
    assert "return_routed_experts" not in body
    sent = body["sampling_params"]
    want = {"max_new_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 12, "min_p": 0.1}
    want |= {"stop_token_ids": [3, 4], "sampling_seed": 5, "n": 1, "ignore_eos": False, "min_new_tokens": 0}
    want |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "stop": None}
    want |= {"regex": None, "json_schema": None, "ebnf": None, "structural_tag": None, "logit_bias": None}
    want |= {"stop_regex": None, "custom_params": None}
    assert want.items() <= sent.items()
    seeds = set()
    for _ in range(5):
        backend.submit([1], Sampling(1)).result()
        seeds.add(server.calls[-1][1]["sampling_params"]["sampling_seed"])
    assert len(seeds) == 5  # never none: a deterministic server has one for all
    assert len({c[1]["rid"] for c in server.calls if c[0] == "/generate"}) == server.count("/generate")


def _meta(**changes):
    def change(body, answer):
        meta = answer[1]["meta_info"]
        for name, value in changes.items():
            meta[name] = value(meta[name]) if callable(value) else value
        return answer

    return change


def _row(at, value):
    """Another log-prob of a token."""
    return _meta(output_token_logprobs=lambda rows: [*rows[:at], [value, *rows[at][1:]], *rows[at + 1 :]])


BROKEN = {
    "missing": (_meta(output_token_logprobs=[]), "4 tokens without log-probs"),
    "null": (_meta(output_token_logprobs=None), "4 tokens without log-probs"),
    "short": (_meta(output_token_logprobs=lambda rows: rows[:-1]), "3 log-probs for 4 tokens"),
    "long": (_meta(output_token_logprobs=lambda rows: [*rows, rows[0]]), "5 log-probs for 4 tokens"),
    "NaN, which JSON says as null": (_row(1, None), "log-prob nan of token 1"),
    "NaN": (_row(3, float("nan")), "log-prob nan of token 3"),
    "positive": (_row(0, 0.5), "log-prob 0.5 of token 0"),
    "probability 0": (_row(2, -3.4028234e38), "of token 2 is not a log-probability"),
    "shifted": (
        _meta(output_token_logprobs=lambda rows: [[r[0], (r[1] + 1) % 7, None] for r in rows]),
        "shifted.*token 0",
    ),
    "no triples": (_meta(output_token_logprobs=[-1.0] * 4), "can't be read"),
    "no ids": (lambda b, a: (200, {"meta_info": a[1]["meta_info"]}), "has no ids"),
    "empty": (lambda b, a: (200, {**a[1], "output_ids": []}), "counts 4 tokens and returned 0"),
    "text": (lambda b, a: (200, "hello"), "has no ids"),
    "a truncated prompt": (_meta(prompt_tokens=2), "read 2 prompt tokens of the 3"),
    "another count": (_meta(completion_tokens=5), "counts 5 tokens"),
    "an unknown end": (_meta(finish_reason={"type": "bored"}), "by 'bored'"),
    "a gap in the versions": (
        _meta(weight_versions=lambda v: [{**v[0], "start": 1}]),
        "leave out or repeat",
    ),
    "versions that end early": (_meta(weight_versions=lambda v: [{**v[0], "end": 3}]), "leave out or repeat"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_trained_on_is_an_error_with_a_reason(start, name):
    change, why = BROKEN[name]
    server = FakeServer(on_generate(change))
    backend = start(server)
    server.calls.clear()
    with pytest.raises(EngineError, match=why):
        backend.submit([1, 2, 3], Sampling(4)).result()
    assert server.count("/generate") == 1  # it is no use to ask again


@pytest.mark.parametrize(
    ("routed", "why"),
    [
        (None, "no routed experts"),
        (base64.b64encode(np.zeros(23, np.int32)).decode(), "23 routed experts; 6 tokens of 4"),
        (base64.b64encode(np.full(24, 9, np.int32)).decode(), "beyond the 8"),
        ("AAA", "can't be read"),
    ],
)
def test_routing_that_cannot_be_replayed(routed, why):
    answer = FakeServer.generate(
        _bare(),
        {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 4, "temperature": 1.0, "stop_token_ids": []},
        },
    )
    answer["meta_info"] |= {"routed_experts": routed} if routed else {}
    with pytest.raises(EngineError, match=why):
        sglang_wire.generation(answer, 3, Sampling(4), {"default": 0}, (4, 8))


def _bare():
    bare = object.__new__(FakeServer)
    bare.rng, bare.label = np.random.default_rng(0), "default"
    return bare


def test_a_server_that_fails_is_an_engine_error_then_comes_back(start):
    failing = threading.Event()
    server = FakeServer(on_generate(lambda b, a: (500, {"error": "oops"}) if failing.is_set() else a))
    backend = start(server)
    failing.set()
    with pytest.raises(EngineError, match=r"500.*oops"):
        backend.submit([1], Sampling(4)).result()
    failing.clear()
    assert (
        len(backend.submit([1], Sampling(4)).result().tokens) == 4
    )  # it waited until the server was seen to be well
    assert backend.stats()["lost"] == 1


def test_a_lost_generation_is_had_from_another_server_once(start):
    """Both servers answer; the first one's answer does not arrive. The trace has the second one's."""
    broken = FakeServer(on_generate(lambda b, a: None))
    good = FakeServer()
    backend = start(broken, good)
    session = Session(backend, _Renderer(), sampling=Sampling(4, stop_token_ids=()), context=64, seed=0)
    session.chat([Message("user", "hi")])
    (trace,) = session.traces
    assert trace.trainable.sum() == 4
    assert broken.count("/generate") == 2 + 1  # two of the probe
    assert good.count("/generate") == 2 + 1
    stats = backend.stats()
    assert (stats["lost"], stats["retries"], stats["sampled_tokens"]) == (1, 1, 4)


class _Renderer:
    """As much of a renderer as a session of one turn needs."""

    stop_token_ids = ()
    begins_thinking = False
    end_of_turn = None

    def render(self, messages, **kwargs):
        return [5, 6, 7]

    def rebuilt(self, ids):
        return np.zeros(len(ids), bool)

    def decode(self, ids):
        return str(ids)


def test_retries_are_bounded(start):
    servers = [FakeServer(on_generate(lambda b, a: (503, "full"))) for _ in range(4)]
    backend = start(*servers, retries=2)
    for s in servers:
        s.calls.clear()
    with pytest.raises(EngineError, match=r"could not be had elsewhere.*503"):
        backend.submit([1], Sampling(4)).result()
    assert sum(s.count("/generate") for s in servers) == 3


def test_a_server_that_hangs(start):
    hanging = threading.Event()
    go_on = threading.Event()

    def change(body, answer):
        if hanging.is_set():
            go_on.wait(20)
        return answer

    server = FakeServer(on_generate(change))
    backend = start(server, timeout_s=0.3)
    hanging.set()
    with pytest.raises(EngineError, match=r"did not answer within 0.3 s"):
        backend.submit([1], Sampling(4)).result()
    rid = [b["rid"] for p, b in server.calls if p == "/generate"][-1]
    deadline = time.monotonic() + 10
    while ("/abort_request", {"rid": rid}) not in server.calls:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    hanging.clear()
    go_on.set()
    backend.submit([1], Sampling(4)).result()


def test_an_abort_of_others_is_tried_again_on_the_same_server(start):
    times = iter(range(100))
    abort = {"type": "abort", "message": "pushed"}

    def change(body, answer):
        return _meta(finish_reason=abort)(body, answer) if next(times) < 2 else answer

    server = FakeServer(on_generate(change))
    backend = start(server)
    generation = backend.submit([1], Sampling(4)).result()
    assert generation.finish == "length"
    assert backend.stats()["retries"] == 2
    always = FakeServer(on_generate(_meta(finish_reason=abort)))
    with pytest.raises(EngineError, match="pushed"):
        start(always, retries=1).submit([1], Sampling(4)).result()


def test_abort_tells_the_server(start):
    reached, go_on = threading.Event(), threading.Event()

    def change(body, answer):
        reached.set()
        go_on.wait(20)
        return answer

    server = FakeServer(on_generate(change))
    backend = start(server)
    future = backend.submit([1], Sampling(4))
    assert reached.wait(20)
    backend.abort(future)
    assert future.cancelled()
    rid = [b["rid"] for p, b in server.calls if p == "/generate"][-1]
    deadline = time.monotonic() + 10
    while ("/abort_request", {"rid": rid}) not in server.calls:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    go_on.set()


def test_overflow(start):
    words = "The input (9 tokens) is longer than the model's context length (4 tokens)."
    server = FakeServer(on_generate(lambda b, a: (400, {"error": {"message": words}})))
    backend = start(server)
    assert backend.context == 1004
    with pytest.raises(ContextOverflowError, match="context of 1004"):
        backend.submit([1] * 1000, Sampling(4)).result()
    with pytest.raises(ContextOverflowError, match="longer than"):
        backend.submit([1], Sampling(4)).result()
    server.break_ = on_generate(lambda b, a: (400, {"error": {"message": "no such thing"}}))
    with pytest.raises(EngineError, match="no such thing"):
        backend.submit([1], Sampling(4)).result()


def test_conversations_stay_where_they_are_and_others_spread(start):
    servers = [FakeServer() for _ in range(3)]
    backend = start(*servers)

    def of(ids):
        before = [s.count("/generate") for s in servers]
        backend.submit(ids, Sampling(4)).result()
        return [s.count("/generate") > n for s, n in zip(servers, before, strict=True)].index(True)

    rng = np.random.default_rng(0)
    talks = [rng.integers(0, VOCAB, 64).tolist() for _ in range(6)]
    homes = [of(t) for t in talks]
    for _ in range(4):
        talks = [t + rng.integers(0, VOCAB, 40).tolist() for t in talks]
        assert [of(t) for t in talks] == homes
    go_on = threading.Event()
    for s in servers:
        s.break_ = on_generate(lambda b, a: go_on.wait(20) and a)
    before = [s.count("/generate") for s in servers]
    futures = [backend.submit(talks[0], Sampling(4)) for _ in range(30)]
    deadline = time.monotonic() + 20
    while sum(s.count("/generate") for s in servers) < sum(before) + 30:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    spread = sorted(s.count("/generate") - n for s, n in zip(servers, before, strict=True))
    go_on.set()
    for future in futures:
        future.result()
    assert spread[0] >= 5  # of one conversation too, when its server has more to do by some
    assert spread[-1] - spread[0] <= sglang._SLACK + 1


def test_a_router_gets_generations_and_the_servers_weights(start, model, folder):
    router, workers = FakeServer(), [FakeServer(), FakeServer()]

    def through(path, body, answer):
        return (200, workers[0].generate(body)) if path == "/generate" else answer

    router.break_ = through
    backend = start(*workers, router=router.url)
    backend.load(params(model), 3)
    generation = backend.submit([1], Sampling(4)).result()
    assert set(generation.version) == {3}
    assert router.count("/generate") == 1
    assert all(w.count("/update_weights_from_disk") == 1 for w in workers)
    right, workers[0].label = workers[0].label, "default"  # it was started anew
    with pytest.raises(EngineError, match="not pushed"):
        backend.submit([1], Sampling(4)).result()
    deadline = time.monotonic() + 10
    while workers[0].label != right:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert set(backend.submit([1], Sampling(4)).result().version) == {3}
    router.close()


def test_a_push_and_its_order(start, model):
    server = FakeServer()
    backend = start(server)
    server.calls.clear()
    backend.load(params(model), 7)
    paths = [p for p, _ in server.calls]
    update = "/update_weights_from_disk"
    assert paths == ["/pause_generation", update, "/continue_generation", "/model_info"]
    sent = dict(server.calls)[update]
    assert sent["flush_cache"] is True
    assert backend.stats()["push_bytes"] > 0
    first = server.path
    backend.load(params(model, 2.0), 8)
    assert [p.name for p in backend._folder.glob("0*")] == ["00000008"]  # the old ones are gone
    assert server.path != first
    for version in (8, 3):
        with pytest.raises(InputError, match="must rise"):
            backend.load(params(model), version)
    kept = backend._folder
    backend.close()
    assert not kept.exists()


def test_a_push_that_one_of_two_servers_refuses(start, model):
    refuse = threading.Event()

    def break_(path, body, answer):
        return (400, {"message": "disk full"}) if refuse.is_set() and path.startswith("/update_w") else answer

    good, bad = FakeServer(), FakeServer(break_)
    backend = start(good, bad)
    backend.load(params(model), 1)
    refuse.set()
    backend.load(params(model, 2.0), 2)
    assert backend.version == 2
    bad.calls.clear()
    for _ in range(10):
        assert set(backend.submit([1], Sampling(4)).result().version) == {2}
    assert bad.count("/generate") == 0
    refuse.clear()
    deadline = time.monotonic() + 10
    while backend.stats()["servers_up"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert bad.label == good.label  # it got them late


def test_a_push_that_fails_leaves_the_old_weights(start, model):
    refuse = threading.Event()

    def break_(path, body, answer):
        if path == "/update_weights_from_disk" and refuse.is_set():
            refuse.clear()  # once
            server.label = "half"
            return 400, {"message": "bad file"}
        return answer

    server = FakeServer(break_)
    backend = start(server)
    backend.load(params(model), 1)
    old = server.path
    refuse.set()
    with pytest.raises(EngineError, match=r"weights 2, and weights 1 go on serving.*bad file"):
        backend.load(params(model, 2.0), 2)
    assert set(backend.submit([1], Sampling(4)).result().version) == {1}
    assert server.path == old  # pushed again: it may have had half of the new ones
    assert backend.stats()["failed_loads"] == 1
    backend.load(params(model, 2.0), 3)
    assert set(backend.submit([1], Sampling(4)).result().version) == {3}


def test_what_runs_while_a_push_fails_is_sampled_again(start, model):
    """It would go on with half of the new weights, and say that they are the old ones."""
    reached, go_on = threading.Event(), threading.Event()
    once = iter([True])

    def break_(path, body, answer):
        if path == "/generate" and body["input_ids"] == [7]:
            reached.set()
            go_on.wait(20)
        return (
            (400, {"message": "bad file"})
            if path == "/update_weights_from_disk" and next(once, None)
            else answer
        )

    server = FakeServer(break_)
    backend = start(server)
    running = backend.submit([7], Sampling(4))
    assert reached.wait(20)
    server.calls.clear()
    with pytest.raises(EngineError, match="bad file"):
        backend.load(params(model), 1)
    update, pause, end = "/update_weights_from_disk", "/pause_generation", "/continue_generation"
    assert [p for p, _ in server.calls[:4]] == [pause, update, "/abort_request", end]
    assert server.calls[2][1] == {"rid": "", "abort_all": True}
    go_on.set()  # it did not heed the abort
    assert set(running.result().version) == {0}
    assert server.count("/generate") == 1
    assert backend.stats()["retries"] == 1


def test_a_push_that_waits(start, model):
    """It begins when what ran has ended and the cache is flushed, which a server refuses for a while after an
    abort; what is submitted meanwhile is sent afterwards."""
    reached, go_on, refusals = threading.Event(), threading.Event(), iter(range(3))

    def break_(path, body, answer):
        if path == "/generate" and body["input_ids"] == [7]:
            reached.set()
            go_on.wait(20)
        if path == "/flush_cache" and next(refusals, None) is not None:
            return 400, "requests are running"
        return answer

    server = FakeServer(break_)
    backend = start(server, pause="wait")
    running = backend.submit([7], Sampling(4))
    assert reached.wait(20)
    server.calls.clear()
    push = threading.Thread(target=backend.load, args=(params(model), 1))
    push.start()
    deadline = time.monotonic() + 20
    while backend._gate.is_set():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    later = backend.submit([8], Sampling(4))
    time.sleep(0.1)
    assert not server.calls
    go_on.set()
    push.join()
    assert set(running.result().version) == {0}
    assert set(later.result().version) == {1}
    paths = [p for p, _ in server.calls]
    assert paths == [*["/flush_cache"] * 4, "/update_weights_from_disk", "/model_info", "/generate"]


def test_a_push_that_does_not_wait_longer(start, model):
    """Others keep the server from its end: it fails, and nothing has changed."""
    server = FakeServer(lambda p, b, a: (400, "requests are running") if p == "/flush_cache" else a)
    backend = start(server, pause="wait", timeout_s=0.2)
    with pytest.raises(EngineError, match=r"weights 0 go on serving.*requests are running"):
        backend.load(params(model), 1)
    assert set(backend.submit([1], Sampling(4)).result().version) == {0}
    assert not server.count("/update_weights_from_disk")


def test_prefixes_that_are_kept_are_told_apart(start, model):
    server = FakeServer()
    backend = start(server, pause="in_place")
    salts = []
    for version in range(4):
        if version:
            backend.load(params(model), version)
        backend.submit([1], Sampling(4)).result()
        salts.append(server.calls[-1][1]["cache_salt"])
    assert len(set(salts)) == 4
    assert all(salts)
    old, times = server.label, iter(range(100))
    # Sent before a push, begun after it: its beginning may be from the cache of the old weights.
    backend.load(params(model), 4)
    spans = [{"version": old, "start": 0, "end": 4}]
    server.break_ = on_generate(lambda b, a: _meta(weight_versions=spans)(b, a) if next(times) == 0 else a)
    assert set(backend.submit([1], Sampling(4)).result().version) == {4}
    assert backend.stats()["retries"] == 1
    assert not [b for p, b in server.calls if p.startswith("/update_weights") and b["flush_cache"]]


def test_weights_that_cannot_be_written(start, model, monkeypatch):
    server = FakeServer()
    backend = start(server)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sglang, "save", full)
    with pytest.raises(EngineError, match=r"weights 1 could not be written.*weights 0 serve.*No space"):
        backend.load(params(model), 1)
    assert set(backend.submit([1], Sampling(4)).result().version) == {0}


def test_weights_of_a_process_that_was_killed_are_removed(tmp_path):
    """The lock on its folder went with it."""
    first, lock = sglang._folder(tmp_path)
    (first / "00000001").mkdir()
    (tmp_path / "metagym-weights-elsewhere-1").mkdir()
    second, other = sglang._folder(tmp_path)
    lock.close()
    third, last = sglang._folder(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {second.name, third.name, "metagym-weights-elsewhere-1"}
    assert third.stat().st_mode & 0o777 == 0o755  # servers of other users read it
    other.close()
    last.close()


def test_the_key_of_servers_goes_with_each_request(start, monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", "sesame")
    keys, server = set(), FakeServer()
    server.seen = lambda headers: keys.add(headers["authorization"])
    start(server).submit([1], Sampling(4)).result()
    assert keys == {"Bearer sesame"}


def test_a_server_that_started_anew_gets_the_weights_again(start, model):
    server = FakeServer()
    backend = start(server)
    backend.load(params(model), 1)
    right = server.label
    server.label, server.path = "default", "/models/x"
    with pytest.raises(EngineError, match="'default', which were not pushed"):
        backend.submit([1], Sampling(4)).result()
    assert set(backend.submit([1], Sampling(4)).result().version) == {1}
    assert server.label == right


def test_each_token_has_its_version(start, model):
    server = FakeServer()
    backend = start(server)
    backend.load(params(model), 1)
    old = server.label
    backend.load(params(model, 2.0), 2)
    spans = [{"version": old, "start": 0, "end": 3}, {"version": server.label, "start": 3, "end": 5}]
    server.break_ = on_generate(_meta(weight_versions=spans))
    assert backend.submit([1], Sampling(5)).result().version.tolist() == [1, 1, 1, 2, 2]


def test_servers_that_do_not_fit_are_refused(start, folder):
    def original(path, body, answer):
        """As with SGLANG_RETURN_ORIGINAL_LOGPROB: of temperature 1, whatever was asked for."""
        if path == "/generate":
            rows = [[LOGITS[t] - np.log(np.exp(LOGITS).sum()), t, None] for t in body["token_ids_logprob"]]
            answer[1]["meta_info"]["output_token_ids_logprobs"] = [rows]
        return answer

    with pytest.raises(InputError, match="another temperature"):
        start(FakeServer(original))
    with pytest.raises(InputError, match="allow-auto-truncate"):
        start(FakeServer(about={"allow_auto_truncate": True}))
    with pytest.raises(InputError, match=r"of 1004 tokens, and 2000 are asked"):
        start(FakeServer(), context=2000)
    wrong = FakeServer(lambda p, b, a: (200, {"tokens": [1, 2]}) if p == "/tokenize" else a)
    with pytest.raises(InputError, match="another tokenizer"):
        start(wrong)
    with pytest.raises(InputError, match="at least one server"):
        SGLangBackend([], folder)
    with pytest.raises(EngineError, match=r"did not start within 0.1 s"):
        SGLangBackend(["http://127.0.0.1:9"], folder, start_s=0.1)


def test_sglang_jax_generates_and_takes_no_weights(start, model):
    """Its routes have the older names; it knows fewer settings, and has no labels."""

    def older(path, body, answer):
        if path in ("/model_info", "/server_info", "/tokenize", "/update_weight_version"):
            return 404, {"detail": "Not Found"}
        if path in ("/get_model_info", "/get_server_info"):
            return 200, {"model_path": "x", "max_req_input_len": 1000}
        if path == "/generate":
            assert "sampling_seed" not in body["sampling_params"]
            assert not set(sglang_wire.NEWER) & set(body["sampling_params"])
            del answer[1]["meta_info"]["weight_versions"]
        return answer

    backend = start(FakeServer(older))
    assert set(backend.submit([1], Sampling(4)).result().version) == {0}
    with pytest.raises(InputError, match="sglang-jax has no route for new weights"):
        backend.load(params(model), 1)


def test_a_process_that_does_not_start_says_why(folder, tmp_path):
    process = SGLangProcess(folder, tmp_path / "log", python="/bin/false")
    with pytest.raises(EngineError, match="ended with code 1"):
        SGLangBackend([process], folder)


def test_a_process_that_is_not_started_again(start, folder, model, tmp_path):
    """Without restarts left, who waits for it is told at once."""
    server = FakeServer()
    server.folder = folder
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    process = SGLangProcess(folder, tmp_path / "log", python=str(program), port=server.server.server_port)
    backend = SGLangBackend([process], folder, model=model, restarts=0, start_s=20.0)
    try:
        backend.submit([1], Sampling(4)).result()
        server.close()
        process.stop()
        process._process = _Ended()
        for why in ("could not be had elsewhere", "no SGLang server is up.*too often.*code -9"):
            with pytest.raises(EngineError, match=why):
                backend.submit([1], Sampling(4)).result()
        with pytest.raises(EngineError, match="no SGLang server took weights 1"):
            backend.load(params(model), 1)
    finally:
        process._process = None
        backend.close()


class _Ended:
    pid = -1

    def poll(self):
        return -9


@pytest.mark.parametrize("killed", [False, True])
def test_a_process_ends_with_all_that_it_started(killed, folder, tmp_path):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nsleep 1000 & sleep 1000 & touch "$TMPDIR/socket"; echo started; wait\n')
    program.chmod(0o755)
    process = SGLangProcess(folder, tmp_path / "log", python=str(program))
    process.start()
    deadline = time.monotonic() + 10
    while "started" not in (tmp_path / "log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid, scratch = process.pid, Path(process._scratch.name)
    assert _alive(pid) >= 3
    assert (scratch / "socket").exists()
    if killed:  # the end of this process closes the pipe, and nothing more
        process._process.stdin.close()
        while _alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not scratch.exists()
    process.stop()
    process.stop()
    assert _alive(pid) == 0
    assert not scratch.exists()


def test_shared_memory_of_a_server_that_was_killed_is_freed(folder, tmp_path):
    name = Path(f"/dev/shm/sglang_loads_test_{secrets.token_hex(4)}.shm")
    program = tmp_path / "python"
    lines = [f"#!{sys.executable}", "import mmap, time", f"file = open({str(name)!r}, 'w+b')"]
    lines += [
        "file.truncate(4096)",
        "shared = mmap.mmap(file.fileno(), 4096)",
        "print('started', flush=True)",
    ]
    program.write_text("\n".join([*lines, "time.sleep(1000)"]))
    program.chmod(0o755)
    process = SGLangProcess(folder, tmp_path / "log", python=str(program))
    process.start()
    try:
        deadline = time.monotonic() + 20
        while "started" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.check()
        os.killpg(process.pid, signal.SIGKILL)
        while _alive(process.pid):
            time.sleep(0.01)
        assert name.exists()
        process.stop()
        assert not name.exists()
    finally:
        name.unlink(missing_ok=True)
        process.stop()


def _alive(group):
    """Processes of a group, zombies left out."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rsplit(")", 1)[1].split()[:3]
            count += int(pgrp) == group and state != "Z"
    return count
