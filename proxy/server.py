"""The proxy: one server that programs take for their model's provider, and that records every token.

A program reaches its session as `<url>/s/<session>/v1/...`, or as `<url>/v1/...`, with the session's key as
bearer (or `x-api-key`). The id is a name, the key is the secret: without the key that belongs to it, a
session answers 401, as one that does not exist. Opening, reading, scoring and closing sessions is another
API, on another listener with a key of its own (`control`); the program's listener does not have its routes.

- Generation finishes before anything is sent, so that an error keeps its status. An answer that takes longer
  than `keep_alive_after_s` is begun, and kept alive, before it is there.
- The same request twice at the same time is one request. An answer that could not be delivered is given to
  the next request that is the same. A program that hangs up ends the generation, unless a twin waits for it.
- While weights change (`paused`), requests wait.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from metagym import errors
from metagym.errors import EngineError, InputError, MetaGymError
from metagym.live import Live
from metagym.protocols import Backend
from metagym.proxy import export
from metagym.proxy.dialects import Asked, Dialect, Memory, Stamp, chat, dump, messages, responses
from metagym.proxy.render import History, Renderer
from metagym.proxy.session import Call, Plan, Reply, Session
from metagym.proxy.tree import KINDS
from metagym.types import Sampling

DIALECTS: dict[str, Dialect] = {"chat/completions": chat, "responses": responses, "messages": messages}
LOOPBACK = ("127.0.0.1", "::1", "localhost")
TRAINED = ("main", "sub-agent", "compaction")
_LONG = 20_000  # characters of new text from which on rendering goes to a thread
_STATUS: tuple[tuple[type[Exception], int, str], ...] = (  # most special first
    (errors.ContextOverflowError, 400, "context_length_exceeded"),
    (errors.TokenLimitError, 403, "token_budget_exceeded"),
    (errors.TurnLimitError, 403, "turn_budget_exceeded"),
    (errors.AgentTimeoutError, 403, "time_budget_exceeded"),
    (errors.InputError, 400, "invalid_request"),
    (errors.EngineError, 503, "engine_error"),
)
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Opened(Live):
    """A session that a program can reach. `reward` and `scores` are what its owner says about it."""

    id: str
    key: str
    session: Session
    url: str  # base URL without /v1, as seen from this machine
    socket: str | None  # path of the unix socket that leads to the same place
    task: str = ""  # what it is about, where its owner says so
    opened: float = field(default_factory=time.time)
    reward: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    running: dict[Hashable, "_Running"] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)

    @property
    def path(self) -> str:
        """What follows a base URL: `/s/<id>`."""
        return f"/s/{self.id}"

    def about(self) -> dict[str, Any]:
        ended = self.session.ended
        return {
            "id": self.id,
            "task": self.task,
            "opened": self.opened,
            "closed": self.session.closed,
            "ended": None if ended is None else str(ended),
            "reward": self.reward,
            "scores": self.scores,
            "forced": {k: repr(v) for k, v in self.session.forced.items()},
            "metrics": self.session.metrics,
        }


@dataclass(eq=False)
class _Running:
    """A request that is being answered, and how many wait for the answer."""

    task: "asyncio.Task[Reply]"
    waiting: int = 0


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str):
        super().__init__(message)
        self.status, self.code = status, code


class Proxy(Live):
    """The server and its sessions. `start` runs it in a thread; its public methods are thread-safe."""

    def __init__(
        self,
        backend: Backend,
        renderer: Renderer,
        *,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        socket: str | Path | None = None,
        control_port: int | None = None,
        control_key: str | None = None,
        sampling: Sampling | None = None,
        training: bool = True,
        context: int = 1024,
        history: History = "branch",
        train: Collection[str] = TRAINED,
        timeout_s: float = 900.0,
        max_body: int = 64 << 20,
        body_timeout_s: float = 60.0,
        keep_alive_after_s: float = 30.0,
        keep_alive_every_s: float = 15.0,
    ):
        """
        Args:
          model: the name that programs ask for; any other is answered by the same model.
          host, port: where programs reach it; port 0 takes a free one. A host that is not this machine's
            loopback is allowed only with a `control_key`.
          socket: path of a unix socket for programs without a network.
          control_port: the port of the control API; None: there is none. Always on the loopback.
          control_key: the control API's bearer key; one is made if None.
          sampling, training, context, history, train, timeout_s: the sessions', unless `open` says otherwise.
            Side requests, such as titles, do not train unless `train` has "side".
          max_body: most bytes of a request. body_timeout_s: how long its body may take to arrive.
          keep_alive_after_s, keep_alive_every_s: when an answer that is not there yet is begun, and how often
            it then gives a sign of life.
        """
        if host not in LOOPBACK and not control_key:
            raise InputError(f"listening on {host!r}, beyond this machine, needs a control_key")
        if control_key is not None and len(control_key) < 16:
            raise InputError("a control_key needs at least 16 characters")
        unknown = set(train) - set(KINDS)
        if unknown:
            raise InputError(
                f"train: {sorted(unknown)} are no kinds of branches; kinds are {', '.join(KINDS)}"
            )
        self.model, self.host, self.port = model, host, port
        self.socket = None if socket is None else str(socket)
        self.control_port = control_port
        self.control_key = control_key or secrets.token_urlsafe(24)
        self._backend, self._renderer = backend, renderer
        self._defaults: dict[str, Any] = {
            "sampling": sampling, "training": training, "context": context, "history": history,
            "train": frozenset(train), "timeout_s": timeout_s,
        }  # fmt: skip
        self._max_body, self._body_timeout_s = max_body, body_timeout_s
        self._after, self._every = keep_alive_after_s, keep_alive_every_s
        self._sessions: dict[str, Opened] = {}
        self._by_key: dict[str, Opened] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._go: asyncio.Event | None = None
        self._pauses = 0
        self._lock = threading.Lock()
        self.contract = renderer.contract.describe(history)

    # ------------------------------------------------------------ life

    def start(self) -> "Proxy":
        """Serves from a thread of its own. Raises OSError if an address is taken."""
        ready: threading.Event = threading.Event()
        failed: list[BaseException] = []

        async def main() -> None:
            async with self.serving():
                ready.set()
                assert self._stop is not None
                await self._stop.wait()

        def run() -> None:
            try:
                asyncio.run(main())
            except BaseException as error:
                failed.append(error)
            finally:
                ready.set()

        self._thread = threading.Thread(target=run, name="metagym-proxy", daemon=True)
        self._thread.start()
        ready.wait()
        if failed:
            self._thread.join()
            raise failed[0]
        return self

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Proxy"]:
        """Serves in the running event loop for as long as the block lasts."""
        self._loop, self._stop, self._go = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        if not self._pauses:
            self._go.set()
        app = web.Application(client_max_size=self._max_body)
        for prefix in (r"/s/{session:[A-Za-z0-9_-]{1,64}}", ""):
            for name in DIALECTS:
                app.router.add_post(f"{prefix}/v1/{name}", self._answer)
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count_tokens)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:[^/]{{1,200}}}}", self._models)
            app.router.add_get(f"{prefix}/health", self._health)
            app.router.add_route("HEAD", prefix or "/", self._health)
        app.router.add_route("*", "/{rest:.*}", self._nothing)
        runners = [web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)]
        await runners[0].setup()
        try:
            site = web.TCPSite(runners[0], self.host, self.port, backlog=1024)
            await site.start()
            self.port = _port(site)
            if self.socket is not None:
                Path(self.socket).unlink(missing_ok=True)
                await web.UnixSite(runners[0], self.socket, backlog=1024).start()
                Path(self.socket).chmod(0o666)  # a sandbox runs as another user; the keys guard it
            if self.control_port is not None:
                runners.append(web.AppRunner(self._control(), access_log=None, shutdown_timeout=1.0))
                await runners[1].setup()
                site = web.TCPSite(runners[1], "127.0.0.1", self.control_port)
                await site.start()
                self.control_port = _port(site)
            _log.info("%s", self.contract)
            yield self
        finally:
            for opened in list(self._sessions.values()):
                opened.session.close()
            for runner in runners:
                await runner.cleanup()
            if self.socket is not None:
                Path(self.socket).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes all sessions and stops serving. Idempotent."""
        for opened in list(self._sessions.values()):
            opened.session.close()
        if self._thread is not None and self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)
            self._thread = None

    @property
    def url(self) -> str:
        return f"http://{'[::1]' if self.host == '::1' else self.host}:{self.port}"

    @property
    def control_url(self) -> str | None:
        return None if self.control_port is None else f"http://127.0.0.1:{self.control_port}"

    # ------------------------------------------------------------ sessions

    def open(self, name: str = "", *, task: str = "", **options: Any) -> Opened:
        """Opens a session. `name` begins its id; `task` says what it is about, for exports; `options` are
        those of `Session`."""
        if not re.fullmatch(r"[A-Za-z0-9_-]{0,40}", name):
            raise InputError(f"a session's name has letters, digits, - and _, 40 at most, not {name!r}")
        made = Session(self._backend, self._renderer, **{**self._defaults, **options}, retries=True)
        id = f"{name}-{secrets.token_hex(6)}".lstrip("-")
        opened = Opened(id, secrets.token_urlsafe(24), made, f"{self.url}/s/{id}", self.socket, task)
        self._sessions[id] = self._by_key[opened.key] = opened
        return opened

    def session(self, id: str) -> Opened:
        """Raises UnknownNameError."""
        try:
            return self._sessions[id]
        except KeyError:
            raise errors.UnknownNameError("session", id, self._sessions) from None

    def forget(self, id: str) -> None:
        """Closes a session and drops its traces."""
        opened = self.session(id)
        opened.session.close()
        self._sessions.pop(id, None)
        self._by_key.pop(opened.key, None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """New requests wait while the block lasts: weights change."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        with self._lock:
            self._pauses += 1
        self._gate(False)

    def resume(self) -> None:
        with self._lock:
            self._pauses = max(0, self._pauses - 1)
            go = not self._pauses
        if go:
            self._gate(True)

    def _gate(self, go: bool) -> None:
        if self._loop is None or self._go is None:
            return
        act = self._go.set if go else self._go.clear
        if threading.current_thread() is self._thread:
            act()
        else:
            self._loop.call_soon_threadsafe(act)

    # ------------------------------------------------------------ what programs reach

    def _who(self, request: web.Request) -> Opened:
        """The session that a request may use. Raises _Refused."""
        key = request.headers.get("x-api-key") or ""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            key = token.strip()
        opened = self._by_key.get(key)
        named = request.match_info.get("session")
        if opened is None or (named is not None and not hmac.compare_digest(named, opened.id)):
            raise _Refused(401, "unknown_session", "no session has this key; the key comes as a bearer token")
        return opened

    async def _body(self, request: web.Request, memory: Memory) -> Any:
        try:
            async with asyncio.timeout(self._body_timeout_s):
                raw = await request.read()
        except TimeoutError:
            raise _Refused(408, "slow_body", f"the body took over {self._body_timeout_s:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise _Refused(413, "too_large", f"the body has over {self._max_body} bytes") from None
        try:
            return memory.body.read(raw)
        except (ValueError, RecursionError) as error:
            raise _Refused(400, "invalid_json", f"the body is not JSON: {error}") from None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        dialect = DIALECTS[request.path.rsplit("/v1/", 1)[-1]]
        try:
            opened = self._who(request)
            body = await self._body(request, opened.memory)
            asked = _with_agent(dialect.read(body, opened.memory), request.headers)
            running = await self._begin(opened, asked)
        except Exception as error:
            if not isinstance(error, _Refused | MetaGymError):
                _log.exception("a request failed")
            return _error(dialect, error)
        begun: web.StreamResponse | None = None
        try:
            try:
                begun, reply = await self._wait(request, dialect, asked, running.task)
            finally:
                self._leave(opened, running)
        except (_Refused, MetaGymError) as error:
            return _error(dialect, error)
        except ConnectionError:
            return web.Response(status=499)  # the program is gone; nobody reads this
        except Exception as error:
            _log.exception("a request failed")
            return _error(dialect, error)
        if isinstance(reply, MetaGymError):  # after the answer was begun
            return await _late_error(request, begun, dialect, asked, reply)
        pieces = None
        if asked.options.get("logprobs") and reply.node.generation is not None:
            pieces = [self._renderer.decode([t]) for t in reply.node.generation.tokens.tolist()]
        stamp = Stamp(secrets.token_hex(12), int(time.time()))
        full = dialect.write(asked, reply, stamp, pieces)
        parts = dialect.events(full, asked) if asked.stream else iter((dump(full).encode(),))
        # Before it is written: who has read the answer may look at the traces at once.
        opened.session.delivered(reply)
        written = False
        try:
            if begun is None and not asked.stream:
                begun = web.Response(body=next(parts), content_type="application/json")
                await begun.prepare(request)
                await begun.write_eof()
            else:
                begun = begun or await _prepared(request, asked)
                await begun.write(b"".join(parts))
                await begun.write_eof()
            written = True
        except ConnectionError:
            begun = begun or web.Response(status=499)
        finally:
            if not written:  # the next request like it gets the answer
                opened.session.delivered(reply, False)
        return begun

    async def _begin(self, opened: Opened, asked: Asked) -> _Running:
        """Starts answering, or joins a twin that is being answered. Raises MetaGymError."""
        session = opened.session
        if session.closed:
            raise _Refused(410, "session_closed", "this session is closed: nothing more is answered")
        plan = session.plan(asked.request)
        running = opened.running.get(plan.signature)
        if running is None:
            task = asyncio.get_running_loop().create_task(self._drive(opened, plan))
            running = opened.running[plan.signature] = _Running(task)
            task.add_done_callback(lambda _: opened.running.pop(plan.signature, None))
            task.add_done_callback(_seen)
        else:
            session.count("retries")
        running.waiting += 1
        return running

    def _leave(self, opened: Opened, running: _Running) -> None:
        """One waits no more; the last to go before the answer is there ends the generation."""
        running.waiting -= 1
        if not running.waiting and not running.task.done():
            opened.session.count("hang_ups")
            running.task.cancel()

    async def _drive(self, opened: Opened, plan: Plan) -> Reply:
        """Answers a request. Cancelled when nobody waits for it any more."""
        session = opened.session
        if plan.twin is not None:
            session.count("retries")
            return session.reply_of(plan.twin)
        assert self._go is not None
        await self._go.wait()
        new = sum(len(m.content) for m in plan.request.messages[plan.parent.count :])
        if new + sum(len(dump(t)) for t in plan.request.tools if not plan.parent.count) > _LONG:
            submitted = asyncio.ensure_future(asyncio.to_thread(session.submit, plan))
            try:
                call = await asyncio.shield(submitted)
            except asyncio.CancelledError:  # the thread goes on: what it submits is not wanted any more
                submitted.add_done_callback(lambda done: _drop(session, done))
                raise
        else:
            call = session.submit(plan)
        return session.record(call, await self._generated(session, call))

    async def _generated(self, session: Session, call: Call) -> Any:
        if call.future.done():
            try:
                return call.future.result()
            except BaseException as error:
                raise session.failed(call, error) from error
        try:
            async with asyncio.timeout(session.timeout_s):
                # Shielded: it is the backend that ends a generation, not a cancelled future.
                return await asyncio.shield(asyncio.wrap_future(call.future))
        except asyncio.CancelledError as error:
            failed = session.failed(call, error)  # aborts it in the engine
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EngineError("the engine aborted the generation") from failed
        except BaseException as error:
            raise session.failed(call, error) from error

    async def _wait(
        self, request: web.Request, dialect: Dialect, asked: Asked, task: "asyncio.Task[Reply]"
    ) -> tuple[web.StreamResponse | None, Reply | MetaGymError]:
        """(the answer, if it had to be begun early; the reply, or what went wrong after that)."""
        if task.done():
            return None, task.result()
        done, _ = await asyncio.wait((task,), timeout=self._after)
        if done:
            return None, task.result()
        begun = await _prepared(request, asked)
        while not done:
            await begun.write(dialect.KEEP_ALIVE if asked.stream else b" ")
            done, _ = await asyncio.wait((task,), timeout=self._every)
        try:
            return begun, task.result()
        except MetaGymError as error:
            return begun, error

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        try:
            opened = self._who(request)
            memory = Memory()  # a question aside: what it counts does not come again
            asked = _with_agent(messages.read(await self._body(request, memory), memory), request.headers)
            return web.json_response({"input_tokens": opened.session.count_tokens(asked.request)})
        except (_Refused, MetaGymError) as error:
            return _error(messages, error)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._who(request)
        except _Refused as error:
            return _error(chat, error)
        context = self._defaults["context"]
        one = {
            "id": request.match_info.get("model", self.model),
            "object": "model",
            "created": 0,
            "owned_by": "metagym",
            "type": "model",
            "display_name": self.model,
            "created_at": "1970-01-01T00:00:00Z",
            "max_model_len": context,
            "max_input_tokens": context,
        }
        if "model" in request.match_info:
            return web.json_response(one)
        ids = {"first_id": self.model, "last_id": self.model}
        return web.json_response({"object": "list", "data": [one], "has_more": False, **ids})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def _nothing(self, request: web.Request) -> web.StreamResponse:
        return _error(
            chat, _Refused(404, "not_found", f"nothing is at {request.method} {request.path[:200]}")
        )

    # ------------------------------------------------------------ control

    def _control(self) -> web.Application:
        """The API that opens, reads, scores and closes sessions."""

        @web.middleware
        async def guard(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                token.strip().encode(), self.control_key.encode()
            ):
                return _error(chat, _Refused(401, "unauthorized", "the control API needs its bearer key"))
            try:
                return await handler(request)
            except errors.UnknownNameError as error:
                return _error(chat, _Refused(404, "unknown_session", str(error)))
            except (InputError, TypeError, ValueError) as error:
                return _error(chat, _Refused(400, "invalid_request", str(error)))

        app = web.Application(client_max_size=1 << 20, middlewares=[guard])
        one = r"/sessions/{session:[A-Za-z0-9_-]{1,64}}"

        def of(request: web.Request) -> Opened:
            return self.session(request.match_info["session"])

        async def opened(request: web.Request) -> web.Response:
            options = await request.json() if request.can_read_body else {}
            known = {"name", "task", "seed", "token_budget", "max_turns", "deadline_s", "context", "history"}
            known |= {"train"}
            if not isinstance(options, dict) or set(options) - known:
                raise InputError(f"a session is opened with an object of {', '.join(sorted(known))}")
            made = self.open(**options)
            about = {"id": made.id, "key": made.key, "url": made.url, "socket": made.socket}
            return web.json_response(about)

        async def listed(request: web.Request) -> web.Response:
            return web.json_response({"sessions": [s.about() for s in self._sessions.values()]})

        async def about(request: web.Request) -> web.Response:
            return web.json_response(of(request).about())

        async def exported(request: web.Request) -> web.Response:
            form = request.query.get("format", "native")
            if form not in export.FORMATS:
                raise errors.UnknownNameError("format", form, export.FORMATS)
            kept = of(request)
            more = {"task": kept.task} if form == "native" else {}
            told = export.FORMATS[form](kept.session, reward=kept.reward, name=kept.id, **more)
            return web.json_response(text=json.dumps(told, ensure_ascii=False))

        async def score(request: web.Request) -> web.Response:
            body = await request.json()
            scored, reward = of(request), body.get("reward")
            if reward is not None:
                scored.reward = float(reward)
            scored.scores |= {str(k): float(v) for k, v in dict(body.get("scores") or {}).items()}
            return web.json_response(scored.about())

        async def closed(request: web.Request) -> web.Response:
            of(request).session.close()
            return web.json_response(of(request).about())

        async def forgotten(request: web.Request) -> web.Response:
            self.forget(request.match_info["session"])
            return web.json_response({"forgotten": request.match_info["session"]})

        async def health(request: web.Request) -> web.Response:
            state = {"status": "paused" if self._pauses else "ok", "sessions": len(self._sessions)}
            return web.json_response({**state, "model": self.model, "template": self.contract})

        async def pause(request: web.Request) -> web.Response:
            self.pause() if request.path.endswith("pause") else self.resume()
            return await health(request)

        app.router.add_get("/health", health)
        app.router.add_post("/pause", pause)
        app.router.add_post("/resume", pause)
        app.router.add_post("/sessions", opened)
        app.router.add_get("/sessions", listed)
        app.router.add_get(one, about)
        app.router.add_get(f"{one}/export", exported)
        app.router.add_post(f"{one}/score", score)
        app.router.add_post(f"{one}/close", closed)
        app.router.add_delete(one, forgotten)
        return app


def _with_agent(asked: Asked, headers: Mapping[str, str]) -> Asked:
    """The request with the agent that its headers name, if they do."""
    agent = headers.get("x-claude-code-agent-id", "")
    if not agent and (told := headers.get("x-codex-turn-metadata")):
        with contextlib.suppress(ValueError, AttributeError):
            agent = json.loads(told).get("thread_id", "")
    agent = agent or headers.get("x-session-id", "")
    if not isinstance(agent, str) or not agent:
        return asked
    request = asked.request
    named = type(request)(
        request.messages, request.tools, agent[:200], request.prefix, request.max_tokens, request.asked
    )
    return Asked(named, asked.model, asked.stream, asked.options)


def _error(dialect: Any, error: Exception) -> web.Response:
    """An error in the words of the dialect, with the status that makes programs do the right thing."""
    if isinstance(error, _Refused):
        status, code = error.status, error.code
    else:
        found = next(((s, c) for kind, s, c in _STATUS if isinstance(error, kind)), (500, "internal_error"))
        status, code = found
    message = str(error)
    if code == "context_length_exceeded":  # the words that programs look for, to make their history shorter
        message = f"prompt is too long: {message}. This is more than the model's maximum context length."
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return web.json_response(dialect.error(status, code, message), status=status, headers=headers)


async def _late_error(
    request: web.Request,
    begun: web.StreamResponse | None,
    dialect: Dialect,
    asked: Asked,
    error: MetaGymError,
) -> web.StreamResponse:
    """An error after the answer was begun: an event in a stream; else the connection breaks."""
    assert begun is not None
    with contextlib.suppress(ConnectionError):
        if asked.stream:
            status, code = next(((s, c) for kind, s, c in _STATUS if isinstance(error, kind)), (500, "error"))
            await begun.write(dialect.error_event(dialect.error(status, code, str(error))))
            await begun.write_eof()
    if not asked.stream and request.transport is not None:
        request.transport.abort()
    return begun


async def _prepared(request: web.Request, asked: Asked) -> web.StreamResponse:
    kind = "text/event-stream" if asked.stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


def _drop(session: Session, submitted: "asyncio.Future[Call]") -> None:
    """Ends a generation that was submitted when nobody waited for it any more."""
    if not submitted.cancelled() and submitted.exception() is None:
        session.failed(submitted.result(), asyncio.CancelledError())


def _seen(task: "asyncio.Task[Reply]") -> None:
    """Looks at a task's exception, so that asyncio does not complain when nobody waits for it."""
    if not task.cancelled():
        task.exception()


def _port(site: web.TCPSite) -> int:
    server = site._server
    assert server is not None
    return server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
