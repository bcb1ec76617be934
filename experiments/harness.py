"""Episodes that a foreign harness drives: what `agent.kind = "harness"` becomes.

All episodes of a run reach one proxy, each by a session of its own, over a unix socket that is mounted into
their sandboxes. The world must have one: `metagym/SWE-v0`.
"""

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym

from metagym.agents.external import Harness, mounts, play
from metagym.agents.harnesses import HARNESSES
from metagym.agents.harnesses import harness as find
from metagym.episode import Agent
from metagym.errors import InputError
from metagym.experiments import build
from metagym.experiments.config import Config
from metagym.protocols import Backend
from metagym.proxy.render import History, Renderer
from metagym.proxy.server import TRAINED, Proxy
from metagym.rl import shaping
from metagym.rl.rollouts import Episode, Request
from metagym.types import Trajectory

SOCKET = "proxy.sock"


@dataclass(frozen=True)
class Foreign:
    """A harness, and how its sessions are."""

    harness: Harness
    max_turns: int | None  # calls of the model in an episode
    timeout_s: float  # after which an episode is ended
    session: dict[str, Any]  # arguments of `Session`


def foreign(
    name: str,
    *,
    max_turns: int = 0,
    timeout_s: float = 1800.0,
    train: Sequence[str] = TRAINED,
    history: History = "branch",
    prefix: str = "",
    suffix: str = "",
) -> Foreign:
    """The harness of that name.

    Args:
        max_turns: most calls of the model in an episode; 0: no limit but the harness's own.
        timeout_s: after which an episode is ended.
        train: the kinds of branches that train; see `metagym.proxy.tree`.
        history, prefix, suffix: see `metagym.proxy.session.Session`.

    Raises UnknownNameError.
    """
    session = {"max_turns": max_turns or None, "train": tuple(train), "history": history}
    session |= {"prefix": prefix, "suffix": suffix}
    return Foreign(find(name), max_turns or None, timeout_s, session)


def player(config: Config) -> Foreign | Agent:
    """Who plays the episodes of a config: a harness, or an agent of ours. Raises InputError."""
    a = config.agent
    if a.kind != "harness":
        return build.build_agent(config)
    for name, wrong in {"system": a.system, "template": a.template, "history": not a.history}.items():
        if wrong:
            raise InputError(f"config.agent.{name} is for agents of ours: a harness brings its own prompts.")
    if config.rollout.branches:
        raise InputError("config.rollout.branches needs an agent of ours: a harness can't be taken back.")
    given = {"prefix": a.prefix, "max_turns": a.max_turns, **build.plain(a.args)}
    if "name" not in given:
        raise InputError(f"config.agent.args.name says which harness: {', '.join(HARNESSES)}.")
    return build.call("agent harness", foreign, given)


class Place:
    """Where the harnesses of a run find the proxy: a folder with its socket; the proxy starts when it can."""

    def __init__(self, stack: contextlib.ExitStack):
        self._stack, self._folder = stack, ""
        self._proxy: Proxy | None = None

    def world(self, agent: Foreign) -> dict[str, Any]:
        """Arguments of the world that the harness works in. Raises InputError if it is not installed."""
        if not self._folder:
            self._folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="metagym-proxy-"))
            Path(self._folder).chmod(0o755)  # a sandbox runs as another user
        inside = mounts(agent.harness, Path(self._folder) / SOCKET)
        return {"mounts": inside, "limits": agent.harness.limits}

    def proxy(self, backend: Backend, renderer: Renderer) -> Proxy:
        if self._proxy is None:
            self._proxy = Proxy(backend, renderer, socket=Path(self._folder) / SOCKET).start()
            self._stack.callback(self._proxy.close)
        return self._proxy


def build_episode(
    config: Config,
    agent: Foreign | Agent,
    backend: Backend,
    renderer: Renderer,
    pool: build.EnvPool,
    place: Place,
    *,
    training: bool,
) -> Episode:
    """As `build.build_episode`, for both kinds of players. What a harness says is sorted into what trains and
    what does not in evaluations too."""
    if isinstance(agent, Agent):
        return build.build_episode(config, backend, renderer, agent, pool, training=training)
    penalties = build.build_penalties(config) if training else []
    proxy = place.proxy(backend, renderer)
    session = {
        "sampling": build.build_sampling(config, renderer),
        "context": config.sampling.context,
        "token_budget": config.sampling.token_budget or None,
        **agent.session,
    }
    more = {} if agent.max_turns is None else {"max_turns": agent.max_turns}
    more |= {"context": config.sampling.context}

    def episode(request: Request) -> Trajectory:
        opened = proxy.open(agent.harness.name, seed=request.sampling_seed, **session)

        def one(env: gym.Env[str, str]) -> Trajectory:
            how: dict[str, Any] = {"seed": request.seed, "timeout_s": agent.timeout_s, **more}
            return play(agent.harness, env, opened, request.task, **how)

        try:
            return shaping.shaped(pool.play(one), penalties)
        finally:
            proxy.forget(opened.id)

    return episode
