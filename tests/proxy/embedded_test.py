"""The engine: what it samples is what the model says, whoever shares the batch, the cache or the moment."""

import copy
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from metagym.errors import ContextOverflowError, EngineError, InputError
from metagym.models import Llama, ModelConfig
from metagym.protocols import Backend
from metagym.proxy.backends.embedded import EmbeddedBackend, Tiles
from metagym.proxy.render import Renderer
from metagym.proxy.session import Session
from metagym.types import Message, Sampling

CONFIG = ModelConfig(
    vocab_size=430,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    max_position_embeddings=256,
)
WAIT = 240  # seconds after which a future counts as hung; compiling on a busy machine takes a while
TILES = Tiles(prefill=((1, 8), (4, 8), (2, 32)), decode=(1, 8), pages=(8, 16))


@pytest.fixture(scope="module")
def model():
    return Llama(CONFIG, seed=1)


@pytest.fixture(scope="module")
def other_params():
    return nnx.split(Llama(CONFIG, seed=2))[1]


def engine(model, **kwargs):
    kwargs = {"slots": 8, "context": 128, "page_size": 8, "tiles": TILES, **kwargs}
    return EmbeddedBackend(model, **kwargs)


@pytest.fixture
def backend(model):
    backend = engine(model)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def shared(model):
    """One engine for the tests that leave it whole: compiling costs more than they do."""
    backend = engine(model)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def score(model):
    """Log-probs of the tokens of a sequence by one forward pass over all of it."""

    graphdef, own = nnx.split(model)

    @jax.jit
    def forward(params, tokens):
        model = nnx.merge(graphdef, params)
        at = jnp.arange(128)[None]
        hidden = model.hidden(tokens[None], at, jnp.ones_like(at))
        return model.token_logprobs(hidden, jnp.roll(tokens, -1)[None])[0][0]

    def logprobs(prompt, reply, params=own):
        row = np.zeros(128, np.int32)
        row[: len(prompt) + len(reply)] = [*prompt, *reply]
        return np.asarray(forward(params, row))[len(prompt) - 1 : len(prompt) + len(reply) - 1]

    return logprobs


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(7, 420, n).tolist()


def same(a, b):
    return a.tokens.tolist() == b.tokens.tolist()


def grew(before, after, *names):
    return [int(after[n] - before[n]) for n in names]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 50])
def test_logprobs_are_those_of_a_full_forward(shared, score, length):
    assert isinstance(shared, Backend)
    ids = prompt(length, seed=length)
    futures = [shared.submit(ids, Sampling(max_tokens=20, seed=s)) for s in range(3)]
    for future in futures:
        g = future.result(WAIT)
        assert len(g.tokens) == 20
        assert g.finish == "length"
        np.testing.assert_allclose(g.logprobs, score(ids, g.tokens), atol=1e-4, rtol=0)


def test_same_seed_same_tokens_alone_in_a_batch_and_from_the_cache(shared):
    requests = [(prompt(5 + 7 * i, seed=100 + i), Sampling(max_tokens=12, seed=i)) for i in range(8)]
    alone = [shared.submit(*r).result(WAIT) for r in requests]
    together = [f.result(WAIT) for f in [shared.submit(*r) for r in reversed(requests)]][::-1]
    for a, b in zip(alone, together, strict=True):
        assert same(a, b)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
    one, two = (shared.submit(requests[0][0], Sampling(max_tokens=12)).result(WAIT) for _ in range(2))
    assert not same(one, two), "without a seed the engine draws a new one"


def test_a_group_prefills_its_prompt_once(shared):
    ids = prompt(45, seed=200)
    before = shared.stats()
    futures = [shared.submit(ids, Sampling(max_tokens=6, seed=s)) for s in range(16)]
    replies = [f.result(WAIT) for f in futures]
    now = shared.stats()
    assert grew(before, now, "prefilled_tokens", "whole_hits") == [45, 15]
    assert len({tuple(g.tokens) for g in replies}) == 16
    again = shared.submit(ids, Sampling(max_tokens=1, seed=3)).result(WAIT)
    assert again.tokens[0] == replies[3].tokens[0]
    np.testing.assert_allclose(again.logprobs, replies[3].logprobs[:1], atol=1e-5, rtol=0)
    after = shared.stats()
    assert grew(now, after, "prefilled_tokens", "prefill_steps", "decode_steps") == [0, 0, 0], (
        "no forward at all"
    )


