"""opencode: chat completions, streamed; asks for a title first, names its sessions, compacts by usage."""

import json

from metagym.agents.external import Harness, Start, words


def command(start: Start) -> str:
    how = ("--format", "json", "-m", f"metagym/{start.model}")
    return words(f"{start.bin}/node_modules/.bin/opencode", "run", *how, start.task)


def env(start: Start) -> dict[str, str]:
    off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")
    return {
        **{f"OPENCODE_DISABLE_{name}": "1" for name in off},
        "OPENCODE_CONFIG": f"{start.home}/opencode.json",
        "XDG_CONFIG_HOME": f"{start.home}/.config",
        "XDG_DATA_HOME": f"{start.home}/.local/share",
        "XDG_CACHE_HOME": f"{start.home}/.cache",
    }


def files(start: Start) -> dict[str, str]:
    limit = {"context": start.context, "output": min(8000, start.context // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "metagym",
        "options": {"baseURL": f"{start.url}/v1", "apiKey": start.key},
        "models": {start.model: {"name": start.model, "tool_call": True, "limit": limit}},
    }
    config = {
        "model": f"metagym/{start.model}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {"metagym": provider},
        "permission": "allow",
    }
    return {"opencode.json": json.dumps(config)}


HARNESS = Harness(
    "opencode",
    ("opencode-ai@1.18.33",),
    "npm",
    command,
    env,
    files,
    program="node_modules/.bin/opencode",
)
