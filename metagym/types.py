"""The host-side types: numpy and frozen dataclasses, one home each.

`Turn` is the text view of what happened, `TokenTrace` the token view; a `Trajectory` holds both.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True, order=True)
class Task:
    """One problem that a world can be reset to, identical every time."""

    id: str  # unique within its world
    type: str  # the kind of problem: what meta-train and meta-test keep apart
    split: str  # "train", "validation", "test", or what the world calls them


@dataclass(frozen=True)
class Message:
    """The text view of one turn of a conversation, in the shape of the OpenAI chat format."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None  # an assistant's thoughts, where they are apart from what it says


@dataclass(frozen=True)
class Sampling:
    """How to sample one reply. The defaults are the training contract: the model's own distribution."""

    max_tokens: int = 256
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()  # end-of-turn tokens; the sampled one is part of the generation
    seed: int | None = None  # None: the backend draws one

    @property
    def on_contract(self) -> bool:
        """Whether tokens are drawn from the full softmax at temperature 1, as training needs."""
        return self.temperature == 1.0 and self.top_p == 1.0 and self.top_k == 0 and self.min_p == 0.0


def _no_routing(length: int) -> np.ndarray:
    return np.zeros((length, 0), np.int32)


@dataclass(frozen=True)
class Generation:
    """What a backend returns. Raises ValueError if lengths differ or a log-prob is not finite or positive.

    Row t of `routing` and `prompt_routing` are the experts, layer by layer, that reading token t took; -1
    where none was recorded, as for the last token, which nobody has read yet.
    """

    tokens: np.ndarray  # i32[T], ends with the end-of-turn token, once, exactly if finish is "stop"
    logprobs: np.ndarray  # f32[T], of the sampled token under the distribution it was sampled from
    version: np.ndarray  # i32[T], weight version that sampled each token
    finish: Literal["stop", "length", "abort"]
    routing: np.ndarray = field(default=None)  # type: ignore[assignment]  # i32[T, R], experts chosen; R = 0 for dense
    prompt_routing: np.ndarray = field(default=None)  # type: ignore[assignment]  # i32[P, R] of the prompt, or [0, R]

    def __post_init__(self):
        if self.routing is None:
            object.__setattr__(self, "routing", _no_routing(len(self.tokens)))
        if self.prompt_routing is None:
            object.__setattr__(self, "prompt_routing", self.routing[:0])
        lengths = {k: len(getattr(self, k)) for k in ("tokens", "logprobs", "version", "routing")}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"Generation: lengths differ: {lengths}")
        if not np.all(np.isfinite(self.logprobs)) or np.any(self.logprobs > 1e-6):
            bad = int(np.flatnonzero(~np.isfinite(self.logprobs) | (self.logprobs > 1e-6))[0])
            raise ValueError(
                f"Generation: log-prob {self.logprobs[bad]} of token {bad} is not a log-probability"
            )


class Why(enum.IntEnum):
    """Why a token of a trace is trainable, or is not."""

    RENDERED = 0
    """From the template, a user, a tool or a world."""
    SAMPLED = 1
    """The model said it, and it is trained here."""
    REBUILT = 2
    """An earlier reply, rendered again from its text: not as it was sampled."""
    SHARED = 3
    """The model said it; it is trained in another branch that shares it."""
    SUPERSEDED = 4
    """The model said it, but nobody got it, or it was asked for again and never used."""
    EXCLUDED = 5
    """The model said it in a branch that the session's policy does not train, such as a title."""


@dataclass(frozen=True)
class TokenTrace:
    """What the model saw and said along one unbroken branch, as token ids.

    `logprobs` is NaN wherever `sampled` is false, so a made-up 0.0 (probability 1) can never pass for a
    sampled one. A sampled span that two branches share is `trainable` in one of them only.
    Raises ValueError if an invariant does not hold.
    """

    tokens: np.ndarray  # i32[T]
    sampled: np.ndarray  # bool[T], the model said it
    trainable: np.ndarray  # bool[T], sampled and trained in this branch
    logprobs: np.ndarray  # f32[T], as sampled; NaN where not sampled
    version: np.ndarray  # i32[T], weight version; -1 where not sampled
    turn: np.ndarray  # i32[T], index of the model call that added the token, prompt tokens included
    routing: np.ndarray = field(default=None)  # type: ignore[assignment]  # i32[T, R]
    kind: Literal["main", "sub-agent", "side", "compaction"] = "main"
    why: np.ndarray = field(default=None)  # type: ignore[assignment]  # i8[T], a `Why` for each token

    def __post_init__(self):
        if self.routing is None:
            object.__setattr__(self, "routing", _no_routing(len(self.tokens)))
        names = ("tokens", "sampled", "trainable", "logprobs", "version", "turn", "routing", "why")
        lengths = {k: len(getattr(self, k)) for k in names if getattr(self, k) is not None}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"TokenTrace: lengths differ: {lengths}")
        if self.why is None:
            why = np.where(self.trainable, Why.SAMPLED, np.where(self.sampled, Why.SHARED, Why.RENDERED))
            object.__setattr__(self, "why", why.astype(np.int8))
        if np.any(self.trainable & ~self.sampled):
            raise ValueError("TokenTrace: a token is trainable that was not sampled")
        if not np.array_equal(np.isfinite(self.logprobs), self.sampled):
            raise ValueError("TokenTrace: log-probs must be finite exactly where tokens were sampled")

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Turn:
    """The text view of one step: what the agent saw, said, did, and got."""

    observation: str
    reply: str  # raw text of the model, begun reply included
    action: str | None  # what was done; None where the reply could not be turned into an action
    reward: float


