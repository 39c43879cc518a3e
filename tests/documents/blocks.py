"""Code blocks of the documents: which are run against a server, and why the others are not."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
)
PAGES = tuple(path for path in DOCUMENTS if "```" in path.read_text())
"""Those with code blocks."""
SERVER = "http://127.0.0.1:8000"
"""The server that the documents ask,"""
YOURS = "https://llm.example"
"""and one that only the reader has: tests ask the former."""
RUN = (
    *(
        f"corral {name}"
        for name in ("chat", "check", "config model.gguf", "ps", "stats", "top", "usage")
    ),
    f"curl {SERVER}",
    f"curl {YOURS}/v1",
    "python3 -c",
    "cp serve_config.yaml",
)
"""How commands begin that are run."""
LEFT_OUT: Mapping[str, str] = {
    "apt-get": "installs packages",
    "claude": "is a client; tests/clients/agents runs it",
    "copilot": "is a client",
    "buildah": "needs root and half an hour",
    "corral batch": "starts a Ray of its own; tests/e2e/batch runs it",
    "corral capacity": "measures for minutes; tests/integration/loadtests measure",
    "corral config Qwen": "asks Hugging Face",
    "corral keys": "needs an operator's key; tests/e2e/server makes some",
    "corral serve": "serves until Ctrl-C; tests/e2e/cli starts it",
    "corral tune": "measures for minutes; its own tests run it",
    f"curl {YOURS}/lora-adapters": "needs an adapter's file; tests/e2e/cluster loads some",
    "docker": "needs a registry",
    "export": "is for shells of several machines",
    "ollama": "is another server's command",
    "open-webui": "is a client; tests/clients runs it",
    "kubectl": "needs a Kubernetes cluster; tests/unit/test_kubernetes.py renders the files",
    "helm": "needs a Kubernetes cluster; tests/unit/test_kubernetes.py renders the chart",
    "locust": "measures for minutes; tests/integration/loadtests measure",
    "cd": "is for the reader's shell",
    "git": "downloads the source",
    "make": "takes minutes, or is what runs this test",
    "pip": "installs packages",
    "python3 docs/examples": "needs a server of three models; tests/e2e/clients starts one",
    "python3 -m venv": "wants packages from an index; tests/e2e/cli installs the wheel without one",
    "~/corral/bin": "is the reader's; tests/e2e/cli installs the wheel elsewhere",
    "pre-commit": "changes the reader's checkout",
    "pytest": "runs tests",
    "python -m loadtests": "measures for minutes; tests/integration/loadtests measure",
    "python -m tools.random_models.model": "writes a large file; the tests use it",
    "printf": "writes keys; tests/guides runs it",
    "ray": "needs several machines; tests/e2e/cluster starts such clusters",
    "serve": "needs a cluster; tests/e2e/cluster deploys to one",
    "sh cluster/image/base.sh": "needs root and debootstrap",
    "sudo": "changes the machine; tests/guides runs the guide of a single server on one of its own",
    "systemctl": "needs systemd",
}
"""How commands begin that are not run, and why. tests/unit/test_code_blocks.py checks what they name."""


class Block(NamedTuple):
    """What is between two fences."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """A page's code blocks. One in a list is moved to the margin."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", page.read_text(), re.M | re.S)
    return [
        Block(language, re.sub(f"^{indent}", "", text, flags=re.M))
        for indent, language, text in found
    ]


def commands(text: str) -> Iterator[list[str]]:
    """Each command's words, without the assignments before it."""
    text = re.sub(r"(^|\s)#\s.*$", r"\1", text.replace("\\\n", " "), flags=re.M)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|;&\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if set(word) <= set("|;&\n"):
            yield from [words] if words else []
            words = []
        elif words or not re.match(r"\w+=", word):
            words.append(word)


def is_run(words: Sequence[str]) -> bool:
    """Whether a test runs this command."""
    return any(_plain(words).startswith(beginning) for beginning in RUN)


def why_not(words: Sequence[str]) -> str | None:
    """Why no test runs this command; None if nobody has said."""
    command = f"{_plain(words)} "
    for beginning, reason in LEFT_OUT.items():
        if re.match(rf"{re.escape(beginning)}[\s./]", command):
            return reason
    return None


def to_run(page: Path) -> list[str]:
    """The page's shell blocks all of whose commands are run."""
    return [
        block.text
        for block in blocks(page)
        if block.language == "sh" and all(map(is_run, commands(block.text)))
    ]


def programs(page: Path) -> str:
    """The page's Python blocks as one program, as a reader would type them one after the other."""
    return "\n".join(block.text for block in blocks(page) if block.language == "python")


def _plain(words: Sequence[str]) -> str:
    return " ".join(words).removeprefix(".venv/bin/")
