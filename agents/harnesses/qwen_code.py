"""Qwen Code: chat completions, streamed; sends thoughts back, and JSON without blanks."""

import json

from metagym.agents.external import Harness, Start, words


def command(start: Start) -> str:
    node = f"PATH={start.bin}/node_modules/node/bin:{start.bin}/node_modules/.bin:$PATH "
    how = ("--auth-type", "openai", "--yolo", "-o", "json", "--max-session-turns", str(start.max_turns))
    return node + words(f"{start.bin}/node_modules/.bin/qwen", *how, "-p", start.task)


def env(start: Start) -> dict[str, str]:
    return {
        "OPENAI_API_KEY": start.key,
        "OPENAI_BASE_URL": f"{start.url}/v1",
        "OPENAI_MODEL": start.model,
    }


def files(start: Start) -> dict[str, str]:
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "model": {"generationConfig": {"contextWindowSize": start.context}},
        "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
    }
    return {".qwen/settings.json": json.dumps(settings)}


HARNESS = Harness(
    "qwen-code",
    ("@qwen-code/qwen-code@0.24.4", "node@22.23.3"),
    "npm",
    command,
    env,
    files,
    program="node_modules/.bin/qwen",
)
