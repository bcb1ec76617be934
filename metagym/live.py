"""Live handles: objects that own a thread, a process or a connection."""

from typing import Any, Self


class Live:
    """Mixin of live handles (backends, sessions, sandboxes): a deep copy of one is the handle itself.

    Gymnasium deep-copies the arguments of `gym.make` into `env.spec`; a second handle to the same resource
    makes no sense, and a lock inside one can't be copied at all.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
