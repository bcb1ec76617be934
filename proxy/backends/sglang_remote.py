"""One SGLang server, as its client sees it: calls, health, checks, and the weights that it serves."""

import asyncio
import base64
import contextlib
import dataclasses
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import numpy as np

from metagym.errors import EngineError, InputError
from metagym.proxy.backends import sglang_wire as wire
from metagym.proxy.backends.sglang_server import SGLangProcess
from metagym.types import Sampling

Pause = Literal["retract", "in_place", "abort", "wait"]
Bucket = list[tuple[str, np.ndarray]]

log = logging.getLogger("metagym.sglang")
PROBE = "A probe: 12 + 3 = 15.\n\tÄrger, 世界, def f(x): return x"
_POLL_S = 1.0
_HANG_S = 60.0  # after which a process of ours that does not answer is started again


class LostError(Exception):
    """No answer, or one that says to try again elsewhere: a broken connection, a timeout, 429, 5xx."""


class AgainError(LostError):
    """The server is well, and gave up this one request."""


class RefusedError(Exception):
    """A server says that a request makes no sense to it (4xx)."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


@dataclasses.dataclass(frozen=True)
class Weights:
    """A version of the weights, and what servers call it."""

    version: int
    label: str
    path: Path | None = None  # a folder, or
    tensors: Callable[[], Iterator[Bucket]] | None = None  # what makes them, while they are sent
    nbytes: int = 0
    initial: bool = False  # what a server began with


@dataclasses.dataclass(eq=False)
class Remote:
    """A server. Used in one event loop."""

    url: str
    process: SGLangProcess | None  # if it is ours
    http: aiohttp.ClientSession
    pause: Pause
    timeout_s: float  # of a generation, and of a push
    start_s: float  # to start
    restarts: int  # left
    up: bool = False  # in service
    gone: bool = False  # for good
    why: str = "it was not asked yet"  # it is not
    running: int = 0  # generations
    label: str = ""  # of the weights that it serves
    salt: str | None = None  # keeps prefixes that other weights computed from being found, if they stay
    broken: bool = False  # its weights may be a mixture
    failures: int = 0  # pushes that did not end well
    home: str = ""  # folder of the weights that it began with
    copies: int = 1  # that it wants of a tensor: one for each rank
    context: int = 0  # most tokens of prompt and reply together; 0: not known
    longest: int = 0  # and a prompt is shorter than this
    jax: bool = False  # it is sglang-jax: no routes for weights, no seeds
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    reviving: "asyncio.Task[None] | None" = None

    # ------------------------------------------------------------ calls

    async def get(self, path: str) -> Any:
        return await self._call("GET", path, None, 60.0)

    async def post(self, path: str, body: Any, timeout_s: float | None = None) -> Any:
        return await self._call("POST", path, body, timeout_s or self.timeout_s)

    async def _call(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        """The answer's JSON, or its text. Raises LostError and RefusedError."""
        where = self.url + path
        try:
            async with asyncio.timeout(timeout_s), self.http.request(method, where, json=body) as answer:
                text = (await answer.read()).decode(errors="replace")
        except TimeoutError:
            raise LostError(f"{where} did not answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise LostError(f"{where}: {type(error).__name__}: {error}") from error
        if answer.status >= 400:
            said = f"{where} answered {answer.status}: {text[:500]}"
            if answer.status == 429 or answer.status >= 500:
                raise LostError(said)
            raise RefusedError(answer.status, said)
        try:
            return json.loads(text) if text[:1] in ("{", "[") else text
        except ValueError as error:
            raise LostError(f"{where} answered what is not JSON: {text[:200]!r}") from error

    def request(
        self, ids: Sequence[int], sampling: Sampling, rid: str, seed: int, **more: Any
    ) -> dict[str, Any]:
        """The body of `/generate`, as this server takes it."""
        neutral = wire.NEUTRAL if self.jax else {**wire.NEUTRAL, **wire.NEWER}
        return wire.request(ids, sampling, rid=rid, seed=None if self.jax else seed, neutral=neutral, **more)

    async def drop(self, rid: str) -> None:
        """Tells it that nobody waits for a generation any more."""
        try:
            await self.post("/abort_request", {"rid": rid}, 10.0)
        except (LostError, RefusedError) as error:
            log.debug("a generation could not be dropped: %s", error)

    # ------------------------------------------------------------ health

    async def wait(self, target: Weights, *, restart: bool) -> None:
        """Waits until it answers; with `restart`, a process of ours that ended or hangs is started again,
        with `target`. Raises EngineError if it takes too long, or has ended."""
        deadline, hangs = time.monotonic() + self.start_s, time.monotonic() + _HANG_S
        while True:
            try:
                if self.process is not None:
                    self.process.check()
                await self.get("/health_generate")
                return
            except RefusedError:  # not every server has this one
                await self.get("/health")
                return
            except EngineError as error:
                if not restart:
                    raise
                await self._restart(target, str(error))
                hangs = deadline
            except LostError as lost:
                if time.monotonic() > deadline:
                    raise EngineError(f"{self.url} did not start within {self.start_s:g} s: {lost}") from lost
                if restart and self.process is not None and time.monotonic() > hangs:
                    await self._restart(target, str(lost))
                    hangs = deadline
            await asyncio.sleep(_POLL_S)

    async def _restart(self, target: Weights, why: str) -> None:
        assert self.process is not None
        if not self.restarts:
            self.gone = True
            raise EngineError(f"{self.url} is not started again, it was too often: {why}")
        self.restarts -= 1
        log.warning("%s is started again, with weights %d: %s", self.url, target.version, why)
        self.label, self.broken = "", False
        await asyncio.to_thread(self.process.start, target.path, target.label if target.path else "none")

    # ------------------------------------------------------------ checks

    async def check(self, directory: Path, *, routing: bool) -> None:
        """Learns what it can do. Raises InputError if it does not serve what the trainer trains."""
        try:
            info, about = await self.get("/model_info"), await self.get("/server_info")
        except RefusedError:
            info, about = await self.get("/get_model_info"), await self.get("/get_server_info")
            self.jax = True
        want = json.loads((directory / "config.json").read_text()).get("architectures")
        found = info.get("architectures")
        if found is not None and found != want:
            raise InputError(
                f"{self.url} serves {found}, and {directory} is {want}: start it with "
                f"--model-path={directory}"
            )
        if about.get("allow_auto_truncate"):
            raise InputError(f"{self.url} cuts long prompts silently: start it without --allow-auto-truncate")
        if routing and not about.get("enable_return_routed_experts"):
            raise InputError(
                f"{self.url} records no routed experts: start it with --enable-return-routed-experts"
            )
        self.copies, self.home = int(about.get("tp_size") or 1), str(info.get("model_path"))
        if longest := int(about.get("max_req_input_len") or 0):
            self.longest, self.context = longest, longest + 4  # SGLang keeps five tokens for a reply, and one
        log.info("%s: SGLang %s, %s, %s", self.url, about.get("version"), self.home, about.get("dtype"))
        await self._check_tokenizer(directory)
        await self._check_logprobs()

    async def _check_tokenizer(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        if not (path := directory / "tokenizer.json").is_file():
            return
        tokenizer = Tokenizer.from_file(str(path))
        special = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
        text = PROBE + "".join(special[:20])
        want = tokenizer.encode(text, add_special_tokens=False).ids
        try:
            answer = await self.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        except RefusedError as error:
            log.warning("the tokenizer can't be compared: %s", error)
            return
        if (found := answer["tokens"]) != want:
            raise InputError(
                f"{self.url} has another tokenizer than {directory}: it makes {found[:40]} of {text!r}, ours "
                f"{want[:40]}"
            )

    async def _check_logprobs(self) -> None:
        """Log-probs have to be those of the distribution at the temperature that was asked for: of two
        tokens, they differ at temperature 2 by half of what they do at 1."""

        async def of(temperature: float) -> np.ndarray:
            sampling = Sampling(1, temperature=temperature)
            body = self.request([1, 2, 3], sampling, secrets.token_hex(12), 0)
            answer = await self.post("/generate", {**body, "token_ids_logprob": list(range(8))})
            try:
                rows = answer["meta_info"]["output_token_ids_logprobs"][0]
                return np.array([row[0] for row in rows], np.float64)
            except (KeyError, TypeError, IndexError, ValueError) as error:
                raise EngineError(f"{self.url} gives no log-probs of named tokens: {error!r}") from error

        one, two = await of(1.0), await of(2.0)
        if not np.allclose((one - one[0]) / 2, two - two[0], rtol=1e-2, atol=1e-2):
            raise InputError(
                f"{self.url} gives log-probs of another temperature than it samples at: start it without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    # ------------------------------------------------------------ weights

    async def serve(self, target: Weights) -> None:
        """Makes sure that it serves these weights, and puts it into service. Raises LostError, RefusedError
        and EngineError if it can't; it is out of service then."""
        async with self.lock:
            try:
                if not self.jax:
                    if not self.up:  # it may be another one by now
                        self.label = str((await self.get("/model_info")).get("weight_version"))
                    if self.broken or self.label != target.label:
                        await self._give(target)
            except BaseException as error:
                self.up, self.why = False, str(error) or type(error).__name__
                raise
            self.up, self.why = True, ""

    async def _give(self, weights: Weights) -> None:
        if weights.initial and not self.broken:  # they are there: a label is all they need
            body = {"new_version": weights.label, "abort_all_requests": False}
            await self.post("/update_weight_version", body)
            self._serves(weights)
            return
        if weights.initial:
            weights = dataclasses.replace(weights, path=Path(self.home))
        if weights.path is None and weights.tensors is None:
            raise EngineError(f"{self.url} has lost its weights, which were sent: it waits for the next push")
        # One that is out of service may hold prefixes of any weights: they are flushed.
        pause = "retract" if self.pause == "in_place" and not self.up else self.pause
        if pause == "wait":
            await self._idle()
        self.broken = True
        if pause != "wait":
            await self.post("/pause_generation", {"mode": pause})
        # Generations that go on with their keys and values keep the cache from being flushed.
        last = {"weight_version": weights.label, "flush_cache": pause != "in_place"}
        try:
            give = self._give_folder if weights.path is not None else self._give_tensors
            await give(weights, last)
        except Exception:
            # What runs would go on with weights of both kinds, under the label of the old ones.
            self.failures += 1
            with contextlib.suppress(LostError, RefusedError):
                await self.post("/abort_request", {"rid": "", "abort_all": True}, 10.0)
            raise
        finally:
            if pause != "wait":
                await self.post("/continue_generation", {})
        found = (await self.get("/model_info")).get("weight_version")
        if found != weights.label:
            raise EngineError(f"{self.url} says that it serves weights {found!r}, not {weights.label!r}")
        self._serves(weights)

    def _serves(self, weights: Weights) -> None:
        self.label, self.broken = weights.label, False
        if self.pause == "in_place":
            self.salt = secrets.token_hex(8)

    async def _idle(self) -> None:
        """Waits until nothing runs on it, and its cache can be flushed: what was given up runs on for a
        moment, and what others asked for until it ends."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                await self.post("/flush_cache", {})
                return
            except RefusedError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.05)

    async def _give_folder(self, weights: Weights, last: dict[str, Any]) -> None:
        """`last`: what the request says that completes a push."""
        await self.post("/update_weights_from_disk", {"model_path": str(weights.path), **last})

    async def _give_tensors(self, weights: Weights, last: dict[str, Any]) -> None:
        assert weights.tensors is not None
        await self.post("/begin_weight_update", {})
        try:
            buckets = weights.tensors()
            bucket = await asyncio.to_thread(next, buckets, None)
            while bucket is not None:
                text = await asyncio.to_thread(lambda b=bucket: base64.b64encode(wire.pickled(b)).decode())
                bucket = await asyncio.to_thread(next, buckets, None)
                more = {"flush_cache": False} if bucket is not None else last
                body = {"serialized_named_tensors": [text] * self.copies, **more}
                await self.post("/update_weights_from_tensor", body)
        finally:
            await self.post("/end_weight_update", {})
