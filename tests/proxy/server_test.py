"""The proxy as programs see it: each dialect through its official client, faults, retries, security."""

import asyncio
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from pathlib import Path

import aiohttp
import anthropic
import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from metagym import forward
from metagym.errors import EngineError, InputError, UnknownNameError
from metagym.live import Live
from metagym.proxy.dialects import Memory
from metagym.proxy.render import Renderer
from metagym.proxy.server import DIALECTS, Proxy
from metagym.testing import FaultyBackend, ScriptedBackend
from metagym.types import Generation, Sampling, Why

from .conftest import BASH, KEEPS_THOUGHTS, hermes

END = 2
CALLS = "<think>\nlook\n</think>\n\nI run.\n" + hermes(command="ls") + "\n" + hermes(command="cat é")
FLAT = {"name": "bash", "description": "Runs a command.", "parameters": BASH["function"]["parameters"]}


@pytest.fixture(scope="module")
def renderer(model_dir):
    return Renderer.from_dir(model_dir, KEEPS_THOUGHTS)


@contextlib.contextmanager
def serving(backend, renderer, **options):
    proxy = Proxy(backend, renderer, **{"context": 4096, "control_port": 0, **options}).start()
    try:
        yield proxy
    finally:
        proxy.close()


def scripted(renderer, *replies):
    return ScriptedBackend([[*renderer.encode_text(r), END] for r in replies])


class Held(Live):
    """A backend whose answers wait until `say` is called."""

    def __init__(self, renderer):
        self._renderer = renderer
        self.futures: list[Future] = []
        self.aborted: list[Future] = []
        self.prompts: list[tuple[int, ...]] = []

    def submit(self, prompt_ids, sampling):
        future: Future = Future()
        self.prompts.append(tuple(prompt_ids))
        self.futures.append(future)
        return future

    def say(self, index, text, version=0):
        ids = np.array([*self._renderer.encode_text(text), END], np.int32)
        n = len(ids)
        self.futures[index].set_result(
            Generation(ids, np.full(n, -0.5, np.float32), np.full(n, version, np.int32), "stop")
        )

    def abort(self, future):
        self.aborted.append(future)
        future.cancel()

    def load(self, params, version): ...
    def close(self): ...


