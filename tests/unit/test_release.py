"""The workflows that would publish a release, and the list of what is in it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_image import locked

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M)
every_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def commands(path: Path) -> list[str]:
    return [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]


@every_workflow
def test_workflows_run_what_is_there_within_bounds(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert document["permissions"] == {"contents": "read"}
    for job in jobs(path).values():
        assert job["timeout-minutes"] <= 120
        assert set(job.get("needs", "").split()) <= jobs(path).keys()
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert "@" in step.get("uses", "@")
    for command in commands(path):
        for targets in re.findall(r"^make ([\w -]+)$", command, re.M):
            assert set(targets.split()) <= set(TARGETS)
        for file in re.findall(r"(?:^|\s)(\.ci/\w+|docs/[\w.]+\.md)", command):
            assert (ROOT / file).is_file()


@every_workflow
def test_workflows_say_that_they_were_not_run(path: Path) -> None:
    assert path.read_text().startswith("# Not run yet")


def test_workflows_shells_parse_their_commands() -> None:
    for path in WORKFLOWS:
        for command in commands(path):
            plain = re.sub(r"\$\{\{.*?\}\}", "x", command)
            subprocess.run(["bash", "-n"], input=plain, text=True, check=True, timeout=10)


def test_a_release_is_tested_first_and_its_placeholders_are_named() -> None:
    path = ROOT / ".github/workflows/release.yml"
    made = jobs(path)
    assert all(job.get("needs") == "check" for name, job in made.items() if name != "check")
    (placeholders,) = re.findall(r"^# Placeholders: (.*)$", path.read_text(), re.M)
    secrets = re.findall(r"secrets\.(\w+)", path.read_text())
    assert all(secret in placeholders for secret in secrets)
    assert "registry.example" in placeholders


def test_the_tag_must_be_the_version() -> None:
    (command,) = [c for c in commands(ROOT / ".github/workflows/release.yml") if "grep" in c]
    version = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[0]
    for tag, status in ((f"v{version}", 0), ("v99.0.0", 1)):
        ran = subprocess.run(
            ["bash", "-c", command],
            env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"},
            cwd=ROOT,
            timeout=10,
        )
        assert ran.returncode == status


def test_the_sbom_lists_what_the_image_installs(tmp_path: Path) -> None:
    """Where `make sbom` has made its environment."""
    program = ROOT / ".venv-release/bin/cyclonedx-py"
    if not program.exists():
        pytest.skip("make sbom makes the environment")
    made = tmp_path / "sbom.json"
    makefile = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r"cyclonedx-py (requirements .*\\\n.*)", makefile)
    options = recipe.replace("\\\n", " ").replace("build/sbom.json", str(made)).split()
    subprocess.run([program, *options], cwd=ROOT, check=True, timeout=120, capture_output=True)
    sbom = json.loads(made.read_text())
    assert sbom["bomFormat"] == "CycloneDX"
    assert sbom["metadata"]["component"]["name"] == "corral"
    listed = {one["name"]: (one["version"], _hashes(one)) for one in sbom["components"]}
    assert listed == locked("cluster/image/requirements.lock")


def _hashes(component: dict[str, Any]) -> frozenset[str]:
    found = component["externalReferences"][0]["hashes"]
    return frozenset(f"sha256:{one['content']}" for one in found)
