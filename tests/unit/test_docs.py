"""README, docs/ and ARCHITECTURE say what the code says."""

from __future__ import annotations

import ast
import inspect
import re
import tokenize
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from serve_app.base.errors import ConfigError, CorralError
from serve_app.config.removed import REMOVED
from serve_app.config.schema import DefaultsConfig, EngineConfig, IngressConfig, ModelConfig, parse
from serve_app.config.sources import DownloadsConfig, ModelSource
from serve_app.engine.metrics.stats import EngineStats
from serve_app.prompt.tool_calls import FORMATS
from serve_app.server.access.api_keys import KeyFile
from tests.documents import configuration, pages, parameters
from tests.doubles.api import build_api

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {
    path.relative_to(ROOT): path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / ".github").rglob("*.md"),
    )
}
DOCS = "\n".join(PAGES.values())
"""What must be documented may be on any page."""
PARAMETERS = PAGES[Path("docs/api/parameters.md")]


def errors(base: type[CorralError] = CorralError) -> list[type[CorralError]]:
    return [base, *(error for sub in base.__subclasses__() for error in errors(sub))]


@pytest.mark.parametrize(
    ("section", "prefix"),
    [
        (ModelConfig, ""),
        (ModelSource, "source."),
        (DownloadsConfig, "downloads."),
        (EngineConfig, "engine."),
        (IngressConfig, "ingress."),
    ],
)
def test_every_field_is_in_a_table(section: type[BaseModel], prefix: str) -> None:
    names = set(section.model_fields) - {"source", "engine"}
    assert [n for n in names if not re.search(rf"^\|.*`{prefix}{n}`", DOCS, re.M)] == []


def test_every_field_that_a_page_names_exists() -> None:
    sections: dict[str, type[BaseModel]] = {
        "engine": EngineConfig,
        "ingress": IngressConfig,
        "defaults": DefaultsConfig,
        "downloads": DownloadsConfig,
    }
    named = set(re.findall(rf"`({'|'.join(sections)})\.(\w+)(?=[`:.])", DOCS))
    assert len(named) > 50
    removed = {path.removeprefix("models.") for path in REMOVED}
    assert [
        f"{name}.{field}"
        for name, field in named
        if field not in sections[name].model_fields and f"{name}.{field}" not in removed
    ] == []


@pytest.mark.parametrize("section", [section for section, _ in configuration.SECTIONS.values()])
def test_every_field_says_what_it_is(section: type[BaseModel]) -> None:
    bare = [name for name, field in section.model_fields.items() if not field.description]
    assert bare == []


@pytest.mark.parametrize(
    "error", [e for e in errors() if e.code is not None and e is not ConfigError]
)
def test_every_error_code_is_documented(error: type[CorralError]) -> None:
    assert re.search(rf"^\| {error.status} \| `{error.code}` \|", DOCS, re.M)


MODULES = sorted(
    path.relative_to(ROOT)
    for folder in ("serve_app", "cluster", "loadtests", "tools", "tests")
    for path in (ROOT / folder).rglob("*.py")
)


BLANK = (tokenize.COMMENT, tokenize.NL)
"""What may stand before the docstring of a module."""


def test_every_module_says_in_one_line_what_it_is() -> None:
    def is_told(module: Path) -> bool:
        with (ROOT / module).open() as file:
            tokens = (
                one for one in tokenize.generate_tokens(file.readline) if one.type not in BLANK
            )
            begins = next(tokens)
        docstring = ast.literal_eval(begins.string) if begins.type == tokenize.STRING else ""
        first, *rest = inspect.cleandoc(docstring).splitlines() or [""]
        return bool(first) and not any(rest[:1])

    assert [module for module in MODULES if not is_told(module)] == []


MOST_FILES = 14
"""A dozen, and the odd one more."""


@pytest.mark.parametrize("top", ["serve_app", "cluster", "loadtests", "tools"])
def test_no_folder_is_crowded(top: str) -> None:
    counts = Counter(module.parent for module in MODULES if module.parts[0] == top)
    counts.update(path.parent.relative_to(ROOT) for path in (ROOT / top).rglob("*.js"))
    assert [folder for folder, n in counts.items() if n > MOST_FILES] == []


