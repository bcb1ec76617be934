"""Codex: OpenAI responses, streamed. A 429 without Retry-After would end it."""

from metagym.agents.external import Harness, Start, toml, words


def command(start: Start) -> str:
    how = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return words(f"{start.bin}/node_modules/.bin/codex", "exec", *how, start.task)


def env(start: Start) -> dict[str, str]:
    return {"METAGYM_KEY": start.key, "CODEX_HOME": f"{start.home}/.codex"}


def files(start: Start) -> dict[str, str]:
    config = f"""model = {toml(start.model)}
model_provider = "metagym"
model_context_window = {start.context}
[model_providers.metagym]
name = "metagym"
base_url = {toml(start.url + "/v1")}
env_key = "METAGYM_KEY"
wire_api = "responses"
[analytics]
enabled = false
"""
    return {".codex/config.toml": config}


HARNESS = Harness(
    "codex",
    ("@openai/codex@0.171.0",),
    "npm",
    command,
    env,
    files,
    program="node_modules/.bin/codex",
)