def until(true, what="it never came true", seconds=5.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def post(url, body, key=None, path="/v1/chat/completions", **headers):
    """(status, headers, JSON or text)."""
    headers = {"content-type": "application/json", **headers}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            raw, status, told = answer.read(), answer.status, answer.headers
    except urllib.error.HTTPError as error:
        with error:
            raw, status, told = error.read(), error.code, error.headers
    with contextlib.suppress(ValueError):
        raw = json.loads(raw)
    return status, told, raw


def say(*texts):
    return {"model": "policy", "messages": [{"role": "user", "content": t} for t in texts]}


# ---------------------------------------------------------------- the dialects


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions(renderer, stream):
    backend = scripted(renderer, CALLS, "done")
    with serving(backend, renderer) as proxy, contextlib.ExitStack() as stack:
        opened = proxy.open("chat", seed=1)
        client = stack.enter_context(openai.OpenAI(base_url=f"{opened.url}/v1", api_key=opened.key))
        talk = [{"role": "developer", "content": "You fix."}, {"role": "user", "content": "go"}]

        def ask():
            if not stream:
                full = client.chat.completions.create(model="policy", messages=talk, tools=[BASH])
                return ChatCompletion.model_validate(full.model_dump(), strict=True)
            with client.chat.completions.stream(
                model="policy", messages=talk, tools=[BASH], stream_options={"include_usage": True}
            ) as events:
                for event in events:
                    if event.type == "chunk":
                        ChatCompletionChunk.model_validate(event.chunk.model_dump())
                return events.get_final_completion()

        full = ask()
        message = full.choices[0].message
        assert full.choices[0].finish_reason == "tool_calls"
        assert message.content == "I run."
        assert (message.model_extra or {})["reasoning_content"].endswith("look")
        assert [json.loads(c.function.arguments) for c in message.tool_calls] == [
            {"command": "ls"},
            {"command": "cat é"},
        ]
        prompt, said = len(backend.calls[0][0]), len(opened.session.nodes[0].generation.tokens)
        assert (full.usage.prompt_tokens, full.usage.completion_tokens) == (prompt, said)
        talk.append(
            {
                "role": "assistant",
                "content": "I run.",
                "tool_calls": [c.model_dump() for c in message.tool_calls],
            }
        )
        talk += [{"role": "tool", "tool_call_id": c.id, "content": "x"} for c in message.tool_calls]
        full = ask()
        assert (full.choices[0].message.content, full.choices[0].finish_reason) == ("done", "stop")
        assert full.usage.prompt_tokens_details.cached_tokens == prompt + said
        assert len(opened.session.traces) == 1
        assert client.models.list().data[0].id == "policy"
        assert client.models.retrieve("policy").id == "policy"


@pytest.mark.parametrize("stream", [False, True])
def test_responses(renderer, stream):
    patch = '<tool_call>\n{"name": "apply", "arguments": {"input": "*** patch"}}\n</tool_call>'
    spawn = '<tool_call>\n{"name": "agents__spawn", "arguments": {"n": 1}}\n</tool_call>'
    backend = scripted(renderer, CALLS, f"{patch}\n{spawn}", "done")
    tools = [
        {"type": "function", **FLAT, "strict": False},
        {"type": "custom", "name": "apply", "description": "Patch.", "format": {"type": "text"}},
        {
            "type": "namespace",
            "name": "agents",
            "description": "x",
            "tools": [{"type": "function", **FLAT, "name": "spawn"}],
        },
        {"type": "web_search"},
    ]
    events_of = TypeAdapter(ResponseStreamEvent)
    with serving(backend, renderer) as proxy, contextlib.ExitStack() as stack:
        opened = proxy.open()
        client = stack.enter_context(openai.OpenAI(base_url=f"{opened.url}/v1", api_key=opened.key))
        talk = [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]

        def ask():
            asked = {"model": "policy", "input": talk, "tools": tools, "instructions": "You fix."}
            if not stream:
                return client.responses.create(**asked)
            with client.responses.create(**asked, stream=True) as events:
                got = list(events)
            for event in got:
                events_of.validate_python(event.model_dump())
            assert [e.sequence_number for e in got] == list(range(len(got)))
            deltas = "".join(e.delta for e in got if e.type == "response.output_text.delta")
            assert deltas == got[-1].response.output_text
            return got[-1].response

        full = ask()
        Response.model_validate(full.model_dump())
        assert [o.type for o in full.output] == ["reasoning", "message", "function_call", "function_call"]
        assert full.output_text == "I run."
        assert full.usage.input_tokens == len(backend.calls[0][0])
        talk += [o.model_dump(exclude_none=True) for o in full.output]
        talk += [
            {"type": "function_call_output", "call_id": o.call_id, "output": "x"} for o in full.output[2:]
        ]
        full = ask()
        assert [o.type for o in full.output] == ["custom_tool_call", "function_call"]
        assert full.output[0].input == "*** patch"
        assert (full.output[1].name, full.output[1].namespace) == ("spawn", "agents")
        talk += [o.model_dump(exclude_none=True) for o in full.output]
        kinds = ("custom_tool_call_output", "function_call_output")
        talk += [
            {"type": k, "call_id": o.call_id, "output": "x"} for k, o in zip(kinds, full.output, strict=True)
        ]
        assert ask().output_text == "done"
        assert len(opened.session.traces) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_messages(renderer, stream):
    backend = scripted(renderer, CALLS, "done")
    tools = [{"name": "bash", "description": "x", "input_schema": FLAT["parameters"]}]
    with serving(backend, renderer) as proxy, contextlib.ExitStack() as stack:
        opened = proxy.open()
        client = stack.enter_context(anthropic.Anthropic(base_url=opened.url, api_key=opened.key))
        system = [{"type": "text", "text": "You fix.", "cache_control": {"type": "ephemeral"}}]
        talk = [{"role": "user", "content": "go"}]
        asked = {"model": "policy", "max_tokens": 999, "system": system, "tools": tools}

        def ask():
            if not stream:
                return client.messages.create(messages=talk, **asked)
            with client.messages.stream(messages=talk, **asked) as events:
                assert [e.type for e in events][-1] == "message_stop"
                return events.get_final_message()

        count = client.messages.count_tokens(model="policy", messages=talk, system=system, tools=tools)
        full = ask()
        anthropic.types.Message.model_validate(full.model_dump())
        assert [b.type for b in full.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert full.content[3].input == {"command": "cat é"}
        assert full.stop_reason == "tool_use"
        assert full.usage.input_tokens == count.input_tokens == len(backend.calls[0][0])
        said = full.usage.output_tokens
        assert said == len(opened.session.nodes[0].generation.tokens)
        talk.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in full.content]})
        results = [
            {"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": "x"}]}
            for b in full.content[2:]
        ]
        talk.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})
        full = ask()
        assert (full.content[0].text, full.stop_reason) == ("done", "end_turn")
        assert full.usage.cache_read_input_tokens == count.input_tokens + said
        assert full.usage.input_tokens + full.usage.cache_read_input_tokens == len(backend.calls[1][0])
        assert len(opened.session.traces) == 1
        assert client.models.list().data[0].id == "policy"