def test_every_tool_format_is_documented() -> None:
    (table,) = re.findall(r"^\| format \| models \|\n((?:\|.*\n)+)", DOCS, re.M)
    names = re.findall(r"^\| `([\w-]+)` \|", table, re.M)
    assert sorted(names) == sorted(form.name for form in FORMATS)


NAMED = sorted(
    folder
    for folder in {module.parent for module in MODULES}
    if len(folder.parts) == 2 or (folder.parts[0] == "serve_app" and len(folder.parts) == 3)
    if folder.parts[0] in ("serve_app", "loadtests", "tools")
)


@pytest.mark.parametrize("folder", NAMED, ids=str)
def test_the_architecture_names_every_folder(folder: Path) -> None:
    """By its path from the root, or by its name where its parent is said."""
    text = PAGES[Path("ARCHITECTURE.md")]
    assert f"`{folder}/" in text or f"`{folder.name}/`" in text


def test_the_sites_navigation_has_every_page_once() -> None:
    text = (ROOT / "docs/.site/mkdocs.yml").read_text()
    named = re.findall(r"^ +- (?:\w+: )?([\w/-]+\.md)$", text, re.M)
    elsewhere = {"readme.md", "architecture.md", "contributing.md", "security-policy.md"}
    there = {str(page.relative_to("docs")) for page in PAGES if page.parts[0] == "docs"}
    there = {name.replace(".site", "api") for name in there}
    assert sorted(named) == sorted(there | elsewhere)


def test_paths_in_the_documents_exist() -> None:
    for page, text in PAGES.items():
        for name in re.findall(
            r"`((?:serve_app|loadtests|cluster|tools|tests|docs)/[\w./]*)`", text
        ):
            assert (ROOT / name).exists(), f"{page}: {name}"


def test_modules_in_the_documents_exist() -> None:
    """By their whole path, or by its end."""
    ends = {"/".join(path.parts[i:]) for path in MODULES for i in range(len(path.parts))}
    others = {"convert_lora_to_gguf.py", "ray/serve/_private/haproxy_templates.py"}
    for page, text in PAGES.items():
        missing = set(re.findall(r"`([\w./]+\.py)`", text)) - ends - others
        assert missing == set(), page


def test_links_between_the_documents_lead_somewhere() -> None:
    """To files that exist, and to headings that these have."""
    for page, text in PAGES.items():
        for target, _, heading in (
            link.partition("#")
            for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", _without_code(text))
        ):
            path = (ROOT / page.parent / target).resolve() if target else ROOT / page
            assert path.exists(), f"{page}: {target}"
            if heading:
                headings = re.findall(r"^#+ (.*)", _without_code(path.read_text()), re.M)
                assert heading in map(_anchor, headings), f"{page}: {target}#{heading}"


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_documents_configuration_is_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS, re.S)
    found = [block for block in blocks if block.lstrip().startswith("models:")]
    (keys,) = re.findall(r"```yaml\n(keys:.*?)```", PAGES[Path("docs/security.md")], re.S)
    assert KeyFile.model_validate(yaml.safe_load(keys)).keys[0].tokens_per_minute == 60000
    parsed = [parse(yaml.safe_load(models)) for models in found]
    names = [[model.id for model in one.models] for one in parsed]
    expected = [
        ["llama-70b"],
        ["qwen3-0.6b"],
        ["qwen3-0.6b", "qwen3-4b"],
        ["qwen3-4b", "qwen3-4b-2507"],
    ]
    assert sorted(names) == expected


def test_every_route_is_documented() -> None:
    paths = build_api({}).openapi()["paths"]
    routes = {f"{method.upper()} {path}" for path, item in paths.items() for method in item}
    missing = {route for route in routes if f"`{route}`" not in DOCS}
    assert missing == {"GET /v1/models/{model_id}", "GET /v1/requests/{request_id}"}  # as {id}


