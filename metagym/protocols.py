"""The seams: protocols of at most four methods. `metagym.testing` has a scripted fake for each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, runtime_checkable

from metagym.types import Generation, Message, Sampling

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