def test_log_probs_and_ids_of_every_token(renderer):
    """CASES 82, 83, 85: also in a turn that calls tools, and in a stream."""
    with serving(scripted(renderer, CALLS, "x " + CALLS), renderer) as proxy:
        opened = proxy.open()
        asked = {**say("a"), "tools": [BASH], "logprobs": True, "top_logprobs": 0, "return_token_ids": True}
        _, _, full = post(opened.url, asked, opened.key)
        choice, node = full["choices"][0], opened.session.nodes[0]
        n = full["usage"]["completion_tokens"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == n
        assert choice["token_ids"] == node.generation.tokens.tolist()
        assert [c["logprob"] for c in choice["logprobs"]["content"]] == node.generation.logprobs.tolist()
        _, _, raw = post(opened.url, {**asked, **say("b"), "stream": True}, opened.key)
        last = json.loads(raw.decode().split("data: ")[-2])["choices"][0]
        assert last["token_ids"] == opened.session.nodes[1].generation.tokens.tolist()
        assert len(last["logprobs"]["content"]) == len(last["token_ids"])


def test_streamed_text_is_the_text(renderer):
    """CASES 94: no character is doubled or lost, wherever tokens cut it."""
    text = "A 世ab é 👩‍👩‍👧 " * 300
    with serving(scripted(renderer, text), renderer, context=30_000) as proxy:
        opened = proxy.open(sampling=Sampling(max_tokens=20_000))
        _, _, raw = post(opened.url, {**say("a"), "stream": True}, opened.key)
        chunks = [json.loads(x) for x in raw.decode().split("data: ")[1:-1]]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text


def test_what_can_not_be_read_as_a_call_is_text(renderer):
    """CASES 96: a broken call is passed on and counted; its tokens train as they were sampled."""
    broken = 'I call.\n<tool_call>\n{"name": "bash", "arguments": {"comm\n</tool_call>'
    with serving(scripted(renderer, broken, "ok"), renderer) as proxy:
        opened = proxy.open()
        _, _, full = post(opened.url, {**say("a"), "tools": [BASH]}, opened.key)
        message = full["choices"][0]["message"]
        assert message["content"] == broken
        assert "tool_calls" not in message
        assert opened.session.metrics["malformed_calls"] == 1
        (trace,) = opened.session.traces
        assert trace.tokens[trace.trainable].tolist() == [*renderer.encode_text(broken), END]
        again = {**say("a"), "tools": [BASH]}
        again["messages"] += [message, {"role": "user", "content": "No JSON."}]
        post(opened.url, again, opened.key)
        assert len(opened.session.traces) == 1


def test_odd_requests(renderer):
    """Images, unknown fields and roles: by rule, never a crash."""
    with serving(ScriptedBackend(lambda prompt: [9, END]), renderer) as proxy:
        opened = proxy.open()
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        body = {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, image]}],
            "x": {"y": 1},
        }
        body |= {"temperature": 0.2, "stop": ["\n"], "tool_choice": "required"}
        assert post(opened.url, body, opened.key)[0] == 200
        prompt = renderer.decode(opened.session.nodes[0].prompt)
        assert "see\n[not shown: this model reads text only]<|im_end|>" in prompt
        assert opened.session.forced == {"temperature": 0.2, "stop": ["\n"], "tool_choice": "required"}
        bodies = [
            [], "x", 1, None, {}, {"messages": []}, {"messages": "x"}, {"messages": [1]},
            {"messages": [{"role": "wizard", "content": "x"}]},
            {"messages": [{"role": "user", "content": 3}]},
            {**say("a"), "n": 2}, {**say("a"), "max_tokens": 0}, {**say("a"), "max_tokens": "9"},
            {**say("a"), "tools": {"a": 1}}, {**say("a"), "tools": [{"type": "function", "function": {}}]},
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]},
        ]  # fmt: skip
        for path in ("chat/completions", "messages", "responses", "messages/count_tokens"):
            for bad in bodies:
                status, _, told = post(opened.url, bad, opened.key, f"/v1/{path}")
                assert status == 400 or (status == 200 and path != "chat/completions"), (path, bad, told)
                assert status == 200 or told["error"]["message"]
            for raw in (b"", b"{", b"\xff\xfe", b"[" * 5000):
                assert post(opened.url, raw, opened.key, f"/v1/{path}")[0] == 400
        for bad in (
            {"input": [{"type": "message", "role": "x"}]},
            {"input": "a", "previous_response_id": "r"},
        ):
            assert post(opened.url, bad, opened.key, "/v1/responses")[0] == 400
        assert opened.session.metrics["errors"] == 0


