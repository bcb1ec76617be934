"""SGLang as a backend: servers that generate, over HTTP, and get the trainer's weights.

- Ids go in and come out over `/generate`; log-probs are checked, never padded (`sglang_wire.py`). At any
  temperature they are those of the distribution that was sampled from, which a probe checks. With filters
  (top_p, top_k, min_p), which training forbids, SGLang's are those of before the filters.
- A generation whose connection breaks, or that a server refuses for now, is tried again on another server
  that is up. Its future gets one answer, so what was sampled for a lost one is never trained. When no other
  server is up it is an EngineError; what is submitted next waits until one is.
- A conversation goes where its beginning went, while that server is not busier than others by some requests.
- Servers with an --api-key are sent the one of the environment variable SGLANG_API_KEY.
- `load` writes the weights, or sends them, and returns when every server that is up serves them. A server
  carries a label of this backend's own, so one that was started anew, or got weights from elsewhere, is
  noticed: it gets the right ones before it is asked again.
"""

import asyncio
import atexit
import contextlib
import dataclasses
import fcntl
import glob
import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TextIO

import aiohttp
import jax.numpy as jnp
import numpy as np
from flax import nnx

from metagym.errors import ContextOverflowError, EngineError, InputError
from metagym.live import Live
from metagym.models import Llama, ModelConfig, ModelError, named_tensors, save
from metagym.proxy.backends import sglang_wire as wire
from metagym.proxy.backends.sglang_remote import (
    AgainError,
    Bucket,
    LostError,
    Pause,
    RefusedError,
    Remote,
    Weights,
)
from metagym.proxy.backends.sglang_server import SGLangProcess
from metagym.types import Generation, Sampling

Push = Literal["disk", "tensor"]

log = logging.getLogger("metagym.sglang")
_BLOCK = 32  # tokens of a piece by which conversations are known
_KNOWN = 200_000  # pieces
_SLACK = 8  # requests that a conversation's server may have more than another
_BUCKET = 256 << 20  # bytes of tensors in one request


