"""The backend on a real SGLang server: a dense model."""

import concurrent.futures
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import types
import urllib.request

import jax
import numpy as np
import pytest
from flax import nnx

from metagym.errors import ContextOverflowError, EngineError, InputError
from metagym.proxy.backends import sglang
from metagym.proxy.backends.sglang import SGLangBackend
from metagym.proxy.render import Renderer
from metagym.proxy.session import Session
from metagym.types import Message, Sampling

TOLERANCE = 1e-5  # nats, f32


@pytest.fixture(scope="module")
def server(qwen2, serve):
    process = serve(qwen2[1])
    yield process
    process.stop()


@pytest.fixture
def connect(server, qwen2):
    """Makes backends on the server, which closes them."""
    with contextlib.ExitStack() as stack:

        def make(**kwargs):
            model, folder = qwen2
            backend = SGLangBackend([server.url], folder, model=model, **kwargs)
            stack.callback(backend.close)
            return backend

        yield make


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def own(model):
    return nnx.split(model)[1]


def larger(model):
    """Other weights of the model."""
    return jax.tree.map(lambda x: x * 1.1, own(model))


def distance(score, model, ids, generation, **kwargs):
    return np.abs(generation.logprobs - score(model, ids, generation, **kwargs)).max()


def test_log_probs_are_the_trainers(connect, qwen2, score):
    backend, model = connect(), qwen2[0]
    backend.load(own(model), 0)
    alone = backend.submit(ids := prompt(20), Sampling(32, seed=3)).result()
    assert len(alone.tokens) == 32
    assert alone.finish == "length"
    worst = {"single": distance(score, model, ids, alone)}
    prompts = [prompt(1 + i, i) for i in range(40)]
    batch = [backend.submit(p, Sampling(24)) for p in prompts]
    worst["batched"] = max(distance(score, model, p, f.result()) for p, f in zip(prompts, batch, strict=True))
    ids, turns = prompt(40), []
    for turn in range(6):
        said = backend.submit(ids, Sampling(30)).result()
        turns.append(distance(score, model, ids, said))
        ids = [*ids, *said.tokens.tolist(), *prompt(5, turn)]
    worst["multi-turn"] = max(turns)
    print({k: float(v) for k, v in worst.items()})
    assert max(worst.values()) < TOLERANCE
    assert backend.stats()["cached_tokens"] > 150  # of the turns: each reads the last one from the cache


def test_a_session_on_the_server(connect, qwen2, score):
    backend, (model, folder) = connect(), qwen2
    backend.load(own(model), 4)
    session = Session(backend, Renderer.from_dir(folder), sampling=Sampling(16), context=512, seed=1)
    messages = [Message("user", "hello")]
    for _ in range(3):
        messages += [session.chat(messages), Message("user", "go on")]
    (trace,) = session.traces
    assert trace.sampled.sum() == session.metrics["sampled_tokens"]
    assert set(trace.version[trace.sampled]) == {4}


def test_greedy_and_temperature(connect, qwen2, score):
    backend, model = connect(), qwen2[0]
    backend.load(own(model), 0)
    ids = prompt(30)
    a, b = (backend.submit(ids, Sampling(12, temperature=0.0)).result() for _ in range(2))
    np.testing.assert_array_equal(a.tokens, b.tokens)
    assert distance(score, model, ids, a) < TOLERANCE
    cold = backend.submit(ids, Sampling(12, temperature=0.5)).result()
    assert distance(score, model, ids, cold) > 0.01  # those of another temperature


def test_stop_tokens_are_ours(connect, qwen2):
    """The server would end at the end-of-turn token of its tokenizer, asked for or not."""
    backend, (_, folder) = connect(), qwen2
    end = Renderer.from_dir(folder).end_of_turn
    assert end is not None
    said = [f.result() for f in [backend.submit(prompt(8, i), Sampling(60)) for i in range(30)]]
    assert all(g.finish == "length" and len(g.tokens) == 60 for g in said)
    assert backend.stats()["continued"] > 0  # over such a token
    stops = tuple(range(0, 250, 8))
    running = [backend.submit(prompt(8, i), Sampling(60, stop_token_ids=stops)) for i in range(10)]
    for g in [f.result() for f in running]:
        assert g.finish == "stop"
        assert np.isin(g.tokens, stops).tolist() == [*[False] * (len(g.tokens) - 1), True]


def test_overflow(connect):
    backend = connect()
    assert backend.context == 4094
    longest = backend.submit([5] * 4089, Sampling(64)).result()
    assert len(longest.tokens) == 5
    assert longest.finish == "length"
    for n in (4090, 5000):
        with pytest.raises(ContextOverflowError, match="4094"):
            backend.submit([5] * n, Sampling(4)).result()
    assert len(connect(context=64).submit([5] * 60, Sampling(64)).result().tokens) == 4
    with pytest.raises(InputError, match="5000 are asked"):
        connect(context=5000)
    with pytest.raises(InputError, match="258"):
        backend.submit([258], Sampling(4))


