"""The documents' code blocks, run as a reader would, against a server with the built-in model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.documents import blocks
from tests.documents.blocks import PAGES, ROOT, SERVER, YOURS
from tests.e2e.conftest import Corral

TIMEOUT_S = 120
PREAMBLE = """
set -euo pipefail
curl() { command curl --silent --show-error --fail-with-body "$@"; }
corral() { "$PYTHON" -P -m serve_app.cli "$@"; }
"""
"""A reader sees that something failed; a shell must be told to."""
FOR_A_SCRIPT = {r"^(\S*corral top)$": r"\1 --frames 1"}
"""What would go on until Ctrl-C."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(name="server")
def _server(readers_server: Corral) -> Corral:
    return readers_server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files that the documents speak of."""
    shutil.copy(ROOT / "serve_config.yaml", tmp_path)
    shutil.copy(BUILTIN_MODEL, tmp_path / "model.gguf")
    bodies = [{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}]
    lines = [
        {"custom_id": f"q{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return tmp_path


def run(command: list[str], folder: Path, text: str, server: Corral) -> str:
    environment = os.environ | {
        "CORRAL_URL": server.url,
        "KEY": "none",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [*command, text.replace(SERVER, server.url).replace(YOURS, server.url)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if blocks.to_run(page)], ids=_name)
def test_commands(page: Path, server: Corral, folder: Path) -> None:
    for text in blocks.to_run(page):
        for pattern, replacement in FOR_A_SCRIPT.items():
            text = re.sub(pattern, replacement, text, flags=re.M)
        text = text.replace(".venv/bin/corral", "corral")
        assert run(["bash", "-c"], folder, PREAMBLE + text, server)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks.programs(page)], ids=_name)
def test_programs(page: Path, server: Corral, folder: Path) -> None:
    run([sys.executable, "-c"], folder, blocks.programs(page), server)


def test_the_first_chat_says_what_readme_says(server: Corral, folder: Path) -> None:
    page = ROOT / "README.md"
    (expected,) = [block.text for block in blocks.blocks(page) if block.language == ""]
    assert run([sys.executable, "-c"], folder, blocks.programs(page), server) == expected


@pytest.mark.parametrize(
    ("program", "arguments", "typed", "expected"),
    [
        ("chat", [], "What is the capital of Portugal?\n", "The capital of Portugal is Lisbon."),
        (
            "tools",
            [],
            "",
            'get_weather({"city": "Lisbon"}) = {"city": "Lisbon", "weather": "sunny"',
        ),
        ("extract", [], "Ana likes apples.", "["),
        ("search", ["a red apple"], "a red apple\na train\n", "1.00 a red apple"),
        ("many", [], "List three fruits.\nHello!\n", "List three fruits. -> 1."),
    ],
)
def test_examples(
    program: str, arguments: list[str], typed: str, expected: str, server: Corral, folder: Path
) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / f"docs/examples/{program}.py", *arguments],
        input=typed,
        env=os.environ | {"CORRAL_URL": server.url},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_every_example_is_run_and_listed() -> None:
    names = {path.stem for path in (ROOT / "docs/examples").glob("*.py")}
    (mark,) = [m for m in test_examples.pytestmark if m.name == "parametrize"]  # type: ignore[attr-defined]
    assert names == {case[0] for case in mark.args[1]} | {"rag"}  # which tests/e2e/clients has
    page = (ROOT / "docs/clients.md").read_text()
    assert all(f"(examples/{name}.py)" in page for name in names)
