"""The harnesses that are known by name. To add one: a module with a `Harness`, and its name here."""

from metagym.agents.external import Harness
from metagym.agents.harnesses import (
    claude_code,
    codex,
    mini_swe_agent,
    opencode,
    openhands,
    qwen_code,
    terminus,
)
from metagym.errors import UnknownNameError

HARNESSES: dict[str, Harness] = {
    h.name: h
    for h in (
        mini_swe_agent.HARNESS,
        claude_code.HARNESS,
        codex.HARNESS,
        qwen_code.HARNESS,
        opencode.HARNESS,
        openhands.HARNESS,
        terminus.HARNESS,
    )
}


def harness(name: str) -> Harness:
    """Raises UnknownNameError."""
    if name not in HARNESSES:
        raise UnknownNameError("harness", name, HARNESSES)
    return HARNESSES[name]