def test_the_next_turn_reads_the_last_one_from_the_cache(shared, score):
    ids = prompt(20, seed=300)
    first = shared.submit(ids, Sampling(max_tokens=14, seed=1)).result(WAIT)
    second = [*ids, *first.tokens.tolist(), *prompt(5, seed=301)]
    before = shared.stats()
    g = shared.submit(second, Sampling(max_tokens=4, seed=2)).result(WAIT)
    # 33 of the 39 tokens were read before; 4 pages of 8 are full.
    assert grew(before, shared.stats(), "prefilled_tokens") == [39 - 32]
    np.testing.assert_allclose(g.logprobs, score(second, g.tokens), atol=1e-4, rtol=0)


def test_prompts_with_a_common_beginning_compute_it_once(shared, score):
    common = prompt(40, seed=400)
    prompts = [common + prompt(3, seed=401 + i) for i in range(6)]
    before = shared.stats()
    futures = [shared.submit(p, Sampling(max_tokens=3, seed=0)) for p in prompts]
    for p, f in zip(prompts, futures, strict=True):
        np.testing.assert_allclose(f.result(WAIT).logprobs, score(p, f.result().tokens), atol=1e-4, rtol=0)
    assert grew(before, shared.stats(), "prefilled_tokens") == [40 + 6 * 3]


def test_stop_tokens_and_length(shared):
    ids = prompt(9, seed=500)
    free = shared.submit(ids, Sampling(max_tokens=10, seed=4)).result(WAIT)
    stop = int(free.tokens[3])
    at = free.tokens.tolist().index(stop)
    g = shared.submit(ids, Sampling(max_tokens=10, seed=4, stop_token_ids=(stop, 1))).result(WAIT)
    assert (g.finish, g.tokens.tolist()) == ("stop", free.tokens[: at + 1].tolist())
    g = shared.submit(prompt(120, seed=501), Sampling(max_tokens=50, seed=4)).result(WAIT)
    assert (g.finish, len(g.tokens)) == ("length", 8), "cut where the context ends"
    with pytest.raises(ContextOverflowError, match="128"):
        shared.submit(prompt(128), Sampling()).result(WAIT)


def test_greedy_and_filters(shared, score):
    ids = prompt(9, seed=510)
    greedy = [
        shared.submit(ids, Sampling(max_tokens=5, temperature=0.0, seed=s)).result(WAIT) for s in range(2)
    ]
    assert same(*greedy)
    np.testing.assert_allclose(greedy[0].logprobs, score(ids, greedy[0].tokens), atol=1e-4, rtol=0)
    only = shared.submit(ids, Sampling(max_tokens=5, top_k=1, seed=0)).result(WAIT)
    assert same(only, greedy[0])
    np.testing.assert_allclose(only.logprobs, 0, atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "sampling"),
    [
        ([], Sampling()),
        ([430], Sampling()),
        ([-1], Sampling()),
        ([1], Sampling(max_tokens=0)),
        ([1], Sampling(temperature=-1.0)),
        ([1], Sampling(top_p=0.0)),
        ([1], Sampling(min_p=1.5)),
        ([1], Sampling(top_k=-1)),
    ],
)
def test_bad_requests(shared, ids, sampling):
    with pytest.raises(InputError):
        shared.submit(ids, sampling)


def test_bad_engines(model):
    with pytest.raises(InputError, match="256 positions"):
        engine(model, context=512)
    with pytest.raises(InputError, match="num_pages 10"):
        engine(model, num_pages=10)
    with pytest.raises(InputError, match="at least"):
        engine(model, slots=0)


def test_nothing_compiles_after_warm_up(model, other_params):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None
    )
    backend = engine(model)
    try:
        backend.load(other_params, 1)
        backend.warm_up()
        programs, count = backend.stats()["compilations"], len(compiled)
        assert programs == 3 * 2 + 2 * 2 + 2 + 1
        rng = np.random.default_rng(0)
        futures = []
        for i in range(40):
            how = Sampling(max_tokens=int(rng.integers(1, 20)), seed=i, top_p=float(rng.choice([1.0, 0.9])))
            futures.append(backend.submit(prompt(int(rng.integers(1, 100)), seed=i % 13), how))
            if i == 20:
                backend.load(other_params, 2)
        for f in futures:
            f.result(WAIT)
        assert backend.stats()["compilations"] == programs
        assert len(compiled) == count, "nor anything else, anywhere in the process"
    finally:
        backend.close()


