"""What contributors look for: guides, issue forms, hooks and workflows hold together."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import serve_app

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("form", [f for f in FORMS if f.stem != "config"], ids=lambda f: f.stem)
def test_issue_forms_have_what_forges_want(form: Path) -> None:
    """GitHub's syntax for issue forms: it drops a form in silence that breaks it."""
    document = parsed(form)
    assert {"name", "description", "body"} <= document.keys()
    ids = [item["id"] for item in document["body"] if item["type"] != "markdown"]
    assert ids
    assert len(set(ids)) == len(ids)
    for item in document["body"]:
        assert item["type"] in ("markdown", "input", "textarea", "dropdown", "checkboxes")
        wanted = {"markdown": "value", "dropdown": "options", "checkboxes": "options"}
        assert wanted.get(item["type"], "label") in item["attributes"]


def test_hooks_are_local_and_run_what_lint_runs() -> None:
    """No repository of hooks: nothing is downloaded."""
    (repository,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    lint = re.findall(r"\$\(BIN\)/(ruff \w+|mypy)", (ROOT / "Makefile").read_text())
    commands = [shlex.split(hook["entry"]) for hook in repository["hooks"]]
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    assert all(command[0].startswith(".venv/bin/") for command in commands)
    ran = {" ".join(c[:2] if "ruff" in c[0] else c).removeprefix(".venv/bin/") for c in commands}
    assert set(lint) <= ran
    for name in (word for command in commands for word in command if word.startswith("tests/")):
        assert (ROOT / name).is_file()


def test_the_versions_agree() -> None:
    assert serve_app.__version__ == PROJECT["version"]
    assert f"`{PROJECT['version']}`" in (ROOT / "docs/changelog.md").read_text()


def test_addresses_that_stand_for_others_are_named_so() -> None:
    """corral.example is nobody's: each file that has it says so."""
    for path in [ROOT / "pyproject.toml", *(p for p in (ROOT / ".github").rglob("*.*"))]:
        text = path.read_text()
        if "corral.example" in text or "OWNER" in text:
            assert re.search("placeholder|stands for", text), path


def test_the_changelog_link_leads_to_a_page() -> None:
    name = PROJECT["urls"]["Changelog"].removeprefix(PROJECT["urls"]["Documentation"] + "/")
    assert (ROOT / "docs" / f"{name}.md").is_file()
