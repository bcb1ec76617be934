"""Sessions as files for others: native rows of tokens, Hugging Face `messages`, ATIF trajectories.

`rows` is exact. `traces_of_rows` reads it back, and `groups_of_rows` makes episodes of it, scored again where
wanted, to train on without a model server. The other two are text views: for looking at, or for supervised
training of other models.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metagym.errors import InputError
from metagym.proxy.session import Session
from metagym.proxy.tree import Node
from metagym.types import Group, Message, StopReason, Task, TokenTrace, Trajectory

_ARRAYS = {
    "tokens": np.int32, "sampled": bool, "trainable": bool, "logprobs": np.float32, "version": np.int32,
    "turn": np.int32, "why": np.int8,
}  # fmt: skip


def rows(
    session: Session, *, reward: float | None = None, name: str = "", task: str = ""
) -> list[dict[str, Any]]:
    """One row per branch: ids, masks, log-probs (None where nothing was sampled), versions, reasons, reward.

    Log-probs are floats whose f32 is exactly what was recorded. `name` is the session's, `task` what it was
    about: they tell which rows are an episode and a group.
    """
    out = []
    for i, trace in enumerate(session.traces):
        row: dict[str, Any] = {"session": name, "task": task, "branch": i}
        row |= {"kind": trace.kind, "reward": reward}
        row |= {array: getattr(trace, array).tolist() for array in _ARRAYS}
        row["logprobs"] = [
            p if said else None for p, said in zip(row["logprobs"], row["sampled"], strict=True)
        ]
        row["routing"] = trace.routing.tolist() if trace.routing.shape[1] else None
        out.append(row)
    return out


def traces_of_rows(given: Iterable[Mapping[str, Any]]) -> tuple[TokenTrace, ...]:
    """The traces that `rows` wrote. Raises InputError if a row is malformed."""
    traces = []
    for i, row in enumerate(given):
        try:
            arrays = {
                name: np.asarray(row[name], kind) for name, kind in _ARRAYS.items() if name != "logprobs"
            }
            arrays["logprobs"] = np.array([np.nan if p is None else p for p in row["logprobs"]], np.float32)
            routing = row.get("routing")
            if routing is not None:
                arrays["routing"] = np.asarray(routing, np.int32)
            traces.append(TokenTrace(**arrays, kind=row["kind"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"row {i} is not a native row: {type(error).__name__}: {error}") from error
    return tuple(traces)


def groups_of_rows(
    given: Iterable[Mapping[str, Any]],
    score: Callable[[Sequence[TokenTrace]], float] | None = None,
) -> list[Group]:
    """Episodes to train on: rows of the same session are one, episodes of the same task a group.

    `score` gives an episode's reward anew, from its traces; else it is what its rows say. Raises InputError
    if a row is malformed or an episode has no reward.
    """
    sessions: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in given:
        if not isinstance(row, Mapping):
            raise InputError(f"a native row is an object, not a {type(row).__name__}")
        sessions.setdefault((str(row.get("task", "")), str(row.get("session", ""))), []).append(row)
    groups: dict[str, list[Trajectory]] = {}
    for (task, name), own in sessions.items():
        traces = traces_of_rows(own)
        reward = own[0].get("reward") if score is None else score(traces)
        if reward is None:
            raise InputError(f"session {name!r} has no reward: its rows were written before it was scored")
        played = Trajectory(
            Task(task, "rows", "train"), 0, (), traces, float(reward), float(reward), StopReason.SUBMITTED
        )
        groups.setdefault(task, []).append(played)
    return [Group(tuple(members)) for members in groups.values()]


def write_rows(path: str | Path, given: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    with open(path, "w", encoding="utf-8") as file:
        for row in given:
            file.write(json.dumps(row) + "\n")


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Raises InputError if a line is not JSON."""
    with open(path, encoding="utf-8") as file:
        try:
            return [json.loads(line) for line in file]
        except ValueError as error:
            raise InputError(f"{path} does not hold native rows: {error}") from error


def messages(session: Session, *, reward: float | None = None, name: str = "") -> list[dict[str, Any]]:
    """One conversation per branch, in the shape that Hugging Face's tools train on."""
    out = []
    for path in _branches(session):
        told = [_message(m) for node in path for m in node.messages]
        tools = [dict(t) for t in path[-1].tools]
        out.append({"session": name, "messages": told, "tools": tools, "reward": reward})
    return out


def atif(session: Session, *, reward: float | None = None, name: str = "") -> dict[str, Any]:
    """All branches as trajectories in the Agent Trajectory Interchange Format, the first as the main one."""
    trajectories = []
    for path in _branches(session):
        steps: list[dict[str, Any]] = []
        for node in path:
            for m in node.messages:
                _step(steps, m, node)
        for i, step in enumerate(steps):
            step["step_id"] = i + 1
        trajectories.append({"steps": steps})
    m = session.metrics
    totals = {
        "total_prompt_tokens": int(m["prompt_tokens"]),
        "total_completion_tokens": int(m["sampled_tokens"]),
        "total_steps": sum(len(t["steps"]) for t in trajectories),
        "extra": {"reward": reward},
    }
    main = trajectories[0] if trajectories else {"steps": []}
    return {
        "schema_version": "ATIF-v1.4",
        "session_id": name or "session",
        "agent": {"name": "metagym", "version": "0", "model_name": "policy"},
        **main,
        "final_metrics": totals,
        "extra": {"other_branches": trajectories[1:]},
    }


def _step(steps: list[dict[str, Any]], m: Message, node: Node) -> None:
    if m.role == "tool":
        results = steps[-1].setdefault("observation", {"results": []})["results"] if steps else []
        results.append({"source_call_id": m.tool_call_id, "content": m.content})
        return
    if m.role != "assistant":
        steps.append({"source": m.role, "message": m.content})
        return
    step: dict[str, Any] = {"source": "agent", "message": m.content}
    if m.reasoning:
        step["reasoning_content"] = m.reasoning
    if m.tool_calls:
        step["tool_calls"] = [
            {
                "tool_call_id": c["id"],
                "function_name": c["function"]["name"],
                "arguments": _value(c["function"]["arguments"]),
            }
            for c in m.tool_calls
        ]
    if m is node.messages[-1] and node.generation is not None:
        said = node.generation
        step["metrics"] = {
            "prompt_tokens": node.length - len(said.tokens),
            "completion_tokens": len(said.tokens),
            "completion_token_ids": said.tokens.tolist(),
            "logprobs": [float(p) for p in said.logprobs],
        }
    steps.append(step)


def _branches(session: Session) -> list[list[Node]]:
    return [node.path() for node in session.nodes if not node.children]


def _message(m: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": m.role, "content": m.content}
    if m.reasoning:
        out["reasoning_content"] = m.reasoning
    if m.tool_calls:
        out["tool_calls"] = [
            {**c, "function": {**c["function"], "arguments": _value(c["function"]["arguments"])}}
            for c in m.tool_calls
        ]
    if m.tool_call_id is not None:
        out["tool_call_id"] = m.tool_call_id
    return out


def _value(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


FORMATS: dict[str, Callable[..., Any]] = {"native": rows, "messages": messages, "atif": atif}
