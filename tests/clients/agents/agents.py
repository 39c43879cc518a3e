"""How each coding agent is pointed at a server, given a task without a person, and given a second one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

CONTEXT = 65_536
"""Tokens of a sequence; agents begin with 2,000 to 35,000."""


@dataclass(frozen=True)
class Agent:
    """One agent. In texts, `{url}` is the server's address, and `{task}` the task."""

    name: str
    first: tuple[str, ...]
    """The command for the first task; its first word is the program."""
    second: tuple[str, ...]
    """The command for the second task, in the same session where the agent can go on with one."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Configuration files: below the home folder, or with `./` in the folder of the work."""
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: tuple[str, ...] = ()
    """A command that is run once, before the first task."""
    continues: bool = True
    """Whether the second task is in the first one's session."""


_OPENCODE = """{{
  "model": "corral/demo", "small_model": "corral/demo", "share": "disabled", "autoupdate": false,
  "provider": {{"corral": {{
    "npm": "@ai-sdk/openai-compatible", "name": "Corral",
    "options": {{"baseURL": "{url}/v1", "apiKey": "none"}},
    "models": {{"demo": {{"name": "demo", "limit": {{"context": 65536, "output": 4096}}}}}}
  }}}}
}}
"""

AGENTS = (
    Agent(
        "codex",
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{task}"),
        (
            "codex", "exec", "resume", "--last", "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox", "{task}",
        ),
        files={
            ".codex/config.toml": """\
model = "demo"
model_provider = "corral"
model_context_window = 65536
[model_providers.corral]
name = "Corral"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "CORRAL_API_KEY"
"""
        },
        environment={"CORRAL_API_KEY": "none"},
    ),
    Agent(
        "claude",
        ("claude", "--dangerously-skip-permissions", "-p", "{task}"),
        ("claude", "--dangerously-skip-permissions", "-c", "-p", "{task}"),
        environment={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "demo",
            "ANTHROPIC_SMALL_FAST_MODEL": "demo",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # or the agent refuses to run as root
        },
    ),
    Agent(
        "opencode",
        ("opencode", "run", "{task}"),
        ("opencode", "run", "--continue", "{task}"),
        files={"./opencode.json": _OPENCODE},
    ),
    Agent(
        "kilo",
        ("kilo", "run", "--auto", "{task}"),
        ("kilo", "run", "--auto", "--continue", "{task}"),
        files={".config/kilo/opencode.json": _OPENCODE, "./opencode.json": _OPENCODE},
    ),
    Agent(
        "qwen",
        ("qwen", "--auth-type", "openai", "--yolo", "-p", "{task}"),
        ("qwen", "--auth-type", "openai", "--yolo", "--continue", "-p", "{task}"),
        environment={
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": "{url}/v1",
            "OPENAI_MODEL": "demo",
        },
    ),
    Agent(
        "cline",
        ("cline", "-P", "openai-compatible", "-m", "demo", "{task}"),
        ("cline", "-P", "openai-compatible", "-m", "demo", "{task}"),
        prepare=("cline", "auth", "-p", "openai", "-k", "none", "-m", "demo", "-b", "{url}/v1"),
        continues=False,
    ),
    Agent(
        "cn",
        ("cn", "--config", "config.yaml", "--auto", "-p", "{task}"),
        ("cn", "--config", "config.yaml", "--auto", "--resume", "-p", "{task}"),
        files={
            "./config.yaml": """\
name: corral
version: 0.0.1
schema: v1
models:
  - name: demo
    provider: openai
    model: demo
    apiBase: {url}/v1
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
"""
        },
    ),
    Agent(
        "mini",
        ("mini", "--yolo", "--exit-immediately", "-m", "openai/demo", "-t", "{task}"),
        ("mini", "--yolo", "--exit-immediately", "-m", "openai/demo", "-t", "{task}"),
        environment={
            "OPENAI_API_KEY": "none",
            "OPENAI_API_BASE": "{url}/v1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
        continues=False,
    ),
    Agent(
        "openhands",
        ("python", "openhands_task.py", "{url}", "{task}"),
        ("python", "openhands_task.py", "{url}", "{task}"),
        files={"./openhands_task.py": (Path(__file__).parent / "openhands_task.txt").read_text()},
    ),
    Agent(
        "aider",
        (
            "aider", "--model", "openai/demo", "--edit-format", "whole", "--yes-always", "--no-git",
            "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--message", "{task}",
        ),
        (
            "aider", "--model", "openai/demo", "--edit-format", "whole", "--yes-always", "--no-git",
            "--no-check-update", "--analytics-disable", "--no-show-model-warnings",
            "--restore-chat-history", "--message", "{task}",
        ),
        environment={"OPENAI_API_KEY": "none", "OPENAI_API_BASE": "{url}/v1"},
        continues=False,  # a new process shows the files before the restored session
    ),
)  # fmt: skip

LIMIT_S = 2
"""Seconds that an impatient agent waits for an event: by default 300 for Codex, and 240 for Qwen Code."""


def _impatient() -> Iterator[Agent]:
    """Those agents that give up by themselves, with this limit, and with few tries and tools."""
    limit_ms = 1000 * LIMIT_S
    for agent in AGENTS:
        if agent.name == "codex":
            own = f"stream_idle_timeout_ms = {limit_ms}\nstream_max_retries = 0\n"
            files = {name: text + own for name, text in agent.files.items()}
            yield replace(agent, files=files)
        elif agent.name == "qwen":
            limit = {"QWEN_STREAM_IDLE_TIMEOUT_MS": str(limit_ms)}
            first = (*agent.first, "--bare")
            yield replace(agent, first=first, environment={**agent.environment, **limit})


IMPATIENT = tuple(_impatient())