# ---------------------------------------------------------------- faults


def test_errors_keep_their_status(renderer):
    good = ScriptedBackend(lambda prompt: [*renderer.encode_text("ok"), END])
    with serving(FaultyBackend(good, "error", at=0), renderer) as proxy:
        opened = proxy.open(context=60, max_turns=3)
        for stream in (True,):
            status, headers, told = post(opened.url, {**say("a"), "stream": stream}, opened.key)
            assert (status, headers["retry-after"], told["error"]["code"]) == (503, "1", "engine_error")
        status, _, told = post(opened.url, say("long " * 60), opened.key)
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length" in told["error"]["message"]
        status, _, told = post(opened.url, {**say("long " * 60), "max_tokens": 9}, opened.key, "/v1/messages")
        assert (status, told["type"]) == (400, "error")
        assert told["error"]["type"] == "invalid_request_error"
        assert told["error"]["message"].startswith("prompt is too long")
        status, _, told = post(opened.url, say("b"), opened.key)
        assert (status, told["error"]["code"]) == (403, "turn_budget_exceeded")
        assert type(opened.session.ended).__name__ == "TurnLimitError"
        late = proxy.open(deadline_s=0)
        assert post(late.url, say("b"), late.key)[2]["error"]["code"] == "time_budget_exceeded"
        small = proxy.open(token_budget=1)
        assert post(small.url, say("b"), small.key)[0] == 200
        assert post(small.url, say("c"), small.key)[2]["error"]["code"] == "token_budget_exceeded"
        small.session.close()
        status, _, told = post(small.url, say("c"), small.key)
        assert (status, told["error"]["code"]) == (410, "session_closed")


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_slow_answers_are_kept_alive(renderer, path):
    backend = Held(renderer)
    with serving(backend, renderer, keep_alive_after_s=0.05, keep_alive_every_s=0.05) as proxy:
        opened = proxy.open()
        body = {**say("a"), "input": "a", "max_tokens": 9, "stream": True}
        got = []
        for index, stream in enumerate((True, False)):
            body = {**body, "stream": stream, "input": f"a{index}", **say(f"a{index}")}
            thread = threading.Thread(
                target=lambda body=body: got.append(post(opened.url, body, opened.key, f"/v1/{path}"))
            )
            thread.start()
            until(lambda index=index: len(backend.futures) > index)
            time.sleep(0.2)
            backend.say(index, "done")
            thread.join(5)
        (_, headers, raw), (_, _, full) = got
        assert headers["content-type"] == "text/event-stream"
        alive = b"event: ping" if path == "messages" else b": keep-alive"
        assert raw.startswith(alive)
        assert raw.count(alive) >= 2
        assert b"done" in raw
        assert full["usage"], "blanks before JSON are no part of it"

        thread = threading.Thread(
            target=lambda: got.append(
                post(
                    opened.url, {**body, **say("b"), "input": "b", "stream": True}, opened.key, f"/v1/{path}"
                )
            )
        )
        thread.start()
        until(lambda: len(backend.futures) > 2)
        time.sleep(0.1)
        backend.futures[2].set_exception(EngineError("the engine is gone"))
        thread.join(5)
        assert b"the engine is gone" in got[2][2], "an error after the beginning is an event"


