"""Code blocks of the documents: each is run, or read by the program or the type that it is for."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from serve_app.base import sampling
from serve_app.engine.core.engine_core import EngineCore
from tests.clients.agents.agents import AGENTS
from tests.documents import blocks as documents
from tests.documents import options, schemas
from tests.documents.blocks import ROOT, blocks, commands

PAGES = documents.PAGES
LANGUAGES = {"sh", "python", "yaml", "json", "toml", ""}
FOREIGN = {
    "cd", "curl", "docker", "export", "git", "kubectl", "make", "pip", "pre-commit", "pytest", "python3",
    "cp", "sh", "apt-get", "systemctl", "buildah", "useradd", "install", "chown", "chmod", "sed",
    "helm", "ln", "nginx", "ollama", "open-webui", "printf", "tee", "ufw", "claude", "copilot",
}  # fmt: skip
"""Programs that a reader has from elsewhere. Of ours among their words, `check` looks at files, targets and
units; their options are not checked."""
EXCERPTS = {
    "README.md": "tests/e2e/server/test_documents.py compares it with the answers",
    "docs/develop/how-to.md": "test_the_example_of_a_declaration_is_the_code",
    "docs/develop/scheduler.md": "test_the_step_of_the_schedulers_page_is_the_code",
}
"""Pages with one block without a language, and what checks it."""
AGENTS_BLOCKS = [
    block.text for block in blocks(ROOT / "docs/agents.md") if block.language in ("toml", "json")
]
"""The configuration files of agents, in the order of their page."""
NAMED = r"(?:\.venv/bin/)?(?:corral|python -m|ray|serve|locust) \S"
"""How code in a sentence begins that is a command of one of `options.PROGRAMS`."""


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


def test_blocks_without_a_language_are_excerpts_that_are_compared_with_their_source() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in PAGES
        for block in blocks(path)
        if not block.language
    ]
    assert sorted(found) == sorted(EXCERPTS)


def test_the_example_of_a_declaration_is_the_code() -> None:
    """The meaning alone is cut short."""
    (text,) = [one.text for one in blocks(ROOT / "docs/develop/how-to.md") if not one.language]
    source = ast.parse(Path(sampling.__file__).read_text())
    said, *_ = ast.parse(text).body
    assert isinstance(said, ast.AnnAssign)
    (there,) = [
        node
        for node in ast.walk(source)
        if isinstance(node, ast.AnnAssign) and ast.dump(node.target) == ast.dump(said.target)
    ]
    for node in (said, there):
        assert isinstance(node.value, ast.Call)
        meaning = node.value.args[1]
        assert isinstance(meaning, ast.Constant)
        meaning.value = str(meaning.value)[:90]
    assert ast.dump(said) == ast.dump(there)


def test_the_step_of_the_schedulers_page_is_the_code() -> None:
    (text,) = [one.text for one in blocks(ROOT / "docs/develop/scheduler.md") if not one.language]
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(EngineCore.step))).body
    assert isinstance(function, ast.FunctionDef)
    code = function.body[1:]  # behind the docstring
    assert [ast.dump(node) for node in ast.parse(text).body] == [ast.dump(node) for node in code]
    assert len(text.splitlines()) == 15


@pytest.mark.parametrize("text", of("sh"))
def test_commands_exist(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=10)
    found = list(commands(text))
    assert found
    for words in found:
        check(words)


@cache
def programs() -> list[tuple[list[str], str | None]]:
    """The commands of our programs, in blocks and in sentences, and what these say is wrong."""
    found = [
        words
        for path in PAGES
        for block in blocks(path)
        if block.language == "sh"
        for words in map(program, commands(block.text))
        if words[0] in options.PROGRAMS
    ]
    found += [words for path in documents.DOCUMENTS for words in in_sentences(path.read_text())]
    return [*zip(found, options.problems(found), strict=True)]


def in_sentences(text: str) -> Iterator[list[str]]:
    """Commands that are said with a value: a name alone, as `corral usage`, says that it exists."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    for paragraph in re.split(r"\n\s*\n|\n(?=\||- |\d+\. )", text):
        for code in re.findall(r"`([^`]+)`", paragraph):
            if re.match(NAMED, code) and not re.search(r"\.\.\.|…", code):
                words = program(next(commands(" ".join(code.split()))))
                named = len(words) < 3 if words[0] != "python" else False
                yield [*words, "--help"] if named else words


def program(words: list[str]) -> list[str]:
    """As `options.PROGRAMS` takes it: without its folder, and without where its output goes."""
    words = [words[0].removeprefix(".venv/bin/"), *words[1:]]
    if ">" in words:
        words = words[: words.index(">")]
    words[0] = words[0].removeprefix("~/corral/bin/")
    return ["python", *words[2:]] if words[:2] == ["python", "-m"] else words


def test_programs_take_the_commands() -> None:
    """By their own parsers: subcommands, options, values, and what must be given."""
    assert [(words, problem) for words, problem in programs() if problem] == []


