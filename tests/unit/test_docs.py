"""README and ARCHITECTURE say what the code says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from serve_app import config
from serve_app.config import DeploymentConfig, EngineConfig, IngressConfig, ModelConfig, ModelSource
from serve_app.errors import ConfigError, CorralError
from serve_app.ingress.accounts import KeyFile
from serve_app.ingress.api import build_api

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def errors(base: type[CorralError] = CorralError) -> list[type[CorralError]]:
    return [base, *(error for sub in base.__subclasses__() for error in errors(sub))]


@pytest.mark.parametrize(
    ("section", "prefix"),
    [
        (ModelConfig, ""),
        (ModelSource, "source."),
        (EngineConfig, "engine."),
        (DeploymentConfig, ""),
        (IngressConfig, "ingress."),
    ],
)
def test_every_field_is_in_the_readmes_tables(section: type[BaseModel], prefix: str) -> None:
    names = set(section.model_fields) - {"source", "engine"}
    if section is IngressConfig:
        names -= {"deployment"}
    assert [n for n in names if not re.search(rf"^\|.*`{prefix}{n}`", README, re.M)] == []


@pytest.mark.parametrize("section", [ModelConfig, ModelSource, EngineConfig])
def test_every_field_says_what_it_is(section: type[BaseModel]) -> None:
    bare = [name for name, field in section.model_fields.items() if not field.description]
    assert bare == []


@pytest.mark.parametrize(
    "error", [e for e in errors() if e.code is not None and e is not ConfigError]
)
def test_every_error_code_is_in_the_readme(error: type[CorralError]) -> None:
    assert re.search(rf"^\| {error.status} \| `{error.code}` \|", README, re.M)


def test_every_module_has_a_line_and_every_line_a_module() -> None:
    modules = {
        str(path.relative_to(ROOT))
        for folder in ("serve_app", "cluster", "loadtests")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert set(re.findall(r"^\| `(\S+\.py)` \|", ARCHITECTURE, re.M)) == modules


def test_the_readmes_configuration_is_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", README, re.S)
    (models,) = [block for block in blocks if "models:" in block]
    (keys,) = [block for block in blocks if block.startswith("keys:")]
    assert KeyFile.model_validate(yaml.safe_load(keys)).keys[0].tokens_per_minute == 60000
    parsed = config.parse(yaml.safe_load(models))
    assert [model.id for model in parsed.models] == ["qwen3-0.6b", "qwen3-4b"]


def test_every_route_is_in_the_readme() -> None:
    paths = build_api({}).openapi()["paths"]
    routes = {f"{method.upper()} {path}" for path, item in paths.items() for method in item}
    missing = {route for route in routes if f"`{route}`" not in README}
    assert missing == {"GET /v1/models/{model_id}", "GET /v1/requests/{request_id}"}  # as {id}


def test_every_parameter_is_in_the_readmes_table() -> None:
    """And says, if it is only taken at some values, or changes nothing."""
    columns: dict[str, list[set[str]]] = {}
    for row in re.findall(r"^\| `/.*", README, re.M):
        endpoints, *cells = (set(re.findall(r"`(\S+)`", cell)) for cell in row[1:-1].split("|"))
        for endpoint in endpoints:
            before = columns.get(endpoint, [set(), set(), set()])
            columns[endpoint] = [a | b for a, b in zip(before, cells, strict=True)]
    description = build_api({}).openapi()
    taken = {path: _parameters(description, path) for path in columns}
    assert columns == taken
    bodies = re.findall(r"\w+Request(?='})", repr(description["paths"]))
    tabled = re.findall(r"\w+Request(?='})", repr([description["paths"][p] for p in columns]))
    assert set(bodies) - {"SlotRequest"} == set(tabled)  # whose route has a row of its own


def _parameters(description: dict[str, Any], path: str) -> list[set[str]]:
    """Those that are honoured, those that may not ask for anything, those that change nothing."""
    (operation,) = description["paths"][path].values()
    found: list[set[str]] = [{one["name"] for one in operation.get("parameters", ())}, set(), set()]
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields = description["components"]["schemas"][schema.rpartition("/")[2]]["properties"]
        for name, field in fields.items():
            kind = ["At other values, refused.", "Changes nothing."]
            said = field.get("description")
            found[kind.index(said) + 1 if said in kind else 0].add(name)
    return found


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([\w-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_three_lines_serve_another_model() -> None:
    """What README says of `serve_config.yaml`: these lines in the place of those."""
    ours = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    lines = (ROOT / "serve_config.yaml").read_text().splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if "- id: corral-demo" in line)
    assert "builtin: true" in lines[start + 2]
    (block,) = re.findall(r"```yaml\n( +- id: .*?)```", README, re.S)
    assert block.count("\n") == 3
    changed = yaml.safe_load("".join([*lines[:start], block, *lines[start + 3 :]]))
    (model,) = config.parse(changed["applications"][0]["args"]).models
    assert model.id != "corral-demo"
    assert model.source.path is not None
    assert changed["applications"][0]["import_path"] == ours["applications"][0]["import_path"]