class StopReason(enum.StrEnum):
    """Why an episode ended. `in_loss` tells the agent's own ends from those that are nobody's doing."""

    SUBMITTED = "submitted"
    """The agent said it is done."""
    TERMINATED = "terminated"
    """The world reached an end: goal, death, failure."""
    TURN_LIMIT = "turn_limit"
    """The loop's or the world's own limit of turns was reached (gymnasium's `truncated`)."""
    TOKEN_LIMIT = "token_limit"
    """The session's budget of sampled tokens was used up."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The conversation no longer fitted into the context."""
    FORMAT_ERROR = "format_error"
    """Too many replies in a row could not be turned into an action."""
    AGENT_TIMEOUT = "agent_timeout"
    """The agent used up its wall-clock budget."""
    RESOURCE_LIMIT = "resource_limit"
    """The sandbox's own limit of memory, processes or disk was hit."""
    HACKED = "hacked"
    """A cheat was caught: outcome 0, kept in the loss."""
    INFRA = "infra"
    """Engine, harness, world or daemon failed: out of loss and statistics, refilled."""
    INVALID_REWARD = "invalid_reward"
    """The grader could not judge: out of loss and statistics, refilled."""

    @property
    def in_loss(self) -> bool:
        """Whether the episode carries a reward and counts in the group's statistics."""
        return self not in (StopReason.INFRA, StopReason.INVALID_REWARD)


@dataclass(frozen=True)
class Trajectory:
    """One episode. A failed one is still data: `error` says what happened, `stop` whether it counts."""

    task: Task
    seed: int
    turns: tuple[Turn, ...]
    traces: tuple[TokenTrace, ...]
    reward: float  # shaped: what training maximises
    outcome: float  # raw task result, before any shaping
    stop: StopReason
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    system: str | None = None  # the system prompt that the agent was given, if any
    final: str | None = None  # the observation after the last action; None if there was none
    branches: tuple["Branch", ...] = ()  # continuations from its turns, if some were played
    patch: bytes | None = (
        None  # what was changed, in worlds where that is what counts: the last info["patch"]
    )
    log: str | None = None  # what a foreign harness printed, and its own record


@dataclass(frozen=True)
class Branch:
    """A continuation of an episode from one of its turns on; see `metagym.prefix`."""

    at: int  # the turn that is the first of its own
    calls: tuple[int, int]  # the model calls [first, end) that are its own, as `TokenTrace.turn` counts
    trajectory: Trajectory  # all its turns, the shared ones first; its tokens are in the episode's traces


@dataclass(frozen=True)
class Group:
    """Episodes of the same task and seed, so that they share one baseline. Raises ValueError otherwise."""

    trajectories: Sequence[Trajectory]

    def __post_init__(self):
        keys = {(t.task, t.seed) for t in self.trajectories}
        if len(keys) > 1:
            raise ValueError(f"Group: members differ in task or seed: {sorted(keys)[:3]}")


# ---------------------------------------------------------------- sandboxes and grading


@dataclass(frozen=True)
class Mount:
    """A folder of this machine inside a sandbox."""

    source: str  # here; absolute
    target: str  # in the sandbox; absolute
    write: bool = False  # False: read-only; True: copy-on-write, what the sandbox writes stays in it


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. A sandbox that hits them is the agent's doing (`ExecResult.limit`)."""

    memory: int = 2 << 30  # bytes, files in memory included
    disk: int = 1 << 30  # bytes of what it writes
    pids: int = 256  # processes and threads
    cpus: float = 2.0


@dataclass(frozen=True)
class ExecResult:
    """What a command did in a sandbox. A non-zero exit and a timeout are results, not errors."""

    output: str  # stdout and stderr as they came; the middle of a long one is left out
    exit_code: int | None  # None: it was ended at its deadline, or the shell was
    timed_out: bool = False
    limit: Literal["memory", "pids", "disk"] | None = None  # the sandbox's own limit that was hit
    dropped: int = 0  # bytes of output that were left out
    seconds: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What a grader says of a patch."""

    outcome: Literal["resolved", "failed", "not_applied", "hacked", "infra"]
    reason: str  # a sentence
    report: Mapping[str, Any] = field(default_factory=dict)  # tests by name, what was left out of the patch

    @property
    def score(self) -> float:
        """1 if resolved, else 0; of "infra" there is none, see `metagym.errors.GraderError`."""
        return float(self.outcome == "resolved")
