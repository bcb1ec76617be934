"""The agent for software engineering: a thought, then one command in a fenced block (ReAct, 2210.03629).

The conversation only grows: what was said is never rewritten, so an episode is one token trace. Deviations
from ReAct: one command per reply, in a block, since commands have several lines; a reply with none or with
several is refused with how to do it right.
"""

import re
from collections.abc import Mapping
from typing import Any

from metagym.episode import Agent
from metagym.errors import FormatError

FORMAT = "Think in a few sentences, then give one command in a block:\n```\nshell ls\n```"
_BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


def swe(
    goal: str = "",
    *,
    system: str | None = None,
    format: str = FORMAT,
    prefix: str = "",
    action: str = "",
    history: bool = True,
    max_format_errors: int = 3,
) -> Agent:
    """An agent whose reply is a thought and one command in a block of three backticks.

    Args:
        goal: goes before the issue.
        system: system prompt, such as `metagym.envs.swe.PROMPT`.
        format: says how to reply; goes behind the issue.
        prefix: a begun reply.
        action: if given, the reply is no block but one word that goes in place of `{reply}` in this command:
            for small models, which then choose what matters and nothing else.
        history, max_format_errors: see `Agent`.
    """

    def prompt(observation: str, info: Mapping[str, Any], turn: int) -> str:
        first = turn == 0 or not history
        return "\n\n".join(p for p in ((goal if first else ""), observation, (format if first else "")) if p)

    return Agent(
        system=system,
        prompt=prompt,
        parse=(lambda reply: filled(action, reply.removeprefix(prefix))) if action else parse,
        prefix=prefix,
        history=history,
        max_format_errors=max_format_errors,
    )


def filled(action: str, reply: str) -> str:
    """The command with the reply in it. Raises FormatError if that is not one word without quotes."""
    words = reply.split()
    if len(words) != 1 or re.search(r"""['"\\`$;&|<>/]""", words[0]):
        raise FormatError("Reply with one word.")
    return action.replace("{reply}", words[0])


def parse(reply: str) -> str:
    """The one block of the reply. Raises FormatError, whose message says how to do it right."""
    blocks = _BLOCK.findall(reply if reply.endswith("\n") else reply + "\n")
    if len(blocks) != 1:
        found = "no command" if not blocks else f"{len(blocks)} commands"
        raise FormatError(f"There was {found} in your reply. {FORMAT}")
    command = blocks[0].strip("\n")
    if not command.strip():
        raise FormatError(f"The block in your reply is empty. {FORMAT}")
    return command
