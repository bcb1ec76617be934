"""The seams: protocols of at most four methods. `metagym.testing` has a scripted fake for each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, runtime_checkable

from metagym.types import ExecResult, Generation, Limits, Message, Mount, Sampling, Task, Verdict

T = TypeVar("T")
R = TypeVar("R")


@runtime_checkable
class Backend(Protocol):
    """Generates. Token ids in, token ids out; text never crosses this line. Thread-safe."""

    def submit(self, prompt_ids: Sequence[int], sampling: Sampling) -> "Future[Generation]":
        """Samples a continuation. The future raises EngineError, or ContextOverflowError if nothing fits."""
        ...

    def abort(self, future: "Future[Generation]") -> None:
        """Stops a generation that nobody waits for any more; its future is cancelled or ends as "abort"."""
        ...

    def load(self, params: Any, version: int) -> None:
        """Serves other weights from the next token on. Makes its own copy: the trainer donates its state."""
        ...

    def close(self) -> None:
        """Frees everything; running futures raise EngineError. Idempotent."""
        ...


@runtime_checkable
class Chat(Protocol):
    """All that a native agent sees of a model."""

    def chat(self, messages: Sequence[Message], *, prefix: str = "") -> Message:
        """Answers the whole conversation so far. `prefix` is a begun reply: rendered, not sampled,
        and part of the returned content. Raises AgentError or InfraError."""
        ...


ChatFn = Callable[[Sequence[Message]], str]  # a plain function is taken as a Chat
Actor = Callable[[], "Chat | ChatFn"]  # a factory of chats, one per inner episode


@runtime_checkable
class Executor(Protocol):
    """Runs episodes. Threads on one machine, another implementation across machines."""

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """Yields results as they end, in any order. What `function` raises is raised here and ends the
        rest."""
        ...


class Tracker(Protocol):
    """Where metrics go: scalars by name, with the step they belong to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class Sandbox(Protocol):
    """A place where an agent's commands run, with one persistent shell. Used by one thread at a time.

    Every method raises SandboxError if the sandbox is gone or its daemon fails.
    """

    def exec(
        self,
        command: str,
        timeout: float,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """Runs a command in the shell, for `timeout` seconds at most; then every process in the sandbox is
        ended and a new shell begun in the same folder. What a command changes of the shell (folder,
        variables) stays, unless `cwd` or `env` are given: then it runs in a subshell."""
        ...

    def read(self, path: str, limit: int = 64 << 20) -> bytes:
        """A file's content. Raises FileNotFoundError, and OSError if it is longer than `limit` bytes."""
        ...

    def write(self, path: str, content: bytes) -> None:
        """Writes a file, folders included. Raises OSError if it can't be written."""
        ...

    def close(self) -> None:
        """Ends every process in it and removes what it wrote. Idempotent."""
        ...


@runtime_checkable
class SandboxFactory(Protocol):
    """Starts sandboxes, and owns what is left of them. Thread-safe."""

    def start(
        self,
        image: str,
        mounts: Sequence[Mount] = (),
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        labels: Mapping[str, str] | None = None,
    ) -> Sandbox:
        """A new sandbox. Raises InputError for an image or mount that can't be, SandboxError if it fails."""
        ...

    def snapshot(self, sandbox: Sandbox) -> str:
        """An image that is this sandbox's files as they are now, to `start` from."""
        ...

    def close(self) -> None:
        """Closes every sandbox and removes the snapshots. Idempotent."""
        ...


@runtime_checkable
class Grader(Protocol):
    """Judges a patch."""

    def grade(self, task: Task, patch: bytes) -> Verdict:
        """Judges within a deadline of its own: exceeding it is the outcome "infra", never the agent's."""
        ...