def test_who_hangs_up_ends_the_generation(renderer):
    backend = Held(renderer)
    with serving(backend, renderer) as proxy:
        opened = proxy.open()
        body = json.dumps(say("a"))
        line = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
        line.request(
            "POST", f"{opened.path}/v1/chat/completions", body, {"authorization": f"Bearer {opened.key}"}
        )
        until(lambda: backend.futures)
        line.close()
        until(lambda: backend.aborted == backend.futures, "it was not aborted")
        until(lambda: opened.session.metrics["hang_ups"] == 1)
        assert opened.session.traces == ()


def test_twins_share_one_generation(renderer):
    """The second of two equal requests joins the first; when the first hangs up, nothing is lost."""
    backend = Held(renderer)
    with serving(backend, renderer) as proxy:
        opened = proxy.open()
        headers = {"authorization": f"Bearer {opened.key}"}
        line = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
        line.request("POST", f"{opened.path}/v1/chat/completions", json.dumps(say("a")), headers)
        until(lambda: backend.futures)
        got = []
        thread = threading.Thread(target=lambda: got.append(post(opened.url, say("a"), opened.key)))
        thread.start()
        until(lambda: opened.session.metrics["retries"] == 1)
        line.close()
        time.sleep(0.05)
        assert not backend.aborted
        backend.say(0, "once")
        thread.join(5)
        assert got[0][2]["choices"][0]["message"]["content"] == "once"
        (trace,) = opened.session.traces
        assert trace.trainable.sum() == trace.sampled.sum() > 0
        assert len(backend.futures) == 1


