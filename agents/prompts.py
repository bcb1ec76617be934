"""What the prompts and the parsing of all agents have in common."""

from collections.abc import Iterable, Mapping
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


def first_action(lines: Iterable[str]) -> str | None:
    """The first line that is neither blank nor a code fence, without quotes around it; None if none is."""
    for line in lines:
        action = unquoted(line)
        if action and not action.startswith("```"):
            return action
    return None


def unquoted(text: str) -> str:
    """The text without blanks and quotes around it; quotes that are part of it, as in `say "hi"`, stay."""
    text = text.strip()
    for quote in ("**", "`", '"', "'"):
        inside = text[len(quote) : -len(quote)]
        if len(text) >= 2 * len(quote) and text == quote + inside + quote and quote not in inside:
            return unquoted(inside)
    return text
