"""Claude Code: Anthropic messages, streamed; thinks, calls tools in parallel, starts sub-agents."""

from metagym.agents.external import Harness, Start, words


def command(start: Start) -> str:
    how = ("--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose")
    tools = ("--tools", "Bash,Read,Edit,Write", "--max-turns", str(start.max_turns))
    return words(f"{start.bin}/node_modules/.bin/claude", "-p", start.task, *how, *tools)


def env(start: Start) -> dict[str, str]:
    models = dict.fromkeys((f"ANTHROPIC_DEFAULT_{m}_MODEL" for m in ("HAIKU", "SONNET", "OPUS")), start.model)
    return {
        **models,
        "ANTHROPIC_BASE_URL": start.url,
        "ANTHROPIC_AUTH_TOKEN": start.key,
        "ANTHROPIC_MODEL": start.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": start.model,
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(start.context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
        "CLAUDE_CONFIG_DIR": f"{start.home}/.claude",
    }


HARNESS = Harness(
    "claude-code",
    ("@anthropic-ai/claude-code@2.1.332",),
    "npm",
    command,
    env,
    program="node_modules/.bin/claude",
)