class SGLangBackend(Live):
    """A `Backend` on SGLang servers. It waits until all of them answer, and checks them.

    Args:
      servers: addresses of running ones, or processes, which it starts, starts anew and ends.
      directory: the model's, as the trainer has it: config.json and tokenizer.json.
      model: what `load` gets the parameters of; its own are not looked at. None: there is no `load`.
      router: address of an SGLang router in front of `servers`, to which generations go then.
      context: most tokens of a prompt and its reply together; None: what the servers can do.
      push: "disk": weights are written to a folder in `weights_dir`, which the servers can read (a shared or
        a memory file system); "tensor": they are sent over HTTP, some tensors at a time, and not kept: a
        server that is started anew waits for the next push, and one on which a push failed too.
      pause: what a push does to running generations. "retract": they wait, and go on with the new weights,
        which compute their beginning again; the prefix cache is flushed. "in_place": they go on with the keys
        and values that they have; cached prefixes of the old weights are not found any more. "abort": they
        begin again. "wait": the push waits until they have ended, and what is submitted meanwhile waits for
        the push.
      weights_dir: a folder of its own is made in it; None: in memory (/dev/shm), where there is one.
      dtype: of the weights that are pushed.
      routing: ask for the experts that tokens took; None: if the model has experts and `model` is given.
      retries: of a generation that was lost.
      timeout_s: longest generation; then the server is looked at.
      start_s: longest wait for a server to start, and of a request for a server that is up.
      restarts: of each process.
      seed: draws the seeds of requests that have none.

    Raises InputError for a server that does not serve this model, EngineError for one that does not start.
    """

    def __init__(
        self,
        servers: Sequence[str | SGLangProcess],
        directory: str | Path,
        *,
        model: Llama | None = None,
        router: str = "",
        context: int | None = None,
        push: Push = "disk",
        pause: Pause = "retract",
        weights_dir: str | Path | None = None,
        dtype: Any = jnp.float32,
        routing: bool | None = None,
        retries: int = 2,
        timeout_s: float = 600.0,
        start_s: float = 1800.0,
        restarts: int = 10,
        seed: int = 0,
    ):
        if not servers:
            raise InputError("the SGLang backend needs at least one server: an address, or one to start")
        self._directory = Path(directory)
        try:
            config = ModelConfig.from_file(self._directory / "config.json")
        except ModelError as error:
            raise InputError(f"the model's folder: {error}") from error
        self._vocab = config.vocab_size
        if routing is None:
            routing = model is not None and config.num_experts > 0
        self._experts = (config.routing_width, config.num_experts) if routing else (0, 0)
        self._graphdef = None if model is None else nnx.split(model)[0]
        self._push, self._dtype = push, np.dtype(dtype)
        self._retries, self._start_s = retries, start_s
        self._given = [(s.rstrip("/"), None) if isinstance(s, str) else (s.url, s) for s in servers]
        self._settings = {"pause": pause, "timeout_s": timeout_s, "start_s": start_s, "restarts": restarts}
        self._router_url = router.rstrip("/")
        self._router: Remote | None = None
        self._remotes: list[Remote] = []
        self._nonce = secrets.token_hex(4)
        self._target = Weights(0, f"{self._nonce}-start", initial=True)
        self._versions = {self._target.label: 0}  # by label
        self._pushed = False
        self.context = context or 0
        self._longest = 0  # a prompt is shorter than this
        self._folder, self._lock_file = (
            _folder(weights_dir) if model is not None and push == "disk" else (None, None)
        )
        self._rng = np.random.default_rng(seed)
        self._places: OrderedDict[int, Remote] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._times = {"write_s": 0.0, "push_s": 0.0, "push_bytes": 0.0}
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()  # generations
        self._asides: set[asyncio.Task[None]] = set()
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="metagym-sglang", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._run(self._open())
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ for any thread

    def submit(self, prompt_ids: Sequence[int], sampling: Sampling) -> "Future[Generation]":
        """See `metagym.protocols.Backend`. Raises InputError for an empty prompt, token ids outside the
        vocabulary, and sampling settings without meaning."""
        ids = [int(t) for t in prompt_ids]
        if not ids or min(ids) < 0 or max(ids) >= self._vocab:
            raise InputError(f"a prompt is at least one token id in [0, {self._vocab}); got {ids[:8]}...")
        s = sampling
        known = s.max_tokens >= 1 and 0 <= s.temperature < math.inf and s.top_k >= 0
        if not (known and 0 < s.top_p <= 1 and 0 <= s.min_p <= 1):
            raise InputError(f"sampling settings out of range: {s}")
        with self._lock:
            self._counts["requests"] += 1
            self._counts["prompt_tokens"] += len(ids)
            seed = int(self._rng.integers(2**63)) if s.seed is None else s.seed
            if not self._closing:  # cancelling this future cancels the coroutine
                return asyncio.run_coroutine_threadsafe(self._answer(ids, s, seed), self._loop)
        future: Future[Generation] = Future()
        future.set_exception(EngineError("the SGLang backend is closed"))
        return future

    def abort(self, future: "Future[Generation]") -> None:
        """Cancels the future; the server is told to drop its generation."""
        future.cancel()

    def load(self, params: Any, version: int) -> None:
        """Pushes `params` (an `nnx.State` of the model's) to every server that is up, and waits for it; one
        that is down gets them when it comes back. What is submitted afterwards is sampled from them only.

        Raises InputError unless `version` rises (the first call may keep 0), and where servers take no
        weights. Raises EngineError if no server took them: the old weights go on serving then.
        """
        if self._graphdef is None:
            raise InputError("this SGLang backend was made without a model: it can't load weights")
        if any(r.jax for r in self._remotes):
            raise InputError(
                "sglang-jax has no route for new weights: it can be sampled from and evaluated, not trained. "
                "Train with the embedded engine there, or with SGLang on GPUs."
            )
        with self._loading:
            if version < self.version or (self._pushed and version == self.version):
                raise InputError(f"weight versions must rise: {version} after {self.version}")
            start, old = time.monotonic(), self._target
            try:
                weights = self._write(nnx.merge(self._graphdef, params), version)
            except OSError as error:
                raise EngineError(
                    f"weights {version} could not be written to {self._folder}, and weights {old.version} "
                    f"serve: {error}"
                ) from error
            written = time.monotonic()
            try:
                self._run(self._push_all(weights, old))
            except BaseException:
                self._remove(weights)
                raise
            self._pushed = True
            self._target = dataclasses.replace(
                weights, tensors=None
            )  # the trainer's arrays are its own again
            self._remove(old)
            took = time.monotonic() - written
            self._times = {
                "write_s": written - start,
                "push_s": took,
                "push_bytes": float(weights.nbytes),
            }
            self._counts["loads"] += 1
        up, size = sum(r.up for r in self._remotes), weights.nbytes / 1e6
        log.info(
            f"weights {version}: {size:.1f} MB by {self._push} to {up} of {len(self._remotes)} servers, "
            f"{written - start:.2f} s to write and {took:.2f} s to push"
        )

    @property
    def version(self) -> int:
        """Of the weights that serve what is submitted now."""
        return self._target.version

    def stats(self) -> dict[str, float]:
        """Counts since the start, and the present state.

        requests, prompt_tokens, cached_tokens (of those, read from the servers' prefix caches),
        sampled_tokens, retries, lost (generations whose connection broke, or that were refused), continued
        (over a token that ends turns for the server and not for us), aborted, restarts, loads, failed_loads;
        write_s, push_s and push_bytes of the last load; running, servers_up, version.
        """
        names = ("requests", "prompt_tokens", "cached_tokens", "sampled_tokens", "retries", "lost")
        names += ("continued", "aborted", "loads", "failed_loads")
        return {
            **{n: float(self._counts[n]) for n in names},
            **self._times,
            "restarts": float(sum(self._settings["restarts"] - r.restarts for r in self._remotes)),
            "running": float(len(self._tasks)),
            "servers_up": float(sum(r.up for r in self._remotes)),
            "version": float(self.version),
        }

    def close(self) -> None:
        """Ends what it started; running futures raise EngineError. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for _, process in self._given:
            if process is not None:
                process.stop()
        if self._folder is not None and self._lock_file is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock_file.close()
        atexit.unregister(self.close)

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine in the loop and waits for it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            future.result()
        except BaseException:
            future.cancel()
            raise

    # ------------------------------------------------------------ in the loop

    async def _open(self) -> None:
        # A connection of its own for each request: a server closes idle ones, and a request that meets such a
        # close looks like one that was lost.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        key = os.environ.get("SGLANG_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
        self._changed = asyncio.Condition()
        self._gate = asyncio.Event()  # closed while a push waits for generations
        self._gate.set()
        self._remotes = [Remote(url, process, self._http, **self._settings) for url, process in self._given]
        for remote in self._remotes:
            if remote.process is not None:
                await asyncio.to_thread(remote.process.start)
        await asyncio.gather(*map(self._begin, self._remotes))
        contexts = [r.context for r in self._remotes if r.context]
        if contexts and self.context > min(contexts):
            raise InputError(
                f"the servers hold conversations of {min(contexts)} tokens, and {self.context} are asked "
                "for: start them with a larger --context-length and --max-total-tokens"
            )
        self.context = self.context or min(contexts, default=1 << 30)
        self._longest = min([self.context, *(r.longest for r in self._remotes if r.longest)])
        if self._router_url:
            self._router = Remote(self._router_url, None, self._http, **self._settings)
            await self._router.get("/health")
            self._route()

    async def _begin(self, remote: Remote) -> None:
        try:
            await remote.wait(self._target, restart=False)
            await remote.check(self._directory, routing=self._experts[0] > 0)
            await remote.serve(self._target)
        except (LostError, RefusedError) as error:
            raise EngineError(str(error)) from error
        if remote.jax:
            self._versions[""] = 0  # it has no labels

    async def _shut(self) -> None:
        for remote in self._remotes:
            if remote.reviving is not None:
                remote.reviving.cancel()
        for task in self._tasks:
            task.cancel()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if rest:
            await asyncio.wait(rest, timeout=5.0)
        if hasattr(self, "_http"):
            await self._http.close()

    # ------------------------------------------------------------ generations

    async def _answer(self, ids: list[int], sampling: Sampling, seed: int) -> Generation:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await self._tried(ids, sampling, seed)
        except asyncio.CancelledError:
            if self._closing:
                raise EngineError("the SGLang backend was closed") from None
            self._counts["aborted"] += 1
            raise
        finally:
            self._tasks.discard(task)

    async def _tried(self, ids: list[int], sampling: Sampling, seed: int) -> Generation:
        if len(ids) >= self._longest:
            raise ContextOverflowError(
                f"{len(ids)} prompt tokens leave no room in a context of {self.context}"
            )
        room = min(sampling.max_tokens, self.context - len(ids))
        sampling = dataclasses.replace(sampling, max_tokens=room)
        lost_at: set[Remote] = set()
        error: LostError | None = None
        for attempt in range(self._retries + 1):
            while True:
                await self._gate.wait()
                remote = await self._choose(ids, lost_at)
                if self._gate.is_set():
                    break
            if remote is None:
                break
            self._counts["retries"] += attempt > 0
            remote.running += 1
            try:
                return await self._whole(remote, ids, sampling, seed)
            except LostError as lost:
                self._counts["lost"] += 1
                log.warning("a generation was lost: %s", lost)
                error = lost
                if isinstance(lost, AgainError):
                    await asyncio.sleep(0.1 * 4**attempt)
                else:
                    lost_at.add(remote)
                    self._look_at(remote, str(lost))
            finally:
                remote.running -= 1
        raise EngineError(f"a generation was lost, and could not be had elsewhere: {error}") from error

    async def _choose(self, ids: Sequence[int], lost_at: set[Remote]) -> Remote | None:
        """The server to ask: where the beginning of the ids went, or the one with the least to do. It waits
        for one to be up, but not for others than those at which the generation was lost: None then."""
        if self._router is not None:
            return None if self._router in lost_at else self._router
        deadline = time.monotonic() + self._start_s
        while not (up := [r for r in self._remotes if r.up and r not in lost_at]):
            if lost_at:
                return None
            if time.monotonic() > deadline or all(r.gone for r in self._remotes):
                why = "; ".join(f"{r.url}: {r.why}" for r in self._remotes)
                raise EngineError(f"no SGLang server is up, nor came up within {self._start_s:g} s: {why}")
            await self._change(1.0)
        least = min(up, key=lambda r: r.running)
        if len(self._remotes) == 1:
            return least
        pieces = _pieces(ids)
        known = next((self._places[p] for p in reversed(pieces) if p in self._places), None)
        if known in up and known.running <= least.running + _SLACK:
            least = known
        for piece in pieces:
            self._places[piece] = least
            self._places.move_to_end(piece)
        while len(self._places) > _KNOWN:
            self._places.popitem(last=False)
        return least

    async def _change(self, timeout_s: float) -> None:
        """Waits until a server has come into service, or for some time."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except TimeoutError:
                return

    async def _whole(self, remote: Remote, ids: list[int], sampling: Sampling, seed: int) -> Generation:
        """A generation, which goes on over a token that ends turns for the server and not for us."""
        parts: list[Generation] = []
        start, left = len(ids), sampling.max_tokens
        ids, foreign = list(ids), True
        while foreign and left and (not parts or len(ids) < self._longest):
            one = dataclasses.replace(sampling, max_tokens=left)
            part, foreign, cached = await self._once(remote, ids, one, seed + len(parts))
            if parts:
                self._counts["continued"] += 1
            else:
                self._counts["cached_tokens"] += cached
            parts.append(part)
            left -= len(part.tokens)
            ids += part.tokens.tolist()
        last = parts[-1]
        finish = "length" if foreign else last.finish
        if len(parts) == 1:
            return dataclasses.replace(last, finish=finish)
        joined = {
            k: np.concatenate([getattr(p, k) for p in parts]) for k in ("tokens", "logprobs", "version")
        }
        if self._experts[0]:  # the last part read all tokens
            routing = np.concatenate([last.prompt_routing, last.routing])
            joined |= {"routing": routing[start:], "prompt_routing": routing[:start]}
        return Generation(finish=finish, **joined)

    async def _once(
        self, remote: Remote, ids: list[int], sampling: Sampling, seed: int
    ) -> tuple[Generation, bool, int]:
        """(generated, whether a token that is none of ours ended it, prompt tokens from the cache)."""
        rid = secrets.token_hex(12)
        routing, salt, label = self._experts[0] > 0, remote.salt, remote.label
        body = remote.request(ids, sampling, rid, seed, routing=routing, salt=salt)
        failures = self._failures(remote)
        try:
            answer = await remote.post("/generate", body)
        except RefusedError as error:
            text = str(error)
            if any(words in text for words in ("context length", "maximum allowed length")):
                raise ContextOverflowError(text) from error
            raise EngineError(text) from error
        except (asyncio.CancelledError, LostError):
            aside = asyncio.get_running_loop().create_task(remote.drop(rid))
            self._asides.add(aside)
            aside.add_done_callback(self._asides.discard)
            raise
        if (reason := wire.aborted(answer)) is not None:  # by a push, or by others
            raise AgainError(f"{remote.url} aborted a generation: {reason}")
        try:
            found = wire.generation(answer, len(ids), sampling, self._versions, self._experts)
        except wire.UnknownWeightsError as error:
            self._look_at(remote, str(error))
            raise
        if self._failures(remote) != failures:
            raise AgainError(f"{remote.url}: a generation met a push that failed: half of the new weights")
        if salt is not None and found[0].version[0] != self._versions[label]:
            raise AgainError(f"{remote.url}: a generation met a push, and cached prefixes of older weights")
        self._counts["sampled_tokens"] += len(found[0].tokens)
        return *found, answer["meta_info"].get("cached_tokens") or 0

    def _failures(self, remote: Remote) -> int:
        behind = self._remotes if remote is self._router else [remote]
        return sum(r.failures for r in behind)

    def _route(self) -> None:
        """Tells what the servers behind a router serve now."""
        if self._router is not None:
            self._router.label = self._target.label
            self._router.salt = secrets.token_hex(8) if self._settings["pause"] == "in_place" else None

    def _look_at(self, remote: Remote, why: str) -> None:
        """Takes a server out of service until it has been seen to be well, and to have the right weights."""
        if remote is self._router:  # it does not say which of them it was
            for behind in self._remotes:
                self._look_at(behind, why)
            return
        if remote.gone or self._closing:
            return
        remote.up, remote.why = False, why
        if remote.reviving is None or remote.reviving.done():
            remote.reviving = asyncio.get_running_loop().create_task(self._revive(remote))

    async def _revive(self, remote: Remote) -> None:
        while True:
            try:
                await remote.wait(self._target, restart=True)
                await remote.serve(self._target)
                break
            except (LostError, RefusedError, EngineError) as error:
                remote.why = str(error)
                log.warning("%s is down: %s", remote.url, error)
                if remote.gone:
                    return
            await self._change(1.0)
        async with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------ weights

    def _write(self, model: Any, version: int) -> Weights:
        label = f"{self._nonce}-{version}"
        if self._folder is not None:
            path = save(model, self._folder / f"{version:08d}", source=self._directory, dtype=self._dtype)
            size = sum(f.stat().st_size for f in path.glob("*.safetensors"))
            return Weights(version, label, path, nbytes=size)
        tensors = named_tensors(model)

        def buckets() -> Iterator[Bucket]:
            bucket: Bucket = []
            for t in tensors:
                value = t.read().astype(self._dtype, copy=False)
                if bucket and sum(v.nbytes for _, v in bucket) + value.nbytes > _BUCKET:
                    yield bucket
                    bucket = []
                bucket.append((t.name, value))
            yield bucket

        size = sum(math.prod(t.shape) for t in tensors) * self._dtype.itemsize
        return Weights(version, label, tensors=buckets, nbytes=size)

    def _remove(self, weights: Weights) -> None:
        if weights.path is not None:
            shutil.rmtree(weights.path, ignore_errors=True)

    async def _push_all(self, weights: Weights, old: Weights) -> None:
        """Raises EngineError if no server takes them; the old ones are the target again then."""
        self._versions[weights.label] = weights.version
        self._target = weights
        if self._settings["pause"] == "wait":
            self._gate.clear()
        try:
            while any(r.running for r in (*self._remotes, self._router) if r) and not self._gate.is_set():
                await asyncio.sleep(0.01)
            await self._give_all(weights, old)
        finally:
            self._gate.set()

    async def _give_all(self, weights: Weights, old: Weights) -> None:
        deadline = time.monotonic() + self._start_s
        while True:
            up = [r for r in self._remotes if r.up]
            results = await asyncio.gather(*(r.serve(weights) for r in up), return_exceptions=True)
            errors = [f"{r.url}: {e}" for r, e in zip(up, results, strict=True) if e is not None]
            for error in errors:
                log.warning("weights %d did not reach %s", weights.version, error)
            if served := any(r.up and r.label == weights.label for r in self._remotes):
                break
            if errors or time.monotonic() > deadline or all(r.gone for r in self._remotes):
                self._target = old
                break
            await self._change(1.0)  # all are down: one that comes back has them
        for remote in self._remotes:
            if not (remote.up and remote.label == self._target.label):
                self._look_at(remote, remote.why)
        self._route()
        if not served:
            self._counts["failed_loads"] += 1
            raise EngineError(
                f"no SGLang server took weights {weights.version}, and weights {old.version} go on serving: "
                f"{'; '.join(errors) or 'none was up'}"
            )


def _pieces(ids: Sequence[int]) -> list[int]:
    """A number for each beginning of the ids that is a multiple of a block long."""
    found, before = [], 0
    raw = np.asarray(ids, np.int32)
    for start in range(0, len(raw) - _BLOCK + 1, _BLOCK):
        before = hash((before, raw[start : start + _BLOCK].tobytes()))
        found.append(before)
    return found


def _folder(parent: str | Path | None) -> tuple[Path, TextIO]:
    """(a new folder for weights, the lock that its process holds on it).

    Folders of this host whose process was killed are removed: nobody holds their locks.
    """
    memory = Path("/dev/shm")
    parent = Path(parent) if parent else memory if memory.is_dir() else Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    prefix = f"metagym-weights-{socket.gethostname()}-"
    for lock in parent.glob(f"{glob.escape(prefix)}*/lock"):
        # A lock that can't be had, or not be asked for: somebody's, or of another user.
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=".metagym-", dir=parent))  # locked before it has a name of ours
    made.chmod(0o755)
    file = (made / "lock").open("w")
    with contextlib.suppress(OSError):  # a file system without locks: it is never removed by others
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return made.rename(parent / f"{prefix}{made.name[9:]}"), file
