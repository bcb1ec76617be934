"""The JSON agent: the reply is an object such as `{"action": "north"}`."""

import json

from metagym.agents.prompts import first_then
from metagym.episode import Agent
from metagym.errors import FormatError
from metagym.spaces import clean

_MOST_STARTS = 100  # places where an object might begin that are tried


def json_action(
    goal: str = "",
    *,
    key: str = "action",
    system: str | None = None,
    format: str | None = None,
    list_actions: bool = False,
    prefix: str = "",
    history: bool = True,
    max_format_errors: int = 3,
) -> Agent:
    """An agent whose reply holds a JSON object with the action under `key`.

    Args:
        goal: what the task is about; goes before the first observation (before each one without history).
        key: where the action stands in the object.
        system: system prompt.
        format: says how to reply; None: in our words, "" leaves it out.
        list_actions: whether to add the actions that the world says are possible (`info["admissible"]`).
        prefix: a begun reply, such as `{"action": "`.
        history, max_format_errors: see `Agent`.
    """
    if format is None:
        format = f"Reply with a JSON object: {json.dumps({key: 'one action'})}"
    return Agent(
        system=system,
        prompt=first_then(goal, format, history=history, actions=list_actions),
        parse=lambda reply: parse(reply, key),
        prefix=prefix,
        history=history,
        max_format_errors=max_format_errors,
    )


def parse(reply: str, key: str = "action") -> str:
    """The string under `key` of the first complete JSON object that has it; whatever surrounds it is ignored.

    A number or a truth value is taken as its JSON text. Raises FormatError if there is no such object.
    """
    wanted = f"Reply with a JSON object: {json.dumps({key: 'one action'})}"
    decoder = json.JSONDecoder()
    seen = False
    at = -1
    for _ in range(_MOST_STARTS):
        at = reply.find("{", at + 1)
        if at < 0:
            break
        try:
            found, end = decoder.raw_decode(reply, at)
        except (ValueError, RecursionError):  # not JSON from here; nested too deeply
            continue
        seen = True
        value = found.get(key)
        if isinstance(value, str) and value.strip():
            return clean(value).strip()
        if isinstance(value, bool | int | float):
            return json.dumps(value)
        at = end - 1  # the objects inside are not asked
    if not seen:
        raise FormatError(f"Your reply was not a complete JSON object. {wanted}")
    raise FormatError(f"Your JSON object had no text under {json.dumps(key)}. {wanted}")