def test_weights_change_while_replies_are_sampled(model, other_params, score):
    """CASES 90: 16 replies go on across an update; each token is of the version that sampled it."""
    backend = engine(model)
    try:
        ids = prompt(12, seed=600)
        old = backend.submit(ids, Sampling(max_tokens=40, seed=0)).result(WAIT)
        futures = [backend.submit(ids, Sampling(max_tokens=100, seed=s)) for s in range(16)]
        while backend.stats()["sampled_tokens"] < 40 + 8 * 10:
            time.sleep(0.001)
        backend.load(other_params, 7)
        assert backend.version == 7
        late = backend.submit(ids, Sampling(max_tokens=40, seed=0))
        replies = [f.result(WAIT) for f in futures]
        for g in replies:
            assert g.version.tolist() == sorted(g.version.tolist())
            assert set(g.version) <= {0, 7}
        assert any(len(set(g.version)) == 2 for g in replies), "some were in the middle"
        mixed = next(g for g in replies if len(set(g.version)) == 2)
        n = int((mixed.version == 0).sum())
        np.testing.assert_allclose(mixed.logprobs[:n], score(ids, mixed.tokens)[:n], atol=1e-4, rtol=0)
        late = late.result(WAIT)
        assert set(late.version) == {7}
        assert not same(late, old)
        # Nothing of the old weights' cache was used.
        np.testing.assert_allclose(late.logprobs, score(ids, late.tokens, other_params), atol=1e-4, rtol=0)
        with pytest.raises(InputError, match="must rise: 7 after 7"):
            backend.load(other_params, 7)
    finally:
        backend.close()


def test_load_copies(model, other_params, backend):
    fresh = jax.tree.map(lambda x: x + 0, other_params)
    ids = prompt(5)
    backend.load(fresh, 1)
    one = backend.submit(ids, Sampling(max_tokens=4, seed=0)).result(WAIT)
    jax.tree.map(lambda x: x.delete(), fresh)  # as donating it does
    two = backend.submit(prompt(6), Sampling(max_tokens=4, seed=0)).result(WAIT)
    assert len(two.tokens) == 4
    assert same(one, backend.submit(ids, Sampling(max_tokens=4, seed=0)).result(WAIT))
    with pytest.raises(InputError, match="structure"):
        backend.load({"w": 1}, 2)
    with pytest.raises(InputError, match=r"of shape \(.*\), not \("):
        backend.load(jax.tree.map(lambda x: x[:1], other_params), 2)
    assert same(one, backend.submit(ids, Sampling(max_tokens=4, seed=0)).result(WAIT))


def test_broken_weights_are_an_engine_error_of_the_request(model, backend):
    nan = jax.tree.map(lambda x: x * np.nan, nnx.split(model)[1])
    backend.load(nan, 1)
    with pytest.raises(EngineError, match="version 1 of the weights is broken"):
        backend.submit(prompt(5), Sampling(max_tokens=3)).result(WAIT)
    before = backend.stats()["sampled_tokens"]
    with pytest.raises(EngineError, match="log-prob nan of token 0"):
        backend.submit(prompt(5), Sampling(max_tokens=3)).result(WAIT)
    assert backend.stats()["sampled_tokens"] == before + 1, "it ends at the first"
    backend.load(nnx.split(model)[1], 2)
    assert len(backend.submit(prompt(5), Sampling(max_tokens=3)).result(WAIT).tokens) == 3


def slow(backend, event=None):
    """Makes each step of the worker wait for `event`, or a moment."""
    step = backend._step
    backend._step = lambda: ((event.wait(10) if event else time.sleep(0.01)), step())[1]


def test_abort(backend):
    gate = threading.Event()
    slow(backend, gate)
    running = [backend.submit(prompt(20, seed=i), Sampling(max_tokens=100, seed=0)) for i in range(3)]
    queued = [backend.submit(prompt(20, seed=i), Sampling(max_tokens=5, seed=0)) for i in range(12)]
    for f in (running[0], running[2], queued[-1]):
        backend.abort(f)
    gate.set()
    for f in (running[0], running[2], queued[-1]):
        with pytest.raises(CancelledError):
            f.result(WAIT)
    assert len(running[1].result(WAIT).tokens) == 100
    assert all(len(f.result(WAIT).tokens) == 5 for f in queued[:-1])
    backend.submit(prompt(3), Sampling(max_tokens=1)).result(WAIT)
    stats = backend.stats()
    assert stats["running"] == stats["waiting"] == 0
    backend._table.clear()
    assert len(backend._table.free) == stats["pages"], "no page is lost"


def test_close_with_running_requests(model):
    backend = engine(model)
    slow(backend)
    futures = [backend.submit(prompt(20, seed=i), Sampling(max_tokens=100)) for i in range(20)]
    futures[0].add_done_callback(lambda _: backend.close())  # from the worker's own thread
    backend.close()
    backend.close()
    for f in futures:
        with pytest.raises(EngineError, match="closed"):
            f.result(WAIT)
    with pytest.raises(EngineError, match="closed"):
        backend.submit([1], Sampling()).result(WAIT)
    with pytest.raises(EngineError, match="closed"):
        backend.load(None, 1)
    assert not backend._thread.is_alive()
    assert copy.deepcopy(backend) is backend


