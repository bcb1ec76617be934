"""Public fakes for every seam, and a conformance suite for text envs.

Fakes: `ScriptedChat`, `ScriptedBackend`, `SimulatedBackend` with the latencies of a real engine; and what
breaks on purpose: `FaultyBackend`, `FaultyEnv`.
Suite: `check_text_env(make)`; run it on an env of your own.
"""

import contextlib
import copy
import pickle
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils.shared_memory import create_shared_memory

from metagym.errors import ContextOverflowError, EngineError, InputError, SandboxError
from metagym.live import Live
from metagym.protocols import Backend, Sandbox
from metagym.types import ExecResult, Generation, Limits, Message, Mount, Sampling, Task, Verdict
from metagym.vector import TextVectorEnv

# ---------------------------------------------------------------- fakes

ScriptedReply = str | Message | BaseException


class ScriptedChat(Live):
    """A `Chat` that says what it was told to.

    `script` is the replies in order, or a function of the messages. An exception in it is raised. A text that
    does not repeat the begun reply is put behind it. `calls` holds the messages of each call. Raises
    EngineError when the script is at its end.
    """

    def __init__(self, script: Sequence[ScriptedReply] | Callable[[Sequence[Message]], ScriptedReply]):
        self._script = script
        self._lock = threading.Lock()
        self.calls: list[tuple[Message, ...]] = []

    def chat(self, messages: Sequence[Message], *, prefix: str = "") -> Message:
        with self._lock:
            turn = len(self.calls)
            self.calls.append(tuple(messages))
        if callable(self._script):
            reply = self._script(messages)
        elif turn < len(self._script):
            reply = self._script[turn]
        else:
            raise EngineError(f"the script has {len(self._script)} replies, this is call {turn + 1}")
        if isinstance(reply, BaseException):
            raise reply
        if isinstance(reply, str):
            reply = Message("assistant", reply if reply.startswith(prefix) else prefix + reply)
        return reply


def scripted_logprob(token: int) -> float:
    """The log-prob that `ScriptedBackend` reports for a token: -0.25, -0.5, ... -1.75, exact in f32."""
    return -0.25 * (1 + token % 7)


class ScriptedBackend(Live):
    """A `Backend` that samples what it was told to, at once.

    `script` is the replies (token ids, end-of-turn token included) in the order of the calls, or a function
    of the prompt's ids. A reply is cut after `sampling.max_tokens` or its first stop token; if it then ends
    with one, `finish` is "stop". Log-probs are `scripted_logprob(token)`, versions what was last loaded.
    `calls` holds (prompt ids, sampling) of each call. The future raises ContextOverflowError if the prompt
    leaves no room in `context`, EngineError when the script is at its end or the backend is closed.
    """

    def __init__(
        self,
        script: Sequence[Sequence[int]] | Callable[[tuple[int, ...]], Sequence[int]],
        *,
        context: int | None = None,
    ):
        self._script, self._context = script, context
        self._lock = threading.Lock()
        self.calls: list[tuple[tuple[int, ...], Sampling]] = []
        self.version = 0
        self.params: Any = None
        self.closed = False

    def submit(self, prompt_ids: Sequence[int], sampling: Sampling) -> "Future[Generation]":
        with self._lock:
            call = len(self.calls)
            self.calls.append((tuple(int(t) for t in prompt_ids), sampling))
        future: Future[Generation] = Future()
        try:
            future.set_result(self._generate(call))
        except Exception as error:
            future.set_exception(error)
        return future

    def _generate(self, call: int) -> Generation:
        prompt, sampling = self.calls[call]
        if self.closed:
            raise EngineError("the backend is closed")
        if self._context is not None and len(prompt) >= self._context:
            raise ContextOverflowError(f"{len(prompt)} tokens leave no room in a context of {self._context}")
        if callable(self._script):
            tokens = list(self._script(prompt))
        elif call < len(self._script):
            tokens = list(self._script[call])
        else:
            raise EngineError(f"the script has {len(self._script)} replies, this is call {call + 1}")
        room = sampling.max_tokens if self._context is None else self._context - len(prompt)
        tokens = tokens[: min(sampling.max_tokens, room)]
        end = next((i for i, t in enumerate(tokens) if t in sampling.stop_token_ids), None)
        if end is not None:
            tokens = tokens[: end + 1]
        return Generation(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array([scripted_logprob(t) for t in tokens], np.float32),
            version=np.full(len(tokens), self.version, np.int32),
            finish="length" if end is None else "stop",
        )

    def abort(self, future: "Future[Generation]") -> None:
        future.cancel()

    def load(self, params: Any, version: int) -> None:
        self.params, self.version = copy.deepcopy(params), version

    def close(self) -> None:
        self.closed = True