@pytest.mark.parametrize("push", ["disk", "tensor"])
def test_a_push_changes_the_next_log_probs(connect, qwen2, score, push):
    backend, model = connect(push=push), qwen2[0]
    ids = prompt(40)
    for version, params in ((1, own(model)), (2, larger(model)), (3, own(model))):
        backend.load(params, version)
        generation = backend.submit(ids, Sampling(24)).result()
        assert set(generation.version) == {version} == {backend.version}
        assert distance(score, model, ids, generation, params=params) < TOLERANCE
    other = distance(score, model, ids, generation, params=larger(model))
    print(f"by {push}: {backend.stats()['push_s']:.3f} s; distance to other weights {other:.2f}")
    assert other > 0.1
    with pytest.raises(InputError, match="must rise"):
        backend.load(own(model), 3)


@pytest.mark.parametrize("push", ["disk", "tensor"])
@pytest.mark.parametrize("pause", ["retract", "in_place", "abort", "wait"])
def test_a_push_in_mid_generation(connect, qwen2, score, pause, push):
    backend, model = connect(pause=pause, push=push), qwen2[0]
    old, new = own(model), larger(model)
    backend.load(old, 1)
    prompts = [prompt(30, i) for i in range(4)]
    start = time.monotonic()
    for future in [backend.submit(p, Sampling(30)) for p in prompts]:
        future.result()
    running = [backend.submit(p, Sampling(150)) for p in prompts]
    time.sleep(time.monotonic() - start)  # about a fifth of what they take
    assert not any(f.done() for f in running)
    backend.load(new, 2)
    for ids, future in zip(prompts, running, strict=True):
        generation = future.result()
        assert len(generation.tokens) == 150
        cut = int((generation.version == 1).sum())
        assert generation.version.tolist() == [1] * cut + [2] * (150 - cut)
        assert {"abort": cut == 0, "wait": cut == 150}.get(pause, 0 < cut < 150)
        before = np.abs(generation.logprobs - score(model, ids, generation, params=old))[:cut]
        after = np.abs(generation.logprobs - score(model, ids, generation, params=new))[cut:]
        assert before.size == 0 or before.max() < TOLERANCE
        if pause != "in_place":  # there, later tokens see keys and values of both
            assert after.size == 0 or after.max() < TOLERANCE
    fresh = backend.submit(prompts[0], Sampling(8)).result()  # nothing old is found in the prefix cache
    assert distance(score, model, prompts[0], fresh, params=new) < TOLERANCE


def test_a_failed_push_leaves_the_old_weights(connect, qwen2, score, monkeypatch, caplog):
    backend, model = connect(), qwen2[0]
    backend.load(own(model), 1)

    def empty(model, folder, **kwargs):
        folder.mkdir()
        return folder

    running = [backend.submit(prompt(30, 50 + i), Sampling(150)) for i in range(4)]
    time.sleep(0.5)
    with monkeypatch.context() as patch:
        patch.setattr(sglang, "save", empty)
        with pytest.raises(
            EngineError, match=r"no SGLang server took weights 2, and weights 1 go on serving.*400"
        ):
            backend.load(larger(model), 2)
    for i, future in enumerate(running):  # aborted on the server, and sampled again
        generation = future.result()
        assert set(generation.version) == {1}
        assert distance(score, model, prompt(30, 50 + i), generation) < TOLERANCE
    generation = backend.submit(ids := prompt(30), Sampling(16)).result()
    assert set(generation.version) == {1} == {backend.version}
    assert distance(score, model, ids, generation) < TOLERANCE
    backend.load(larger(model), 3)
    generation = backend.submit(ids, Sampling(16)).result()
    assert distance(score, model, ids, generation, params=larger(model)) < TOLERANCE
    assert backend.stats()["failed_loads"] == 1


def test_weights_from_elsewhere_are_noticed(connect, qwen2, score, caplog):
    mine, theirs, model = connect(), connect(), qwen2[0]
    mine.load(own(model), 1)
    theirs.load(larger(model), 9)
    with pytest.raises(EngineError, match="not pushed"):
        mine.submit(prompt(30), Sampling(4)).result()
    generation = mine.submit(ids := prompt(30), Sampling(4)).result()  # it was pushed again
    assert distance(score, model, ids, generation) < TOLERANCE


@pytest.mark.parametrize("pause", ["wait", "retract", "in_place", "abort"])
def test_abort(connect, qwen2, pause):
    backend = connect(pause=pause)
    start = time.monotonic()
    backend.submit(prompt(30), Sampling(50)).result()
    pace = (time.monotonic() - start) / 50
    future = backend.submit(prompt(30), Sampling(3000))
    time.sleep(20 * pace)
    backend.abort(future)
    assert future.cancelled()
    start = time.monotonic()
    while backend.stats()["running"]:
        assert time.monotonic() - start < 30
        time.sleep(0.05)
    assert backend.stats()["aborted"] == 1
    backend.load(own(qwen2[0]), 1)  # at once, and what waits for running replies has none to wait for
    assert time.monotonic() - start < 2000 * pace
    running = backend.submit(prompt(30), Sampling(3000))
    backend.close()
    with pytest.raises(EngineError, match="closed"):
        running.result()
    with pytest.raises(EngineError, match="closed"):
        backend.submit([1], Sampling(1)).result()


