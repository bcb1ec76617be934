"""The backend on two real SGLang servers at once, which it starts, and on SGLang's own router in front of
them."""

import concurrent.futures
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter

import jax
import numpy as np
import pytest
from flax import nnx

from metagym.proxy.backends.sglang import SGLangBackend
from metagym.proxy.backends.sglang_remote import Remote
from metagym.proxy.backends.sglang_server import SGLangProcess
from metagym.proxy.render import Renderer
from metagym.proxy.session import Session
from metagym.types import Message, Sampling

TOLERANCE = 1e-5  # nats, f32


@pytest.fixture(scope="module")
def processes(qwen2, python, flags, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    return [SGLangProcess(qwen2[1], logs / f"{i}.log", args=flags, python=python) for i in range(2)]


@pytest.fixture(scope="module")
def backend(qwen2, processes):
    model, folder = qwen2
    backend = SGLangBackend(processes, folder, model=model, start_s=600)
    backend.load(nnx.split(model)[1], 1)
    yield backend
    backend.close()


@pytest.fixture
def asked(monkeypatch):
    """Generations that each address was asked for."""
    counts, post = Counter(), Remote.post

    def counting(self, path, body, timeout_s=None):
        counts[self.url] += path == "/generate"
        return post(self, path, body, timeout_s)

    monkeypatch.setattr(Remote, "post", counting)
    return counts


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def talk(backend, folder, sessions, turns):
    """Conversations at once. The share of prompt tokens that came from the cache, leaving first turns out."""
    renderer = Renderer.from_dir(folder, "plain")

    def play(number):
        session = Session(backend, renderer, sampling=Sampling(8), context=1024, seed=number)
        messages = [Message("user", f"{number:03d} " * 30)]
        for _ in range(turns):
            messages += [session.chat(messages), Message("user", "next")]
        assert len(session.traces) == 1

    before = backend.stats()
    with concurrent.futures.ThreadPoolExecutor(sessions) as pool:
        list(pool.map(play, range(sessions)))
    after = backend.stats()
    read, cached = (after[n] - before[n] for n in ("prompt_tokens", "cached_tokens"))
    return cached / read


def test_conversations_spread_and_stay(backend, qwen2, asked, processes):
    share = talk(backend, qwen2[1], sessions=12, turns=8)
    print(f"two servers: {dict(asked)}, {share:.1%} of the prompts from their caches")
    assert min(asked[p.url] for p in processes) >= 12 * 8 * 0.25
    assert share > 0.7  # of 8 turns, one is new; a turn that went elsewhere would read nothing


def test_both_get_the_weights(backend, qwen2, score, asked, processes):
    model = qwen2[0]
    new = jax.tree.map(lambda x: x * 1.1, nnx.split(model)[1])
    backend.load(new, 2)
    prompts = [prompt(40, i) for i in range(8)]
    for ids, future in [(p, backend.submit(p, Sampling(16))) for p in prompts]:
        generation = future.result()
        assert set(generation.version) == {2}
        assert np.abs(generation.logprobs - score(model, ids, generation, params=new)).max() < TOLERANCE
    assert min(asked[p.url] for p in processes) >= 2


def test_one_is_killed(backend, qwen2, score, asked, processes, server_of):
    """In the middle of generations: those are had from the other one. Weights go to the one that is left, and
    the one that was killed comes back with them."""
    model = qwen2[0]
    prompts = [prompt(40, 100 + i) for i in range(12)]
    running = [backend.submit(p, Sampling(200)) for p in prompts]
    time.sleep(1.0)
    assert not any(f.done() for f in running)
    os.kill(server_of(processes[0].pid), signal.SIGKILL)
    for future in running:
        assert len(future.result().tokens) == 200
    stats = backend.stats()
    assert stats["lost"] >= 3
    assert stats["retries"] >= stats["lost"] >= 3
    assert stats["servers_up"] == 1
    new = jax.tree.map(lambda x: x * 1.2, nnx.split(model)[1])
    start = time.monotonic()
    backend.load(new, 3)
    print(f"{stats['lost']:.0f} of 12 generations were had from the other server")
    assert set(backend.submit(prompt(20), Sampling(4)).result().version) == {3}
    while backend.stats()["servers_up"] < 2:
        assert time.monotonic() - start < 600
        time.sleep(0.5)
    print(f"it was back {time.monotonic() - start:.0f} s later")
    asked.clear()
    generations = [(p, backend.submit(p, Sampling(16))) for p in [prompt(40, 200 + i) for i in range(8)]]
    for ids, future in generations:
        generation = future.result()
        assert set(generation.version) == {3}
        assert np.abs(generation.logprobs - score(model, ids, generation, params=new)).max() < TOLERANCE
    assert asked[processes[0].url] >= 2


def test_the_router_of_sglang(backend, qwen2, python, processes, asked, tmp_path):
    """It gets the generations, and the servers the weights."""
    model, folder = qwen2
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    urls = [p.url for p in processes]
    command = [python, "-m", "sglang_router.launch_router", "--policy=cache_aware", "--host=127.0.0.1"]
    command += [f"--port={port}", "--worker-urls", *urls, "--prometheus-port", str(_free_port())]
    with (tmp_path / "router.log").open("wb") as out:
        router = subprocess.Popen(command, stdout=out, stderr=out)
    through = None
    try:
        start = time.monotonic()
        while through is None:
            try:
                through = SGLangBackend(urls, folder, model=model, router=f"http://127.0.0.1:{port}")
            except Exception:
                assert router.poll() is None, (tmp_path / "router.log").read_text()[-2000:]
                assert time.monotonic() - start < 60
                time.sleep(0.5)
        asked.clear()
        through.load(nnx.split(model)[1], 5)
        share = talk(through, folder, sessions=8, turns=6)
        print(f"by the router: {share:.1%} of the prompts from the caches")
        assert set(through.submit(prompt(20), Sampling(4)).result().version) == {5}
        assert (+asked).keys() == {f"http://127.0.0.1:{port}"}
        assert share > 0.5
    finally:
        if through is not None:
            through.close()
        router.terminate()
        router.wait(30)


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_nothing_is_left(backend, processes, server_of):
    """The last test of this file: it ends the servers."""
    pids = [p.pid for p in processes]
    backend.close()
    assert threading.active_count() < 50
    for pid in pids:
        with pytest.raises(AssertionError, match="no server"):
            server_of(pid)