def test_an_answer_that_was_not_delivered_is_kept_for_the_retry(renderer):
    big = "zq" * 60_000  # with its log-probs, more than the buffers of a connection hold
    with serving(scripted(renderer, big, "x"), renderer, context=300_000) as proxy:
        opened = proxy.open(sampling=Sampling(max_tokens=290_000))
        ask = {**say("a"), "logprobs": True}
        headers = {"authorization": f"Bearer {opened.key}"}
        line = socket.create_connection(("127.0.0.1", proxy.port))
        body = json.dumps(ask).encode()
        head = (
            f"POST {opened.path}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        )
        line.sendall((head + f"authorization: {headers['authorization']}\r\n\r\n").encode() + body)
        assert line.recv(1)
        line.close()
        until(lambda: opened.session.nodes)
        time.sleep(0.1)
        (trace,) = opened.session.traces
        assert set(trace.why[trace.sampled].tolist()) == {Why.SUPERSEDED}
        status, _, told = post(opened.url, ask, opened.key)
        assert (status, told["choices"][0]["message"]["content"]) == (200, big)
        (trace,) = opened.session.traces
        assert set(trace.why[trace.sampled].tolist()) == {Why.SAMPLED}
        assert opened.session.metrics["retries"] == 1


def test_requests_wait_while_weights_change(renderer):
    backend = scripted(renderer, "late")
    with serving(backend, renderer) as proxy:
        opened = proxy.open()
        got = []
        with proxy.paused():
            thread = threading.Thread(target=lambda: got.append(post(opened.url, say("a"), opened.key)))
            thread.start()
            time.sleep(0.15)
            assert not backend.calls
            backend.version = 7
        thread.join(5)
        assert got[0][0] == 200
        assert set(opened.session.nodes[0].generation.version) == {7}


# ---------------------------------------------------------------- security


def test_only_the_key_opens_a_session(renderer):
    with serving(ScriptedBackend([[9, END]] * 9), renderer) as proxy:
        mine, other = proxy.open("mine"), proxy.open("other")
        for key in (None, "", "x", other.key, proxy.control_key, mine.id):
            for path in (
                "/v1/chat/completions",
                "/v1/messages",
                "/v1/responses",
                "/v1/messages/count_tokens",
            ):
                assert post(mine.url, say("a"), key, path)[0] == 401
        unknown, forged = (
            post(proxy.url + "/s/nobody", say("a"), mine.key),
            post(mine.url, say("a"), other.key),
        )
        assert unknown[0] == forged[0] == 401
        assert unknown[2] == forged[2], "a wrong key and a wrong id look the same"
        assert post(proxy.url, say("a"), mine.key)[0] == 200, "the key alone names the session"
        assert post(mine.url, say("b"), **{"x-api-key": mine.key})[0] == 200
        assert len(mine.session.nodes) == 2
        assert not other.session.nodes
        for path in (
            "/sessions",
            f"/sessions/{mine.id}",
            "/s/../sessions",
            "/s/%2e%2e/v1/models",
            "//etc/passwd",
        ):
            for key in (mine.key, proxy.control_key):
                assert post(proxy.url, {}, key, path)[0] in (401, 404)
        with pytest.raises(InputError, match="letters"):
            proxy.open("../x")
        with pytest.raises(UnknownNameError):
            proxy.session("nobody")


def test_the_control_api(renderer):
    with serving(ScriptedBackend([[9, END]] * 9), renderer) as proxy:
        control, key = proxy.control_url, proxy.control_key
        mine = proxy.open()
        for wrong in (None, "", mine.key):
            assert post(control, {}, wrong, "/sessions")[0] == 401
        status, _, made = post(control, {"name": "a", "max_turns": 2, "seed": 3}, key, "/sessions")
        assert status == 200
        assert post(made["url"], say("x"), made["key"])[0] == 200
        one = f"/sessions/{made['id']}"
        assert post(control, {"reward": 0.5, "scores": {"tests": 1}}, key, f"{one}/score")[2]["reward"] == 0.5

        def get(path, method="GET"):
            request = urllib.request.Request(control + path, method=method)
            request.add_header("authorization", f"Bearer {key}")
            with urllib.request.urlopen(request, timeout=5) as answer:
                return json.load(answer)

        about = get(one)
        assert (about["metrics"]["calls"], about["scores"], about["closed"]) == (1, {"tests": 1.0}, False)
        assert get(f"{one}/export?format=native")[0]["reward"] == 0.5
        assert get(f"{one}/export?format=messages")[0]["messages"][0]["content"] == "x"
        assert {s["id"] for s in get("/sessions")["sessions"]} == {made["id"], mine.id}
        assert get("/health")["template"].startswith("the chat template")
        assert post(control, {}, key, f"{one}/close")[2]["closed"]
        assert get(one, "DELETE") == {"forgotten": made["id"]}
        assert post(control, {}, key, f"{one}/close")[0] == 404
        assert post(made["url"], say("x"), made["key"])[0] == 401
        assert post(control, {"wings": 2}, key, "/sessions")[0] == 400
        assert post(control, {}, key, "/pause")[2]["status"] == "paused"
        assert post(control, {}, key, "/resume")[2]["status"] == "ok"


def test_addresses_beyond_this_machine_need_a_key(renderer):
    backend = ScriptedBackend([])
    with pytest.raises(InputError, match="control_key"):
        Proxy(backend, renderer, host="0.0.0.0")
    with pytest.raises(InputError, match="16 characters"):
        Proxy(backend, renderer, host="0.0.0.0", control_key="short")
    with pytest.raises(InputError, match="kinds"):
        Proxy(backend, renderer, train=("all",))


def test_large_and_slow_bodies_are_refused(renderer):
    with serving(ScriptedBackend([]), renderer, max_body=10_000, body_timeout_s=0.1) as proxy:
        opened = proxy.open()
        assert post(opened.url, say("x" * 20_000), opened.key)[0] == 413
        line = socket.create_connection(("127.0.0.1", proxy.port), timeout=5)
        head = f"POST {opened.path}/v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
        line.sendall((head + f"authorization: Bearer {opened.key}\r\n\r\n{{").encode())
        assert b" 408 " in line.recv(1000)
        line.close()


# ---------------------------------------------------------------- sockets


def test_a_unix_socket_and_a_forwarder(renderer, tmp_path):
    path = tmp_path / "proxy.sock"
    with serving(scripted(renderer, "one", "two"), renderer, socket=path) as proxy:
        opened = proxy.open()

        async def ask():
            async with (
                aiohttp.UnixConnector(str(path)) as connector,
                aiohttp.ClientSession(connector=connector) as http_session,
                http_session.post(
                    f"http://x{opened.path}/v1/chat/completions",
                    json=say("a"),
                    headers={"authorization": f"Bearer {opened.key}"},
                ) as answer,
            ):
                return await answer.json()

        assert asyncio.run(ask())["choices"][0]["message"]["content"] == "one"
        with subprocess.Popen(
            [sys.executable, "-I", str(Path(forward.__file__)), str(path), "0"],
            stdout=subprocess.PIPE,
            text=True,
        ) as program:
            assert program.stdout is not None
            port = int(program.stdout.readline())
            base = f"http://127.0.0.1:{port}{opened.path}"
            try:
                assert post(base, say("b"), opened.key)[2]["choices"][0]["message"]["content"] == "two"
            finally:
                program.kill()
    assert not path.exists()


def test_hanging_up_is_seen_through_the_forwarder(renderer, tmp_path):
    path, backend = tmp_path / "proxy.sock", Held(renderer)
    with serving(backend, renderer, socket=path) as proxy:
        opened = proxy.open()

        async def play():
            server = await forward.serve(str(path), 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                body = json.dumps(say("a")).encode()
                head = (
                    f"POST {opened.path}/v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
                )
                writer.write((head + f"authorization: Bearer {opened.key}\r\n\r\n").encode() + body)
                while not backend.futures:
                    await asyncio.sleep(0.005)
                writer.close()
                await writer.wait_closed()
                for _ in range(400):
                    if backend.aborted:
                        return
                    await asyncio.sleep(0.005)

        asyncio.run(play())
        assert backend.aborted == backend.futures


def test_a_taken_address_is_told(renderer):
    with serving(ScriptedBackend([]), renderer) as proxy, pytest.raises(OSError, match="address"):
        Proxy(ScriptedBackend([]), renderer, port=proxy.port).start()


def test_what_is_known_of_a_conversation_is_not_read_again(renderer):
    """Histories that are edited, marks that move, dialects that change within a session: each request is read
    as in a session that never saw the earlier ones."""
    mark = {"cache_control": {"type": "ephemeral"}}

    def text(said, **more):
        return {"type": "text", "text": said, **more}

    first = [{"role": "user", "content": [text("a", **mark)]}]
    longer = [{"role": "user", "content": [text("a")]}, {"role": "assistant", "content": "yes"}]
    longer += [{"role": "user", "content": [text("b"), text("c", **mark)]}]
    edited = [{"role": "user", "content": "other"}, *longer[1:], {"role": "assistant", "content": "no"}]
    tools = [{"name": "bash", "description": "d", "input_schema": {"type": "object"}}]
    bodies = [
        ("messages", {"messages": first, "tools": tools, "max_tokens": 9}),
        ("messages", {"messages": longer, "tools": tools, "max_tokens": 9}),
        ("messages", {"messages": [*edited, first[0]], "tools": [], "max_tokens": 9}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [BASH]}),
        ("responses", {"input": [{"role": "user", "content": "a"}, {"type": "web_search_call"},
                                 {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]}),
        ("responses", {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "y"},
                                 {"role": "user", "content": "b"}]}),
        ("messages", {"messages": longer, "tools": tools, "max_tokens": 9}),
    ]  # fmt: skip
    memory = Memory()
    for name, body in bodies:
        dialect = DIALECTS[name]
        again = dialect.read(body, memory).request
        assert again == dialect.read(json.loads(json.dumps(body)), Memory()).request
    turned = DIALECTS["messages"].read({"messages": longer, "max_tokens": 9}, memory).request
    assert turned.messages[0] is again.messages[0], "it is the same object"