def test_another_model_or_tokenizer_is_refused(server, made, qwen2, tmp_path):
    with pytest.raises(InputError, match=r"Qwen2ForCausalLM.*LlamaForCausalLM"):
        SGLangBackend([server.url], made()[1])
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((qwen2[1] / "config.json").read_text())
    text = (qwen2[1] / "tokenizer.json").read_text()
    assert '"a":' in text
    text = text.replace('"a":', '"SWAP":').replace('"b":', '"a":').replace('"SWAP":', '"b":')
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match="another tokenizer"):
        SGLangBackend([server.url], folder)


CLIENT = """
import json, sys
from openai import OpenAI
client, messages, counts = OpenAI(base_url=sys.argv[1] + "/v1", api_key=sys.argv[2]), [], []
for turn in range(4):
    messages.append({"role": "user", "content": f"turn {turn}"})
    more = {"stream": True, "stream_options": {"include_usage": True}} if turn % 2 else {}
    said = client.chat.completions.create(model="policy", messages=messages, **more)
    if turn % 2:
        chunks = list(said)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        usage = [c.usage for c in chunks if c.usage][-1]
    else:
        text, usage = said.choices[0].message.content, said.usage
    counts.append(usage.completion_tokens)
    messages.append({"role": "assistant", "content": text})
print(json.dumps(counts))
"""


@pytest.mark.parametrize("launched", [False, True])
def test_metagym_serve(server, qwen2, python, flags, score, launched):
    """OpenAI's own client, some of whose requests are streamed, against a running server and one that
    `metagym serve` starts."""
    command = [sys.executable, "-m", "metagym.cli", "serve", "--backend=sglang", f"--model={qwen2[1]}"]
    command += ["--port=0", "--control-port=0", "--context=512", "--chat-template=plain", "--max-tokens=12"]
    command += ["--open=try"]
    if launched:  # else the weights are those of the last test
        command += [f"--sglang-python={python}", *(f"--sglang-arg={flag}" for flag in flags)]
    else:
        command += [f"--sglang-url={server.url}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            told = json.loads(program.stdout.readline())
            session = told["session"]
            client = [os.environ["METAGYM_TEST_SGLANG"], "-c", CLIENT, session["url"], session["key"]]
            counts = json.loads(subprocess.run(client, check=True, capture_output=True, text=True).stdout)
            read = urllib.request.Request(f"{told['control_url']}/sessions/{session['id']}/export")
            read.add_header("authorization", f"Bearer {told['control_key']}")
            with urllib.request.urlopen(read, timeout=10) as answer:
                (row,) = json.load(answer)  # one conversation, nothing of which was tokenised again
        finally:
            program.terminate()
        assert program.wait(60) == 0
    assert len(counts) == 4
    assert sum(row["sampled"]) == sum(counts)
    sampled = row["sampled"]
    runs = itertools.groupby(range(len(sampled)), sampled.__getitem__)
    spans = [list(run) for said, run in runs if said]
    assert len(spans) == 4
    for span in spans if launched else ():
        tokens, logprobs = (
            np.array(row[name])[span].astype(kind) for name, kind in (("tokens", int), ("logprobs", float))
        )
        said = types.SimpleNamespace(tokens=tokens, logprobs=logprobs)
        assert distance(score, qwen2[0], row["tokens"][: span[0]], said) < TOLERANCE


def test_200_sessions_of_20_turns(connect, qwen2):
    """As many conversations as that at once; each turn reads the turns before from the prefix cache."""
    backend, (model, folder) = connect(), qwen2
    backend.load(own(model), 1)
    renderer, start = Renderer.from_dir(folder, "plain"), time.monotonic()
    failures = []

    def play(number):
        session = Session(backend, renderer, sampling=Sampling(4), context=512, seed=number)
        messages = [Message("user", f"session {number:03d}")]
        for _ in range(20):
            messages += [session.chat(messages), Message("user", "next")]
        if len(session.traces) != 1 or session.metrics["sampled_tokens"] != session.traces[0].trainable.sum():
            failures.append(number)

    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        list(pool.map(play, range(200)))
    stats = backend.stats()
    share = stats["cached_tokens"] / stats["prompt_tokens"]
    print(f"4,000 turns in {time.monotonic() - start:.0f} s, {share:.1%} of the prompts from the cache")
    assert not failures
    assert stats["requests"] >= 4000
    assert stats["lost"] == 0
    assert share > 0.8
    assert threading.active_count() < 50
