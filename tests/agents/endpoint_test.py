"""The client against a server in this process."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from metagym.agents.endpoint import Endpoint, endpoints
from metagym.errors import ContextOverflowError, EngineError, InputError
from metagym.types import Message


class Server:
    """Answers with what `answers` holds, in order: (status, body, headers); then with an echo."""

    def __init__(self):
        self.asked, self.answers = [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, body, dict(self.headers)))
                if outer.answers:
                    status, answer, headers = outer.answers.pop(0)
                else:
                    reply = {"role": "assistant", "content": f"I heard {len(body['messages'])}"}
                    status, answer, headers = 200, json.dumps({"choices": [{"message": reply}]}), {}
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer.encode())

            def log_message(self, format, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def chat(server, **kwargs):
    return Endpoint(server.url, "m", wait_s=0.001, **kwargs)


USER = Message("user", "hello")


def test_what_is_asked(server):
    reply = chat(server, key="k", sampling={"temperature": 0.5, "seed": 3}).chat([USER])
    assert reply == Message("assistant", "I heard 1")
    path, body, headers = server.asked[0]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "m",
        "temperature": 0.5,
        "seed": 3,
        "messages": [{"role": "user", "content": "hello"}],
    }
    assert headers["Authorization"] == "Bearer k"


def test_a_begun_reply_is_part_of_the_answer(server):
    assert chat(server).chat([USER], prefix="Well: ").content == "Well: I heard 2"
    body = server.asked[0][1]
    assert body["messages"][-1] == {"role": "assistant", "content": "Well: "}
    assert body["continue_final_message"] is True
    assert body["add_generation_prompt"] is False


def test_it_tries_again_when_told_to(server):
    server.answers = [(429, "slow", {"Retry-After": "0"}), (503, "", {}), (200, "no json", {})]
    assert chat(server, retries=3).chat([USER]).content == "I heard 1"
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("answer", "kind", "tries"),
    [
        ((401, "who?", {}), EngineError, 1),
        ((500, "oops", {}), EngineError, 3),
        ((400, "maximum context length is 10 tokens", {}), ContextOverflowError, 1),
        ((200, "{}", {}), EngineError, 1),
    ],
)
def test_errors(server, answer, kind, tries):
    server.answers = [answer] * 3
    with pytest.raises(kind):
        chat(server, retries=2).chat([USER])
    assert len(server.asked) == tries


def test_nobody_there():
    with pytest.raises(EngineError, match="can't be used"):
        Endpoint("http://127.0.0.1:9/v1", "m", retries=0).chat([USER])


def test_each_episode_has_its_seed_and_keys_stay_out_of_the_record(server, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "hush")
    new_chat = endpoints(server.url, "m", key_name="SOME_KEY", sampling={"temperature": 0.0})
    new_chat(5).chat([USER])
    _, body, headers = server.asked[0]
    assert body["seed"] == 5
    assert headers["Authorization"] == "Bearer hush"
    assert "hush" not in json.dumps(new_chat(5).about()) + repr(new_chat)


def test_wrong_arguments_are_told(monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(InputError, match="SOME_KEY is not set"):
        endpoints("http://x/v1", "m", key_name="SOME_KEY")
    with pytest.raises(InputError, match="begins with http"):
        Endpoint("x/v1", "m")