def test_a_crash_fails_everything_and_hangs_nothing(backend):
    ok = backend.submit(prompt(4), Sampling(max_tokens=2)).result(WAIT)
    assert len(ok.tokens) == 2
    dispatch, calls = backend._dispatch, []

    def broken(kind, inputs):
        calls.append(kind)
        if len(calls) > 5:
            raise RuntimeError("out of memory, say")
        return dispatch(kind, inputs)

    backend._dispatch = broken
    futures = [backend.submit(prompt(9, seed=i), Sampling(max_tokens=50)) for i in range(12)]
    for f in futures:
        with pytest.raises(EngineError, match="out of memory, say") as info:
            f.result(WAIT)
        assert isinstance(info.value.__cause__, RuntimeError)
    with pytest.raises(EngineError, match="out of memory, say"):
        backend.submit([1], Sampling()).result(WAIT)


def test_few_pages_make_requests_wait_and_recompute(model, score):
    # One context and two pages more.
    backend = engine(model, num_pages=19, tiles=Tiles(((1, 16),), (8,), (16,)))
    try:
        requests = [(prompt(10 + 2 * i, seed=700 + i), Sampling(max_tokens=40, seed=i)) for i in range(8)]
        replies = [f.result(WAIT) for f in [backend.submit(*r) for r in requests]]
        for (ids, _), g in zip(requests, replies, strict=True):
            np.testing.assert_allclose(g.logprobs, score(ids, g.tokens), atol=1e-4, rtol=0)
        stats = backend.stats()
        assert stats["preemptions"] > 0
        assert stats["evictions"] > 0
    finally:
        backend.close()


def test_many_threads(shared, score):
    def run(i):
        ids = prompt(4 + i % 30, seed=i % 11)
        return ids, shared.submit(ids, Sampling(max_tokens=1 + i % 17, seed=i)).result(WAIT)

    with ThreadPoolExecutor(64) as pool:
        done = list(pool.map(run, range(192)))
    for i, (ids, g) in enumerate(done):
        assert len(g.tokens) == 1 + i % 17
        np.testing.assert_allclose(g.logprobs, score(ids, g.tokens), atol=1e-4, rtol=0)
    assert shared.stats()["running"] == 0


def test_bf16(model, score):
    backend = engine(model, dtype=jnp.bfloat16, tiles=Tiles(((1, 16),), (8,), (16,)))
    try:
        ids = prompt(20)
        g = backend.submit(ids, Sampling(max_tokens=10, seed=0)).result(WAIT)
        np.testing.assert_allclose(g.logprobs, score(ids, g.tokens), atol=0.1, rtol=0)
    finally:
        backend.close()


def test_a_session_on_the_engine(shared, score, model_dir):
    """Three turns: the trace's log-probs are those of one forward pass over it, and turns reuse the cache."""
    session = Session(
        shared, Renderer.from_dir(model_dir), sampling=Sampling(max_tokens=6), context=128, seed=5
    )
    messages = []
    for text in ("door", "hello", "east"):
        messages += [Message("user", text)]
        before = shared.stats()
        messages += [session.chat(messages)]
    assert grew(before, shared.stats(), "prefilled_tokens") < grew(before, shared.stats(), "prompt_tokens")
    (trace,) = session.traces
    expected = score(trace.tokens[:1], trace.tokens[1:])
    np.testing.assert_allclose(trace.logprobs[trace.sampled], expected[trace.sampled[1:]], atol=1e-4, rtol=0)
    again = Session(
        shared, Renderer.from_dir(model_dir), sampling=Sampling(max_tokens=6), context=128, seed=5
    )
    replies = [again.chat(messages[:n]).content for n in (1, 3, 5)]
    assert replies == [m.content for m in messages[1::2]]


def test_replicated_on_a_mesh(model):
    """Weights with named shardings, as a trainer's are."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    graphdef, params = nnx.split(model)
    params = jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    backend = engine(nnx.merge(graphdef, params), tiles=Tiles(((1, 16),), (8,), (16,)))
    try:
        assert len(backend.submit(prompt(5), Sampling(max_tokens=3)).result(WAIT).tokens) == 3
        backend.load(nnx.split(model)[1], 1)  # from elsewhere
        assert set(backend.submit(prompt(5), Sampling(max_tokens=3)).result(WAIT).version) == {1}
    finally:
        backend.close()
