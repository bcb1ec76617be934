"""Errors, named for the boundary they crossed.

    MetaGymError
    ├── InputError (ValueError)          the caller asked for something that does not exist or is malformed
    │   └── UnknownNameError (KeyError)  a name that is not registered; the message lists near matches
    ├── MissingExtraError (ImportError)  an optional dependency is absent; the message says what to install
    ├── AgentError                       the agent's own doing: the episode stays in the loss
    │   ├── FormatError                  a reply could not be turned into an action
    │   ├── ContextOverflowError         the conversation no longer fits into the context
    │   ├── TokenLimitError              the session's token budget is used up
    │   ├── TurnLimitError               the session's budget of model calls is used up
    │   ├── AgentTimeoutError            the session's wall-clock budget is used up
    │   └── ResourceLimitError           the sandbox hit its own memory, process, disk or time limit
    ├── InfraError (RuntimeError)        nobody's doing: the episode leaves the loss and the statistics
    │   ├── EngineError                  the generation backend failed or returned unusable data
    │   ├── WorldError                   an environment's world crashed or hung
    │   ├── SandboxError                 a sandbox vanished or its daemon failed
    │   ├── HarnessError                 a foreign harness crashed
    │   └── GraderError                  the grader could not judge (stop reason INVALID_REWARD)
    ├── TrainingError (RuntimeError)     training cannot go on; the newest checkpoint is good
    └── CheckpointError (OSError)        a checkpoint could not be written or read; earlier ones are untouched

Which stop reason each becomes is decided in one place, `metagym.episode`.
"""

import difflib
from collections.abc import Iterable


class MetaGymError(Exception):
    """Base of every error that this library raises on purpose."""


class InputError(MetaGymError, ValueError):
    """The caller asked for something that does not exist or is malformed."""


class UnknownNameError(InputError, KeyError):
    """A name that is not known. Says what was asked, near matches, and what exists."""

    def __init__(self, kind: str, name: object, known: Iterable[object], hint: str = ""):
        names = sorted(str(k) for k in known)
        asked = str(name)
        asked = asked if len(asked) <= 200 else f"{asked[:200]}..."
        near = difflib.get_close_matches(asked, names, n=3, cutoff=0.5)
        shown = ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")
        message = f"unknown {kind} {asked!r}."
        if near:
            message += f" Did you mean {' or '.join(repr(n) for n in near)}?"
        message += f" Known: {shown or 'none'}."
        if hint:
            message += f" {hint}"
        super().__init__(message)

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


class MissingExtraError(MetaGymError, ImportError):
    """An optional dependency is absent. `extra` is the name in pyproject's optional dependencies."""

    def __init__(self, what: str, extra: str, cause: BaseException | None = None):
        because = f" ({cause})" if cause else ""
        super().__init__(
            f"{what} needs the extra [{extra}], which is not installed{because}. "
            f"Install it with: pip install 'metagym-rl[{extra}]'"
        )


class AgentError(MetaGymError):
    """The agent's own doing; outcome 0, kept in the loss."""


class FormatError(AgentError):
    """A reply could not be turned into an action. The message is feedback written for the model."""


class ContextOverflowError(AgentError):
    """The conversation no longer fits into the model's or the session's context."""


class TokenLimitError(AgentError):
    """The session's budget of sampled tokens is used up."""


class TurnLimitError(AgentError):
    """The session's budget of model calls is used up."""


class AgentTimeoutError(AgentError):
    """The session's wall-clock budget is used up."""


class ResourceLimitError(AgentError):
    """The sandbox hit its own limit of memory, processes, disk or time."""


class InfraError(MetaGymError, RuntimeError):
    """Nobody's doing; the episode leaves the loss and the group's statistics."""


class EngineError(InfraError):
    """The generation backend failed, or returned tokens that can't be trained on."""


class WorldError(InfraError):
    """An environment's world crashed, hung or vanished."""


class SandboxError(InfraError):
    """A sandbox vanished or its daemon failed."""


class HarnessError(InfraError):
    """A foreign harness crashed."""


class GraderError(InfraError):
    """The grader could not judge; the episode's stop reason is INVALID_REWARD."""


class TrainingError(MetaGymError, RuntimeError):
    """Training cannot go on; the newest checkpoint is good."""


class CheckpointError(MetaGymError, OSError):
    """A checkpoint could not be written or read; earlier ones are untouched."""
