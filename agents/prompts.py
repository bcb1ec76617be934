"""What the prompts and the parsing of all agents have in common."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Prompt = Callable[[str, Mapping[str, Any], int], str]  # see `metagym.episode.Agent.prompt`


def first_then(goal: str, format: str, *, history: bool, actions: bool) -> Prompt:
    """The prompt of an agent: the goal and the reply format stand in the first message, or without history in
    each.

    `actions`: add the actions that `info["admissible"]` lists, if it does.
    """

    def prompt(observation: str, info: Mapping[str, Any], turn: int) -> str:
        first = turn == 0 or not history
        listed = info.get("admissible", ()) if actions else ()
        parts = [
            goal if first else "",
            observation,
            "Possible actions: " + ", ".join(listed) if listed else "",
            format if first else "",
        ]
        return "\n\n".join(part for part in parts if part)

    return prompt


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
