"""Code blocks of the documents: commands and options exist, and everything else parses."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from serve_app.cli.main import app
from tests.documents import blocks as documents
from tests.documents.blocks import ROOT, blocks, commands

PAGES = documents.PAGES
LANGUAGES = {"sh", "python", "yaml", "json", ""}
# Programs that a reader has from elsewhere; their options are not checked here.
FOREIGN = {
    "curl", "docker", "export", "git", "kubectl", "pip", "pre-commit", "ray", "serve", "locust",
    "ip", "cd", "numactl", "set", "ulimit", "apt-get", "node", "npm", "systemctl", "for", "buildah",
    "useradd", "install", "chown", "chmod", "sed", "cp", "nginx", "ufw",
}  # fmt: skip


def of(language: str) -> list[Any]:
    return [
        pytest.param(block.text, id=f"{path.relative_to(ROOT)}-{i}")
        for path in PAGES
        for i, block in enumerate(blocks(path))
        if block.language == language
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_is_of_a_kind_that_is_checked(path: Path) -> None:
    assert {block.language for block in blocks(path)} <= LANGUAGES
    assert len(re.findall(r"^ *```", path.read_text(), re.M)) == 2 * len(blocks(path))


@pytest.mark.parametrize("text", of("sh"))
def test_commands_exist_with_these_options(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=10)
    found = list(commands(text))
    assert found
    for words in found:
        check(words)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_is_run_or_has_a_reason_not_to_be(path: Path) -> None:
    """tests/e2e/server/test_documents.py runs them."""
    found = [
        words for block in blocks(path) if block.language == "sh" for words in commands(block.text)
    ]
    assert [
        words for words in found if not documents.is_run(words) and documents.why_not(words) is None
    ] == []
    assert [words for words in found if documents.is_run(words) and documents.why_not(words)] == []


def test_no_reason_is_left_over() -> None:
    every = [
        words
        for path in PAGES
        for block in blocks(path)
        if block.language == "sh"
        for words in commands(block.text)
    ]
    used = {documents.why_not(words) for words in every}
    assert set(documents.LEFT_OUT.values()) <= used
    assert [
        one
        for one in documents.RUN
        if not any(" ".join(words).removeprefix(".venv/bin/").startswith(one) for words in every)
    ] == []


def check(words: list[str]) -> None:
    """Raises AssertionError, or a click.UsageError, for what does not exist here."""
    if words[0] == "sudo":
        words = words[1:]
    name, *rest = words
    program = name.removeprefix(".venv/bin/")
    if program == "corral":
        group: Any = typer.main.get_command(app)
        command: click.Command = group.commands[rest[0]]
        if command.context_settings.get("ignore_unknown_options"):
            assert_options(
                {"batch": "serve_app.batch", "capacity": "loadtests.load.capacity"}.get(
                    rest[0], "loadtests.engine"
                ),
                rest,
            )
        else:
            known = {option for one in command.params for option in one.opts}
            assert {word for word in rest if word.startswith("--")} <= known | {"--help"}, words
    elif program == "make":
        targets = [".venv/.ready", "/opt/corral"]
        targets += re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in rest if not word.startswith("-") and "=" not in word} <= set(
            targets
        )
    elif program == "python3" and rest[0] == "-c":
        ast.parse(rest[1])
    elif program == "sh":
        assert (ROOT / rest[0]).exists(), words
    elif program in ("python", "python3") and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]) is not None, words
        assert_options(rest[1], rest[2:])
    elif program == "pytest":
        for word in rest:
            assert word.startswith("-") or (ROOT / word.partition("::")[0]).exists(), word
    else:
        assert program in FOREIGN, words
    for word in (one.removeprefix("/opt/corral/") for one in rest):
        if re.match(r"(cluster|docs|tests)/", word):
            assert (ROOT / word.partition("::")[0]).exists(), word


def assert_options(module: str, words: list[str]) -> None:
    """Our own modules spell their options in argparse: each must be there."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    folder = Path(str(spec.origin)).parent
    if folder.is_relative_to(ROOT):
        sources = "".join(path.read_text() for path in (ROOT / "loadtests").rglob("*.py"))
        sources += "".join(path.read_text() for path in folder.rglob("*.py"))
        for word in words:
            if re.match(r"--\w", word):
                assert f'"{word.partition("=")[0]}"' in sources, f"{module} {word}"


@pytest.mark.parametrize("text", of("python"))
def test_programs_compile_and_import_what_is_there(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            module = importlib.import_module(node.module)
            assert all(hasattr(module, one.name) for one in node.names)


@pytest.mark.parametrize("text", of("yaml"))
def test_yaml_parses(text: str) -> None:
    assert yaml.safe_load(text)


@pytest.mark.parametrize("text", of("json"))
def test_json_parses(text: str) -> None:
    """As a whole, or as fields of a document, or line by line."""
    lines = text.strip().splitlines()
    forms = ([text], [f"{{{text}}}"], lines)
    assert any(all(map(_is_json, form)) for form in forms)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "words",
    [
        ["corral", "serve", "--slot", "3"],
        ["make", "nothing"],
        ["python", "-m", "loadtests.nothing"],
        ["python", "-m", "loadtests.compare", "--no-such-option"],
        ["kubectl", "apply", "-k", "cluster/kubernetes/nowhere"],
        ["coral", "serve"],
    ],
    ids=" ".join,
)
def test_the_check_finds_what_does_not_exist(words: list[str]) -> None:
    with pytest.raises(AssertionError):
        check(words)