Sampler = Callable[[Any, Sequence[int], np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
"""(params, ids so far, rng, n) -> n tokens i32[n] and their log-probs f32[n]."""


def uniform(
    params: Any, ids: Sequence[int], rng: np.random.Generator, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens below 16, all alike."""
    return rng.integers(0, 16, n).astype(np.int32), np.full(n, -np.log(16), np.float32)


def long_tail(rng: np.random.Generator, median: float, sigma: float, most: float) -> float:
    """A lognormal draw: half are above `median`, their logarithm spreads by `sigma`, none is above `most`.
    Lengths of replies, latencies of tools and turns of an episode look like this."""
    return float(min(median * np.exp(sigma * rng.standard_normal()), most))


@dataclass(eq=False)
class _Simulated:
    """A request to the simulated engine."""

    future: "Future[Generation]"
    ids: list[int]
    sampling: Sampling
    length: int
    rng: np.random.Generator
    start: float = 0.0


class SimulatedBackend(Live):
    """A `Backend` that takes its time as an engine does: replies of long-tailed length, so much a token, a
    limited number of sequences at once, and weights that change in the middle of a reply.

    Args:
      median, sigma: of the length of a reply in tokens, see `long_tail`; `sampling.max_tokens` cuts it.
      first_s, token_s: seconds until the first token, and of each further one.
      slots: sequences at the same time; others wait in the order of their arrival.
      sample: what tokens are, given the weights.

    Lengths and tokens are functions of `sampling.seed` and the weights; without a seed, of the order of
    calls. A reply that is not cut ends with the first stop token, if there is one. `load` takes effect at
    once: tokens that come later are sampled by the new weights and carry their version. One thread, which
    sleeps; `close` ends it, and running futures raise EngineError.
    """

    def __init__(
        self,
        *,
        median: float = 32.0,
        sigma: float = 1.0,
        first_s: float = 0.0,
        token_s: float = 1e-3,
        slots: int = 64,
        sample: Sampler = uniform,
    ):
        self._median, self._sigma, self._sample = median, sigma, sample
        self._first_s, self._token_s, self._slots = first_s, token_s, slots
        self._loads: list[tuple[float, int, Any]] = [(-np.inf, 0, None)]  # (when, version, weights)
        self._running: list[_Simulated] = []
        self._waiting: deque[_Simulated] = deque()
        self._count = 0
        self._closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="metagym-simulated", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._loads[-1][1]

    def submit(self, prompt_ids: Sequence[int], sampling: Sampling) -> "Future[Generation]":
        future: Future[Generation] = Future()
        with self._wake:
            if self._closed:
                future.set_exception(EngineError("the simulated engine is closed"))
                return future
            rng = np.random.default_rng(self._count if sampling.seed is None else sampling.seed)
            self._count += 1
            length = max(1, round(long_tail(rng, self._median, self._sigma, sampling.max_tokens)))
            self._waiting.append(_Simulated(future, [int(t) for t in prompt_ids], sampling, length, rng))
            self._wake.notify()
        return future

    def abort(self, future: "Future[Generation]") -> None:
        future.cancel()
        with self._wake:
            self._wake.notify()

    def load(self, params: Any, version: int) -> None:
        with self._wake:
            self._loads.append((time.monotonic(), version, copy.deepcopy(params)))

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _end_of(self, r: _Simulated) -> float:
        return r.start + self._first_s + r.length * self._token_s

    def _work(self) -> None:
        while True:
            with self._wake:
                now = time.monotonic()
                ended = [r for r in self._running if self._end_of(r) <= now]
                self._running = [r for r in self._running if r not in ended and not r.future.cancelled()]
                while self._waiting and len(self._running) < self._slots:
                    request = self._waiting.popleft()
                    if not request.future.cancelled():
                        request.start = now
                        self._running.append(request)
                oldest = min([now, *(r.start for r in [*self._running, *ended])])
                while len(self._loads) > 1 and self._loads[1][0] <= oldest:
                    self._loads.pop(0)
                loads = list(self._loads)
                if self._closed:
                    break
                if not ended:
                    ends = [self._end_of(r) for r in self._running]
                    self._wake.wait(max(0.0, min(ends) - now) if ends else None)
            for request in ended:
                if request.future.set_running_or_notify_cancel():
                    try:
                        request.future.set_result(self._generation(request, loads))
                    except Exception as error:
                        request.future.set_exception(error)
        for request in [*self._running, *ended, *self._waiting]:
            if request.future.set_running_or_notify_cancel():
                request.future.set_exception(EngineError("the simulated engine was closed"))

    def _generation(self, r: _Simulated, loads: list[tuple[float, int, Any]]) -> Generation:
        when = r.start + self._first_s + self._token_s * np.arange(r.length)
        serves = np.searchsorted([at for at, _, _ in loads], when, side="right") - 1
        tokens, logprobs = np.zeros(r.length, np.int32), np.zeros(r.length, np.float32)
        for i in np.unique(serves):
            of = serves == i
            so_far = [*r.ids, *tokens[: int(np.argmax(of))].tolist()]
            tokens[of], logprobs[of] = self._sample(loads[i][2], so_far, r.rng, int(of.sum()))
        stopped = r.length < r.sampling.max_tokens and bool(r.sampling.stop_token_ids)
        if stopped:
            tokens[-1] = r.sampling.stop_token_ids[0]
        version = np.array([version for _, version, _ in loads], np.int32)[serves]
        return Generation(tokens, logprobs, version, "stop" if stopped else "length")


BackendFault = Literal["error", "nan", "missing", "short", "abort", "hang", "slow"]


class FaultyBackend(Live):
    """Passes calls on to another backend, and breaks some of them.

    | fault   | what the caller gets                                                                     |
    |---------|------------------------------------------------------------------------------------------|
    | error   | the future raises `error`, by default an EngineError                                     |
    | nan     | a Generation whose last log-prob is NaN, which went past the check of its constructor    |
    | missing | a Generation without log-probs (an empty array), likewise                                |
    | short   | a Generation with one log-prob too few, likewise                                         |
    | abort   | the first half of the tokens, finish "abort"                                             |
    | hang    | a future that is never done, until `abort` cancels it or `close` makes it raise          |
    | slow    | the right answer after `delay_s`                                                         |

    `at` says which calls break, counted from 0: one, several, or None for all.
    """

    def __init__(
        self,
        backend: Backend,
        fault: BackendFault,
        *,
        at: int | Collection[int] | None = None,
        error: BaseException | None = None,
        delay_s: float = 0.1,
    ):
        self.backend, self.fault = backend, fault
        self._at = {at} if isinstance(at, int) else at
        self._error = error or EngineError("the engine failed, as asked")
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._count = 0
        self._hanging: list[Future[Generation]] = []
        self._timers: list[threading.Timer] = []

    def submit(self, prompt_ids: Sequence[int], sampling: Sampling) -> "Future[Generation]":
        with self._lock:
            call = self._count
            self._count += 1
        if self._at is not None and call not in self._at:
            return self.backend.submit(prompt_ids, sampling)
        future: Future[Generation] = Future()
        if self.fault == "error":
            future.set_exception(self._error)
        elif self.fault == "hang":
            self._hanging.append(future)
        else:
            inner = self.backend.submit(prompt_ids, sampling)
            if self.fault == "slow":
                timer = threading.Timer(self._delay_s, _forward, (inner, future))
                self._timers.append(timer)
                timer.start()
            else:
                inner.add_done_callback(lambda done: _forward(done, future, self._break))
        return future

    def _break(self, good: Generation) -> Generation:
        logprobs = good.logprobs.copy()
        if self.fault == "nan":
            logprobs[-1:] = np.nan
            return _unchecked(good, logprobs)
        if self.fault == "missing":
            return _unchecked(good, logprobs[:0])
        if self.fault == "short":
            return _unchecked(good, logprobs[:-1])
        half = len(good.tokens) // 2
        return Generation(
            good.tokens[:half], logprobs[:half], good.version[:half], "abort", good.routing[:half]
        )

    def abort(self, future: "Future[Generation]") -> None:
        self.backend.abort(future)
        future.cancel()

    def load(self, params: Any, version: int) -> None:
        self.backend.load(params, version)

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
            timer.join()
        for future in self._hanging:
            if not future.done():
                future.set_exception(EngineError("the backend was closed"))
        self.backend.close()


def _forward(
    done: "Future[Generation]",
    to: "Future[Generation]",
    change: Callable[[Generation], Generation] = lambda generation: generation,
) -> None:
    if not to.set_running_or_notify_cancel():
        return
    try:
        to.set_result(change(done.result()))
    except BaseException as error:
        to.set_exception(error)


def _unchecked(good: Generation, logprobs: np.ndarray) -> Generation:
    """A Generation that its constructor would refuse."""
    bad = copy.copy(good)
    object.__setattr__(bad, "logprobs", logprobs)
    return bad


class ScriptedSandbox(Live):
    """A `Sandbox` that does nothing but answer as it was told, with files in memory.

    `script` is a function of the command that returns its output, an `ExecResult` or an exception to raise.
    `commands` holds what was run. Raises SandboxError once it is closed.
    """

    def __init__(self, script: Callable[[str], str | ExecResult | Exception] = lambda command: ""):
        self._script = script
        self.commands: list[str] = []
        self.files: dict[str, bytes] = {}
        self.closed = False

    def exec(
        self,
        command: str,
        timeout: float,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        self._check()
        self.commands.append(command)
        answer = self._script(command)
        if isinstance(answer, Exception):
            raise answer
        return ExecResult(answer, 0) if isinstance(answer, str) else answer

    def read(self, path: str, limit: int = 64 << 20) -> bytes:
        self._check()
        if path not in self.files:
            raise FileNotFoundError(f"no file {path!r} can be read in the sandbox")
        return self.files[path]

    def write(self, path: str, content: bytes) -> None:
        self._check()
        self.files[path] = content

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.closed:
            raise SandboxError("the sandbox is gone: it was closed.")


class ScriptedSandboxFactory(Live):
    """A `SandboxFactory` of scripted sandboxes; `started` holds them. `snapshot` copies the files."""

    def __init__(self, script: Callable[[str], str | ExecResult | Exception] = lambda command: ""):
        self._script = script
        self.started: list[ScriptedSandbox] = []
        self._snapshots: dict[str, dict[str, bytes]] = {}

    def start(
        self,
        image: str,
        mounts: Sequence[Mount] = (),
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        labels: Mapping[str, str] | None = None,
    ) -> ScriptedSandbox:
        sandbox = ScriptedSandbox(self._script)
        sandbox.files |= self._snapshots.get(image, {})
        self.started.append(sandbox)
        return sandbox

    def snapshot(self, sandbox: Sandbox) -> str:
        assert isinstance(sandbox, ScriptedSandbox)
        name = f"snapshot-{len(self._snapshots)}"
        self._snapshots[name] = dict(sandbox.files)
        return name

    def close(self) -> None:
        for sandbox in self.started:
            sandbox.close()


class ScriptedGrader(Live):
    """A `Grader` whose verdict is a function of the patch; `patches` holds what it judged."""

    def __init__(self, verdict: Callable[[bytes], Verdict]):
        self._verdict = verdict
        self.patches: list[bytes] = []

    def grade(self, task: Task, patch: bytes) -> Verdict:
        self.patches.append(patch)
        return self._verdict(patch)


class FaultyEnv(gym.Wrapper[str, str, str, str]):
    """An env that fails at a given point of every episode.

    `fault` "crash" raises `error`, by default a RuntimeError; "hang" blocks until `release()` or `close()`,
    then goes on. `at` is the step, counted from 0; None: the reset.
    """

    def __init__(
        self,
        env: gym.Env[str, str],
        fault: Literal["crash", "hang"] = "crash",
        *,
        at: int | None = 0,
        error: BaseException | None = None,
    ):
        super().__init__(env)
        self._fault, self._at = fault, at
        self._error = error or RuntimeError("the world failed, as asked")
        self._released = threading.Event()
        self._step = 0

    def release(self) -> None:
        """Lets a hanging call go on; nothing hangs any more."""
        self._released.set()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self._step = 0
        if self._at is None:
            self._fail()
        return super().reset(seed=seed, options=options)

    def step(self, action: str):
        if self._step == self._at:
            self._fail()
        self._step += 1
        return super().step(action)

    def _fail(self) -> None:
        if self._fault == "crash":
            raise self._error
        self._released.wait()

    def close(self) -> None:
        self._released.set()
        super().close()


# ---------------------------------------------------------------- conformance of text envs

BAD_ACTIONS: tuple[str, ...] = (
    "",
    " \n\t ",
    "x" * 10_000,
    "\x00\x07\x1b[2J\x7f\r",
    "😀👩‍👩‍👧 नमस्ते 世界 \u202e",
    "<|im_end|>\n<|im_start|>system",
    '{"action": ',
    "%s {0} {} \\",
    "\ud800",
)
"""What no text env may choke on: empty, long, control characters, emoji, control tokens, half a surrogate."""

MakeEnv = Callable[[], gym.Env[Any, Any]]
_Step = tuple[str, float, bool, bool, dict[str, Any]]  # observation, reward, terminated, truncated, told


class ConformanceError(AssertionError):
    """A text env broke a rule. The message names the rule and what happened."""


@contextlib.contextmanager
def _rule(name: str, demand: str) -> Iterator[None]:
    """Whatever fails inside is reported as this rule being broken."""
    try:
        yield
    except ConformanceError:
        raise
    except Exception as error:
        raise ConformanceError(
            f"rule {name!r} is broken: {demand}. {type(error).__name__}: {error}"
        ) from error


def _demand(true: Any, what: str) -> None:
    if not true:
        raise AssertionError(what)


def _raises(kind: type[BaseException], call: Callable[[], Any], what: str) -> None:
    try:
        call()
    except kind:
        return
    except Exception as error:
        raise AssertionError(
            f"{what}: raised {type(error).__name__} ({error}), not {kind.__name__}"
        ) from error
    raise AssertionError(f"{what}: raised nothing, not {kind.__name__}")


def _told(info: dict[str, Any]) -> dict[str, Any]:
    """The part of an info that every text env has in common."""
    told = {key: info[key] for key in ("task", "seed", "success")}
    return told | ({"admissible": list(info["admissible"])} if "admissible" in info else {})


def _choose(env: gym.Env[Any, Any], told: dict[str, Any], rng: np.random.Generator) -> str:
    """A likely action: one that is admissible where the world tells, else a sample."""
    if told.get("admissible"):
        return told["admissible"][int(rng.integers(len(told["admissible"])))]
    env.action_space.seed(int(rng.integers(2**31)))
    return env.action_space.sample()


def _play(
    env: gym.Env[Any, Any], task: str | None, seed: int | None, steps: int
) -> tuple[list[str], list[_Step]]:
    """The actions and what came of them, the reset first. The actions depend on nothing but what is seen."""
    observation, info = env.reset(seed=seed, options=None if task is None else {"task": task})
    stream: list[_Step] = [(observation, 0.0, False, False, _told(info))]
    actions: list[str] = []
    rng = np.random.default_rng(0)
    while len(actions) < steps and not (stream[-1][2] or stream[-1][3]):
        actions.append(_choose(env, stream[-1][4], rng))
        observation, reward, terminated, truncated, info = env.step(actions[-1])
        stream.append((observation, float(reward), terminated, truncated, _told(info)))
    return actions, stream


def _same(one: Sequence[_Step], other: Sequence[_Step], what: str) -> None:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        names = ("observation", "reward", "terminated", "truncated", "info")
        for name, x, y in zip(names, a, b, strict=True):
            _demand(
                x == y, f"{what}: after {i} steps the {name} is {x!r:.300} in one and {y!r:.300} in the other"
            )
    _demand(
        len(one) == len(other),
        f"{what}: one ends after {len(one) - 1} steps, the other after {len(other) - 1}",
    )


def check_text_env(
    make: MakeEnv,
    *,
    tasks: int = 3,
    seed: int = 0,
    steps: int = 30,
    tasks_differ: bool = True,
    seeds_differ: bool = False,
    vector: bool = True,
    context: str | None = "spawn",
) -> None:
    """Checks that an env keeps the rules that all text envs share. Raises ConformanceError at a broken one.

    Args:
        make: makes the env, the same each time, such as `functools.partial(gym.make, "metagym/Toy-v0")`. For
            the asynchronous vector env it must be picklable, and a script needs the `__main__` guard.
        tasks: how many tasks to play, the first ones.
        seed: the first seed.
        steps: how far an episode is played; its end is only looked at if it comes earlier.
        tasks_differ: whether two tasks must differ in what is seen or won, among those played.
        seeds_differ: whether a task must differ under some of 5 seeds.
        vector: whether to run it in vector envs too.
        context: how the asynchronous vector env starts processes.
    """
    with contextlib.closing(make()) as env:
        names = _check_tasks(env, tasks)
        _check_spaces(env)
        _check_episodes(env, names, seed, steps)
        _check_order(env, names[0], seed, steps)
        _check_bad_actions(env, names[0], seed)
        _check_aliasing(env, names[0], seed, steps)
        _check_spec(env, names[0], seed, steps)
    _check_determinism(make, names, seed, steps, tasks_differ, seeds_differ)
    _check_close(make, seed)
    _check_gymnasium(make)
    if vector:
        for kind in ("SyncVectorEnv", "TextVectorEnv", "AsyncVectorEnv"):
            _check_vector(make, kind, seed, steps, context)


def _check_tasks(env: gym.Env[Any, Any], count: int) -> list[str]:
    with _rule("tasks", "env.unwrapped.tasks lists Task objects, env.unwrapped.task(id) finds each of them"):
        world: Any = env.unwrapped
        found = [world.tasks[i] for i in range(min(count, len(world.tasks)))]
        _demand(found, "there is no task")
        for task in found:
            _demand(isinstance(task, Task), f"{task!r} is not a Task")
            _demand(
                world.task(task.id) == task, f"task({task.id!r}) is {world.task(task.id)!r}, not {task!r}"
            )
        _raises(InputError, lambda: world.task("no such task"), "an unknown task")
        env.reset()  # the checker that gym.make wraps around an env needs a first reset that works
        _raises(InputError, lambda: env.reset(options={"task": "no such task"}), "reset to an unknown task")
        _raises(InputError, lambda: env.reset(options={"no such option": 1}), "an unknown reset option")
    return [task.id for task in found]


def _check_spaces(env: gym.Env[Any, Any]) -> None:
    with _rule("spaces", "each space holds its own samples and survives copies, pickles and JSON"):
        for name, space in (("observation", env.observation_space), ("action", env.action_space)):
            space.seed(0)
            samples = [space.sample() for _ in range(100)]
            for sample in samples:
                _demand(isinstance(sample, str), f"the {name} space's sample {sample!r:.100} is not a text")
                _demand(sample in space, f"the {name} space refuses its own sample {sample!r:.100}")
            _demand(list(space.from_jsonable(space.to_jsonable(samples))) == samples, f"{name}: JSON")
            _demand(copy.deepcopy(space) == space, f"{name}: a deep copy differs")
            _demand(pickle.loads(pickle.dumps(space)) == space, f"{name}: a pickled copy differs")
    with _rule("shared memory", "the observation space refuses shared memory, in which texts turn stale"):
        _raises(Exception, lambda: create_shared_memory(env.observation_space), "create_shared_memory")


def _check_episodes(env: gym.Env[Any, Any], names: list[str], seed: int, steps: int) -> None:
    with _rule(
        "episodes", "observations are in the space; info tells task (str), seed (int), success (bool)"
    ):
        for name in names:
            for observation, reward, terminated, truncated, told in _play(env, name, seed, steps)[1]:
                _demand(observation in env.observation_space, f"{observation!r:.100} is not in the space")
                _demand(np.isfinite(reward), f"the reward is {reward}")
                for flag in (terminated, truncated, told["success"]):
                    _demand(isinstance(flag, bool), f"{flag!r} is not a bool")
                _demand(told["task"] == name, f"asked for task {name!r}, info tells {told['task']!r}")
                _demand(told["seed"] == seed, f"asked for seed {seed}, info tells {told['seed']!r}")
                _demand(isinstance(told["seed"], int), f"the seed {told['seed']!r} is not an int")
                listed = told.get("admissible", [])
                _demand(all(isinstance(a, str) for a in listed), f"admissible {listed!r:.100} are not texts")


def _check_order(env: gym.Env[Any, Any], name: str, seed: int, steps: int) -> None:
    with _rule("order", "a step after the end raises ResetNeeded, an action that is no text TypeError"):
        actions, stream = _play(env, name, seed, steps)
        if stream[-1][2] or stream[-1][3]:
            _raises(ResetNeeded, lambda: env.step(actions[-1]), "a step after the end")
        env.reset(seed=seed)
        _raises(TypeError, lambda: env.step(None), "the action None")


def _check_bad_actions(env: gym.Env[Any, Any], name: str, seed: int) -> None:
    with _rule("bad actions", "any text is an action: nonsense is answered, never raised"):
        for action in BAD_ACTIONS:
            env.reset(seed=seed, options={"task": name})
            try:
                observation, *_ = env.step(action)
            except Exception as error:
                raise AssertionError(f"{action!r:.60} raised {type(error).__name__}: {error}") from error
            _demand(observation in env.observation_space, f"the answer to {action!r:.60} is not in the space")


def _check_aliasing(env: gym.Env[Any, Any], name: str, seed: int, steps: int) -> None:
    with _rule("aliasing", "what was returned never changes later"):
        observation, info = env.reset(seed=seed, options={"task": name})
        kept = [(observation, info)]
        copies = [copy.deepcopy(kept[0])]
        rng = np.random.default_rng(0)
        for _ in range(steps):
            observation, _, terminated, truncated, info = env.step(_choose(env, _told(info), rng))
            kept.append((observation, info))
            copies.append(copy.deepcopy(kept[-1]))
            if terminated or truncated:
                break
        env.reset(seed=seed + 1)
        for i, (now, then) in enumerate(zip(kept, copies, strict=True)):
            _demand(_equal(now, then), f"what step {i} returned was {then!r:.300} and is now {now!r:.300}")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if type(one).__eq__ is object.__eq__:
        return True  # a copy of it can't be compared
    return bool(one == other)


def _check_spec(env: gym.Env[Any, Any], name: str, seed: int, steps: int) -> None:
    if env.unwrapped.spec is None:
        return  # not made by gym.make
    with _rule("spec", "env.spec can be copied and pickled, and makes the same env"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            spec = env.spec
        _demand(
            spec is not None, "env.spec is None: some argument can't be deep-copied; see metagym.live.Live"
        )
        copied = pickle.loads(pickle.dumps(copy.deepcopy(spec)))
        expected = _play(env, name, seed, steps)[1]
        with contextlib.closing(gym.make(copied)) as again:
            _same(expected, _play(again, name, seed, steps)[1], "env and its copy")


def _check_determinism(
    make: MakeEnv, names: list[str], seed: int, steps: int, tasks_differ: bool, seeds_differ: bool
) -> None:
    with contextlib.closing(make()) as one, contextlib.closing(make()) as other:
        with _rule("determinism", "task and seed determine everything, whatever was played before"):
            streams = []
            for name in names:
                streams.append(_play(one, name, seed, steps)[1])
                _play(other, names[-1], seed + 1, 2)  # breaks off
                _same(streams[-1], _play(other, name, seed, steps)[1], f"task {name!r}, seed {seed}, twice")
        with _rule("unseeded reset", "after a seeded reset the next ones without a seed are determined too"):
            one.reset(seed=seed)
            other.reset(seed=seed)
            first = _play(one, None, None, steps)[1]
            _same(first, _play(other, None, None, steps)[1], "two envs, reset with and then without a seed")
            told = first[0][4]
            again = _play(other, told["task"], told["seed"], steps)[1]
            _same(first, again, "an episode and its repetition from the task and seed that its info tells")
    with _rule("difference", "different tasks (and seeds, where declared) make different episodes"):
        if tasks_differ and len(names) > 1:
            seen = {repr([(s[0], s[1]) for s in stream]) for stream in streams}
            _demand(len(seen) > 1, f"the {len(names)} tasks {names} are all alike")
        if seeds_differ:
            with contextlib.closing(make()) as env:
                plays = [_play(env, names[0], s, steps)[1] for s in range(seed, seed + 5)]
            seen = {repr([(s[0], s[1]) for s in stream]) for stream in plays}
            _demand(len(seen) > 1, f"task {names[0]!r} is the same under 5 seeds")


def _check_close(make: MakeEnv, seed: int) -> None:
    with _rule("close", "close() can be called before a reset, during an episode and twice"):
        env = make()
        env.close()
        env.close()
        env = make()
        env.reset(seed=seed)
        env.close()
        env.close()
    with (
        _rule("order", "a step before the first reset raises ResetNeeded"),
        contextlib.closing(make()) as env,
    ):
        _raises(ResetNeeded, lambda: env.unwrapped.step("look"), "a step before the first reset")


def _check_gymnasium(make: MakeEnv) -> None:
    demand = "gymnasium.utils.env_checker.check_env passes without a warning"
    with _rule("gymnasium", demand), contextlib.closing(make()) as env, warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped, skip_render_check=env.unwrapped.spec is None)


def _check_vector(make: MakeEnv, kind: str, seed: int, steps: int, context: str | None) -> None:
    """Two envs side by side against each alone, over the end of an episode, twice from a reset."""

    def vectorise(mode: AutoresetMode) -> VectorEnv[Any, Any, Any]:
        if kind == "SyncVectorEnv":
            return SyncVectorEnv([make, make], autoreset_mode=mode)
        if kind == "TextVectorEnv":
            return TextVectorEnv([make, make], autoreset_mode=mode)
        return AsyncVectorEnv([make, make], autoreset_mode=mode, shared_memory=False, context=context)

    alone = [_autoreset_play(make, seed + i, steps) for i in range(2)]
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        demand = f"in a {kind} with autoreset mode {mode.value} two envs do what they do alone"
        with _rule("vector", demand), contextlib.closing(vectorise(mode)) as envs:
            declared = envs.metadata.get("autoreset_mode")
            _demand(declared == mode, f"metadata declares the autoreset mode {declared}")
            for _ in range(2):  # the second time after a reset of running episodes
                observations, infos = envs.reset(seed=seed)
                got = [[(observations[i], 0.0, False, False, str(infos["task"][i]))] for i in range(2)]
                ended, actions = np.zeros(2, bool), ("", "")
                for t in range(steps):
                    actions = tuple(alone[i][1][t] for i in range(2))
                    observations, rewards, terminated, truncated, infos = envs.step(actions)
                    ended = np.logical_or(terminated, truncated)
                    for i in range(2):
                        observation, name = observations[i], infos["task"][i]
                        if mode == AutoresetMode.SAME_STEP and ended[i]:
                            observation, name = infos["final_obs"][i], infos["final_info"]["task"][i]
                        flags = bool(terminated[i]), bool(truncated[i])
                        got[i].append((observation, float(rewards[i]), *flags, str(name)))
                    if mode == AutoresetMode.SAME_STEP and any(ended):
                        break  # from here on it is ahead of the other mode
                for i in range(2):
                    expected = [(*s[:4], s[4]["task"]) for s in alone[i][0]][: len(got[i])]
                    _same(expected, got[i], f"env {i} alone and in the vector")  # type: ignore[arg-type]
                if mode == AutoresetMode.SAME_STEP:
                    continue
                # Gymnasium's AsyncVectorEnv without shared memory forgets that reset() has done what a
                # pending autoreset was to do, and resets again at the first step: reset while episodes run.
                for _ in range(steps):
                    if not any(ended):
                        break
                    _, _, terminated, truncated, _ = envs.step(actions)
                    ended = np.logical_or(terminated, truncated)
                else:  # short episodes: whenever one env has begun anew, the other has ended
                    break


def _autoreset_play(make: MakeEnv, seed: int, steps: int) -> tuple[list[_Step], list[str]]:
    """What an env alone does if the step after an episode's end resets it, and the actions of all steps."""
    with contextlib.closing(make()) as env:
        observation, info = env.reset(seed=seed)
        stream: list[_Step] = [(observation, 0.0, False, False, _told(info))]
        actions: list[str] = []
        rng = np.random.default_rng(0)
        for _ in range(steps):
            last = stream[-1]
            actions.append(_choose(env, last[4], rng))
            if last[2] or last[3]:
                observation, info = env.reset()
                stream.append((observation, 0.0, False, False, _told(info)))
            else:
                observation, reward, terminated, truncated, info = env.step(actions[-1])
                stream.append((observation, float(reward), terminated, truncated, _told(info)))
        return stream, actions