def test_commands_are_found_in_sentences() -> None:
    assert len([words for words, _ in programs()]) > 120
    text = "Use `corral serve --port\n1`.\n\n- `corral ps`\n- `ray up ...` and `serve_app`\n"
    text += "```sh\n`corral x`\n```\n"
    assert [*in_sentences(text)] == [["corral", "serve", "--port", "1"], ["corral", "ps", "--help"]]


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
    """Raises AssertionError for what does not exist here."""
    if words[0] == "sudo":
        words = words[3:] if words[1] == "-u" else words[1:]
    name, *rest = program(words)
    if name == "make":
        targets = ["/opt/corral"]
        targets += re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in rest if word[0] != "-" and "=" not in word} <= set(targets)
    elif name == "python3" and not rest[0].startswith("docs/examples/"):
        assert rest[:2] == ["-m", "venv"] or ast.parse(rest[rest.index("-c") + 1])
    elif name == "curl":
        schemas.check_curl(rest)
    elif name == "systemctl":
        others = ("caddy", "nginx", "prometheus")
        units = [one for one in rest[1:] if one[0] != "-" and one not in others]
        assert all((ROOT / f"cluster/systemd/{one}.service").exists() for one in units), words
    elif name == "pytest":
        for path, _, test in (word.partition("::") for word in rest if word[0] != "-"):
            assert (ROOT / path).exists(), path
            assert not test or f"def {test}(" in (ROOT / path).read_text(), test
    else:
        assert name in FOREIGN | options.PROGRAMS.keys() | {"python3"}, words
    for word in (one.removeprefix("/opt/corral/") for one in rest):
        if re.match(r"(cluster|docs|tests|loadtests|tools)/", word):
            assert (ROOT / word.partition("::")[0]).exists(), word


@pytest.mark.parametrize("text", of("python"))
def test_programs_compile_and_import_what_is_there(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            module = importlib.import_module(node.module)
            assert all(hasattr(module, one.name) for one in node.names)


@pytest.mark.parametrize("text", of("yaml"))
def test_yaml_is_valid(text: str) -> None:
    schemas.check_yaml(text)


@pytest.mark.parametrize("text", of("json"))
def test_json_is_valid(text: str) -> None:
    if text not in AGENTS_BLOCKS:
        schemas.check_json(text)


def test_configurations_of_agents_are_the_tested_ones() -> None:
    """The page has the reader's model and address where the tests have theirs."""
    files = {agent.name: agent.files for agent in AGENTS}
    address = "http://127.0.0.1:8000"
    codex, opencode = (text.replace("MODEL", "demo") for text in AGENTS_BLOCKS)
    tested = files["codex"][".codex/config.toml"].format(url=address)
    assert tomllib.loads(codex) == tomllib.loads(tested)
    tested = files["opencode"]["./opencode.json"].format(url=address)
    assert json.loads(opencode).items() <= json.loads(tested).items()


@pytest.mark.parametrize(
    "words",
    [
        ["make", "nothing"],
        ["kubectl", "apply", "-k", "cluster/kubernetes/nowhere"],
        ["coral", "serve"],
        ["sudo", "systemctl", "restart", "coral"],
        [".venv/bin/pytest", "tests/unit/test_docs.py::test_nothing"],
        ["curl", "http://127.0.0.1:8000/v1/nothing"],
        ["curl", "http://127.0.0.1:8000/v1/chat/completions"],  # a GET
    ],
    ids=" ".join,
)
def test_the_check_finds_what_does_not_exist(words: list[str]) -> None:
    with pytest.raises(AssertionError):
        check(words)


def test_parsers_find_what_does_not_exist() -> None:
    wrong = [
        ["corral", "serve", "--slot", "3"],
        ["corral", "serve", "--slots", "many"],
        ["corral", "bench", "--nothing"],
        ["corral", "nothing"],
        ["python", "loadtests.nothing"],
        ["python", "loadtests.compare", "--no-such-option"],
        ["locust", "-f", "loadtests/locustfile.py", "--nothing"],
        ["ray", "start", "--nothing"],
        ["serve", "nothing"],
    ]
    assert [
        words for words, problem in zip(wrong, options.problems(wrong), strict=True) if not problem
    ] == []


@pytest.mark.parametrize(
    "text",
    [
        "engine: {n_slot: 4}",
        "ingress: {picture_hosts: 5}",
        "- {id: a, source: {}}",
        "models: []",
        "keys: [{name: a, key: short}]",
        "nothing: {}",
    ],
)
def test_yaml_that_is_wrong_is_found(text: str) -> None:
    with pytest.raises((ValueError, KeyError, schemas.ConfigError)):
        schemas.check_yaml(text)


@pytest.mark.parametrize(
    "change",
    [{"url": "/v1/nothing"}, {"body": {"messages": "Hello"}}, {"custom_id": None}],
    ids=str,
)
def test_json_that_is_wrong_is_found(change: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    schemas.check_json(json.dumps(line))
    with pytest.raises((ValueError, AssertionError)):
        schemas.check_json(json.dumps({k: v for k, v in (line | change).items() if v is not None}))
