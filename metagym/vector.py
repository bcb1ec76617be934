"""Text envs side by side, in threads where that helps: what `gymnasium.make_vec(id, num_envs=n)` makes.

A world says with `waits` whether its steps wait for another process, such as a worker that it owns or a
sandbox. Such envs are stepped in a thread each, all at once; the others, which compute in this process, one
after the other, where threads would only get in each other's way. Either way it does what gymnasium's
SyncVectorEnv does.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from metagym.errors import InputError


class _Ahead(gym.Wrapper[Any, Any, Any, Any]):
    """Hands out results that threads are getting already, in the order in which they were asked for."""

    def __init__(self, env: gym.Env[Any, Any]):
        super().__init__(env)
        self.coming: deque[Future[Any]] = deque()

    def reset(self, **kwargs: Any) -> Any:
        return self.coming.popleft().result() if self.coming else self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        return self.coming.popleft().result() if self.coming else self.env.step(action)


class TextVectorEnv(SyncVectorEnv):
    """Gymnasium's SyncVectorEnv, in threads where the world waits.

    Args:
        env_fns: functions that make an env each.
        autoreset_mode: see gymnasium.
        threads: whether to step the envs in threads; None: as the world says.

    Raises InputError without envs and for another number of seeds or actions than envs. What an env raises
    is raised when all are done with that call.
    """

    envs: Sequence[Any] = ()
    _pool: ThreadPoolExecutor | None = None

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        *,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        threads: bool | None = None,
    ):
        if not env_fns:
            raise InputError("a vector env needs at least one env.")
        super().__init__(
            [lambda make=make: _Ahead(make()) for make in env_fns], autoreset_mode=autoreset_mode
        )
        if threads is None:
            threads = all(getattr(env.unwrapped, "waits", False) for env in self.envs)
        self._pool = ThreadPoolExecutor(self.num_envs, "metagym-vector") if threads else None

    @property
    def threads(self) -> bool:
        """Whether the envs are stepped in threads."""
        return self._pool is not None

    def reset(self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None):
        if not isinstance(seed, int | None) and len(seed) != self.num_envs:
            raise InputError(f"{len(seed)} seeds for {self.num_envs} envs: pass one each, or an int.")
        if self._pool is not None and "reset_mask" not in (options or {}):
            seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
            for env, each in zip(self.envs, seeds or [None] * self.num_envs, strict=True):
                env.coming.append(self._pool.submit(env.env.reset, seed=each, options=options))
        return self._gathered(super().reset, seed=seed, options=options)

    def step(self, actions: Any):
        actions = tuple(iterate(self.action_space, actions))
        if len(actions) != self.num_envs:
            raise InputError(f"{len(actions)} actions for {self.num_envs} envs: pass one each.")
        if self._pool is not None:
            again = self._autoreset_envs if self.autoreset_mode == AutoresetMode.NEXT_STEP else None
            for i, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
                call = (env.env.reset,) if again is not None and again[i] else (env.env.step, action)
                env.coming.append(self._pool.submit(*call))
        return self._gathered(super().step, actions)

    def _gathered(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        finally:  # after an error, what the other envs were asked for is no answer to the next call
            for env in self.envs:
                wait(env.coming)
                env.coming.clear()

    def close_extras(self, **kwargs: Any) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        super().close_extras(**kwargs)


def make(
    id: str, *, num_envs: int, autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any
) -> TextVectorEnv:
    """`num_envs` envs of an id, made with `kwargs`."""
    one = functools.partial(gym.make, id, **kwargs)
    return TextVectorEnv([one] * num_envs, autoreset_mode=autoreset_mode)


def __getattr__(name: str) -> Callable[..., TextVectorEnv]:
    """`metagym.vector:Toy` is the vector entry point of metagym/Toy-v0, and so for every id."""
    if f"metagym/{name}-v0" not in gym.registry:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return functools.partial(make, f"metagym/{name}-v0")
