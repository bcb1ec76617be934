"""What the prompts of all agents have in common."""

from collections.abc import Mapping
from typing import Any


def first_then(
    goal: str, observation: str, info: Mapping[str, Any], format: str, *, first: bool, actions: bool
) -> str:
    """The user message of a turn: the goal and the reply format stand in the first only.

    `actions`: add the actions that `info["admissible"]` lists, if it does.
    """
    listed = info.get("admissible", ()) if actions else ()
    parts = [
        goal if first else "",
        observation,
        "Possible actions: " + ", ".join(listed) if listed else "",
        format if first else "",
    ]
    return "\n\n".join(part for part in parts if part)