_IN_ROWS = {"SlotRequest", "ModelRequest"}


def test_every_parameter_is_in_the_table() -> None:
    """And says, if it is only taken at some values, or changes nothing."""
    columns: dict[str, list[set[str]]] = {}
    for row in re.findall(r"^\| `/.*", PARAMETERS, re.M):
        endpoints, *cells = (set(re.findall(r"`(\S+)`", cell)) for cell in row[1:-1].split("|"))
        for endpoint in endpoints:
            before = columns.get(endpoint, [set(), set(), set(), set()])
            columns[endpoint] = [a | b for a, b in zip(before, cells, strict=True)]
    for endpoint, names in _sampling_parameters().items():
        columns[endpoint][0] |= names
    description = build_api({}).openapi()
    taken = {path: _parameters(description, path) for path in columns}
    assert columns == taken
    bodies = re.findall(r"\w+Request(?='})", repr(description["paths"]))
    tabled = re.findall(r"\w+Request(?='})", repr([description["paths"][p] for p in columns]))
    assert set(bodies) - _IN_ROWS == set(tabled)  # their routes have rows


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.stem)
def test_made_tables_are_as_they_would_be_made_now(page: Path) -> None:
    """`make reference` writes them."""
    assert pages.rewritten(page) == page.read_text()


def _sampling_parameters() -> dict[str, set[str]]:
    """What the table says of the endpoints' sampling parameters."""
    everywhere = ("/v1/completions", "/v1/chat/completions", "/completion", "/infill")
    found: dict[str, set[str]] = {}
    for row in re.findall(r"^\| `.*", parameters.table(), re.M):
        name, _, _, elsewhere, _ = (cell.strip(" `") for cell in row[1:-1].split("|"))
        for endpoint in everywhere:
            found.setdefault(endpoint, set()).add(name)
        for endpoint, other in re.findall(r"(/[\w/]+)(?:` as `(\w+))?", elsewhere):
            found.setdefault(endpoint, set()).add(other or name)
    return found


def _parameters(description: dict[str, Any], path: str) -> list[set[str]]:
    """Those that are honoured, refused, ignored, and those that change nothing."""
    operations = description["paths"][path]
    operation = operations["post"] if "post" in operations else operations["get"]
    honoured = {one["name"] for one in operation.get("parameters", ())}
    found: list[set[str]] = [honoured, set(), set(), set()]
    if "requestBody" in operation:
        ((_, content),) = operation["requestBody"]["content"].items()
        schemas = description["components"]["schemas"]
        parts = content["schema"].get("anyOf", [content["schema"]])
        forms = [schemas.get(part.get("$ref", "").rpartition("/")[2], part) for part in parts]
        of_chats = schemas["ChatCompletionRequest"]["properties"].items() if parts[1:] else ()
        fields = [one for form in forms for one in form["properties"].items()]
        for name, field in (one for one in fields if one not in of_chats):
            kind = ["At other values, refused.", "At other values, ignored.", "Changes nothing."]
            said = field.get("description")
            found[kind.index(said) + 1 if said in kind else 0].add(name)
    return found


def test_make_targets_of_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([\w-]+)", DOCS, re.M):
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
    (model,) = parse(changed["applications"][0]["args"]).models
    assert model.id != "corral-demo"
    assert model.source.path is not None
    assert changed["applications"][0]["import_path"] == ours["applications"][0]["import_path"]


def test_the_table_of_statistics_has_every_figure() -> None:
    """Each group of an engine's statistics is a row of the table in docs/api/index.md."""
    page = PAGES[Path("docs/api/index.md")]
    for group in fields(EngineStats(1, 1, 1)):
        figures = getattr(EngineStats(1, 1, 1), group.name)
        if is_dataclass(figures):
            (row,) = [line for line in page.splitlines() if line.startswith(f"| `{group.name}` |")]
            assert re.findall(r"`(\w+)`", row)[1:] == [figure.name for figure in fields(figures)]
