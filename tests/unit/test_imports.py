"""The rooms of the product: what each may import, and how many lines it may have, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from serve_app.base.plugins import PLUGINS

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for top in ("serve_app", "loadtests", "tools") for path in (ROOT / top).rglob("*.py")
)
BUDGETS = {
    "base": 2629,
    "channel": 1387,
    "config": 1394,
    "kernels": 6778,
    "store": 1418,
    "prompt": 5899,
    "engine": 12_252,
    "server": 9835,
    "apis": 10_631,
    "run": 5115,
    "cluster": 1691,
    "cli": 3833,
    "plugins": 1571,
}
"""The rooms from left to right, and the most lines of Python that each may have. A module imports its own
room and rooms to its left. Raise a budget in the change that needs it, and say there what it buys."""
ROOMS = tuple(BUDGETS)
DOOR = "serve_app.app"
"""The module that configurations name. It is of the room `cluster`."""
TABLE_OF_PROTOCOLS = "serve_app.apis.api"

LIBRARIES = {
    "llama_cpp": ("kernels.llama",),
    "openvino": ("kernels.openvino", "plugins.stages"),
    "huggingface_hub": ("store",),
    "fsspec": ("store",),
    "fastapi": ("server", "apis", "run", "cluster"),
    "starlette": ("server", "apis", "run", "cluster"),
    "pydantic": ("channel", "config", "server", "apis", "cluster"),
    "ray": ("cluster", "plugins.batch"),
    "typer": ("cli", "plugins.batch"),
}
"""The only places that may import a library, below `serve_app`."""
PICKLES = ("pickle", "cloudpickle", "multiprocessing", "marshal", "shelve")
"""Modules whose messages run code where they are read. A process that a client has taken over could take
over the next one."""
PURE = (
    "core.scheduler",
    "core.sequence",
    "core.postprocessor",
    "core.text",
    "cache.slots",
    "costs.cost_model",
    "policy",
)
"""Parts of the engine that decide and do nothing else."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str) -> Iterator[str]:
    """Every module that the source imports, anywhere in it; `from a import b` gives a.b too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            if not node.level:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imports_of_all() -> dict[str, set[str]]:
    """What each module imports."""
    return {module_name(path): set(imports(path.read_text())) for path in SOURCES}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def offenders(importer: str, *forbidden: str) -> list[tuple[str, str]]:
    """(importer, import) for each forbidden import in a package."""
    return [
        (module, found)
        for module, names in imports_of_all().items()
        for found in sorted(names)
        if within(module, importer) and any(within(found, package) for package in forbidden)
    ]


def room(module: str) -> str | None:
    """The room of a module of the product; None for the package itself, and for other packages."""
    if within(module, DOOR):
        return "cluster"
    parts = module.split(".")
    return parts[1] if parts[0] == "serve_app" and len(parts) > 1 and parts[1] in ROOMS else None


@pytest.mark.parametrize("name", ROOMS)
def test_a_module_imports_its_room_and_rooms_to_its_left(name: str) -> None:
    allowed = ROOMS[: ROOMS.index(name) + 1]
    found = [
        (module, imported)
        for module, names in imports_of_all().items()
        for imported in sorted(names)
        if room(module) == name and room(imported) not in (*allowed, None)
    ]
    assert found == []
    assert any(room(module) == name for module in imports_of_all()), "the room is empty"


def test_every_module_is_in_a_room() -> None:
    homeless = {
        module for module in imports_of_all() if within(module, "serve_app") and not room(module)
    }
    assert homeless == {"serve_app"}


def test_a_protocol_imports_no_other_protocol() -> None:
    protocols = {
        module.split(".")[2]
        for module in imports_of_all()
        if within(module, "serve_app.apis") and module not in ("serve_app.apis", TABLE_OF_PROTOCOLS)
    }
    assert len(protocols) > 5, "the check found no protocols: it is broken"
    siblings = [
        pair
        for name in protocols
        for other in protocols - {name}
        for pair in offenders(f"serve_app.apis.{name}", f"serve_app.apis.{other}")
    ]
    assert siblings == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_is_imported_in_its_rooms_only(library: str) -> None:
    places = [f"serve_app.{place}" for place in LIBRARIES[library]]
    places += [DOOR] if "cluster" in LIBRARIES[library] else []
    users = {module for module, _ in offenders("serve_app", library)}
    assert {one for one in users if not any(within(one, place) for place in places)} == set()
    assert users, "the check found no import at all: it is broken"


def test_one_line_of_a_table_names_a_plugin() -> None:
    plugins = {name.removeprefix("serve_app.plugins.").split(".")[0] for name in PLUGINS.values()}
    assert plugins == {
        module.split(".")[2]
        for module in imports_of_all()
        if module.startswith("serve_app.plugins.")
    }
    outside = [
        (module, imported)
        for module, imported in offenders("serve_app", "serve_app.plugins")
        if room(module) != "plugins"
    ]
    assert outside == []


@pytest.mark.parametrize("name", ["channel", "engine", "store", "server", "apis", "run", "cluster"])
def test_no_message_between_processes_runs_code(name: str) -> None:
    assert offenders(f"serve_app.{name}", *PICKLES) == []


@pytest.mark.parametrize("name", PURE)
def test_pure_parts_of_the_engine_do_nothing_but_decide(name: str) -> None:
    module = f"serve_app.engine.{name}"
    assert any(within(one, module) for one in imports_of_all())
    assert offenders(module, "threading", "asyncio", "time") == []


def test_the_product_imports_nothing_beside_it() -> None:
    assert offenders("serve_app", "loadtests", "tests", "tools") == []


def test_the_core_of_the_engine_imports_no_guest_and_no_choice() -> None:
    core = "serve_app.engine.core"
    assert offenders(core, "serve_app.engine.guests", "serve_app.engine.choice") == []
    assert offenders(core, "serve_app.engine"), "the check found no import at all: it is broken"


def test_a_step_fits_on_a_screen() -> None:
    tree = ast.parse((ROOT / "serve_app/engine/core/engine_core.py").read_text())
    (step,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "step"
    )
    first = step.body[1]  # behind the docstring
    assert (step.end_lineno or 0) - first.lineno + 1 <= 15


def test_the_engine_knows_nothing_of_prompts_but_the_delimiters_of_answers() -> None:
    module = "serve_app.prompt.chat_template"
    assert offenders("serve_app.engine", "serve_app.prompt") == [
        (f"serve_app.engine.backends.{backend}", imported)
        for backend in ("llama_cpp", "openvino")
        for imported in (module, f"{module}.delimiters")
    ]


def test_nothing_names_a_tool_format_but_its_module() -> None:
    formats = "serve_app.prompt.tool_calls.formats"
    users = {
        (module, name.removeprefix(f"{formats}."))
        for module, names in imports_of_all().items()
        for name in names
        if name.startswith(f"{formats}.") and not module.startswith(formats)
    }
    assert users == {
        ("serve_app.prompt.tool_calls", name)
        for name in ("FORMATS", "detect", "generic", "generic.GENERIC", "markup", "markup.derive")
    }


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_keeps_its_budget_of_lines(name: str) -> None:
    paths = [path for path in SOURCES if room(module_name(path)) == name]
    n_lines = sum(len(path.read_text().splitlines()) for path in paths)
    assert n_lines <= BUDGETS[name], (
        f"{name} has {n_lines} lines. Raise its budget here if they are worth it, and say what they buy."
    )
    assert n_lines > BUDGETS[name] * 0.95, f"{name} has {n_lines} lines: lower its budget to that."


def test_loadtests_know_no_ray() -> None:
    assert (
        offenders("loadtests", "ray", "serve_app.cluster.ingress", "serve_app.cluster.replica")
        == []
    )


def test_imports_are_absolute() -> None:
    relative = [
        (module, found)
        for module, names in imports_of_all().items()
        for found in names
        if found.startswith(".")
    ]
    assert relative == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import ray.serve", ["ray.serve"]),
        ("from ray import serve", ["ray", "ray.serve"]),
        ("def f():\n    import ray", ["ray"]),
        ("if TYPE_CHECKING:\n    from ray import serve as s", ["ray", "ray.serve"]),
        ("from . import x", ["."]),
    ],
    ids=repr,
)
def test_reader_finds_imports(source: str, found: list[str]) -> None:
    assert sorted(set(imports(source))) == found
