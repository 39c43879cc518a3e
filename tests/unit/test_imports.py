"""Imports point down: who may import whom, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for top in ("serve_app", "loadtests", "tools") for path in (ROOT / top).rglob("*.py")
)
PURE = (
    "core.scheduler",
    "core.sequence",
    "core.postprocessor",
    "kv_cache.slots",
    "core.text",
    "policy",
    "autotune.cost_model",
    "choice.plan",
    "choice.rating",
    "autotune.traffic",
)


PICKLES = ("pickle", "cloudpickle", "multiprocessing", "marshal", "shelve")
"""Modules whose messages run code where they are read. A process that a client has taken over could take
over the next one."""


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


IMPORTS = {module_name(path): set(imports(path.read_text())) for path in SOURCES}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def offenders(importer: str, *forbidden: str) -> list[tuple[str, str]]:
    """(importer, import) for each forbidden import in a package."""
    return [
        (module, found)
        for module, names in IMPORTS.items()
        for found in sorted(names)
        if within(module, importer) and any(within(found, package) for package in forbidden)
    ]


@pytest.mark.parametrize(
    ("importer", "forbidden"),
    [
        ("serve_app.engine", ("ray", "fastapi", "starlette", "pydantic")),
        ("serve_app.kernels.llama", ("ray", "fastapi", "serve_app.engine", "serve_app.prompt")),
        ("serve_app.server", ("serve_app.engine",)),
        (
            "serve_app.channel",
            ("ray", "fastapi", "serve_app.engine", "serve_app.server", "serve_app.run.replica"),
        ),
        ("serve_app.prompt", ("serve_app.engine", "serve_app.server", "ray", "fastapi")),
        (
            "serve_app.cluster",
            ("serve_app.server", "serve_app.prompt", "serve_app.kernels.llama", "fastapi"),
        ),
        *(
            (
                f"serve_app.cluster.{name}",
                ("ray", "threading", "asyncio", "time", "serve_app.engine"),
            )
            for name in ("blocks", "score")
        ),
        ("serve_app.cluster.request_router", ("serve_app.engine",)),
        ("serve_app", ("loadtests", "tests", "tools")),
        *(
            (f"serve_app.{package}", PICKLES)
            for package in ("ingress", "replica", "channel", "routing", "engine", "store", "batch")
        ),
        *((f"serve_app.store.{name}", ("ray",)) for name in ("models", "remote", "folder", "hub")),
        ("serve_app.base.types", ("ray", "fastapi", "pydantic", "llama_cpp", "serve_app.engine")),
        *(
            (f"serve_app.{package}", ("serve_app.cli",))
            for package in ("engine", "ingress", "replica", "prompt", "routing", "config")
        ),
        ("serve_app.base.sampling", ("serve_app", "ray", "fastapi", "pydantic", "llama_cpp")),
        ("serve_app.base.errors", ("serve_app", "ray", "fastapi", "llama_cpp")),
        *((f"serve_app.engine.{name}", ("threading", "asyncio", "llama_cpp")) for name in PURE),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_package_does_not_import(importer: str, forbidden: tuple[str, ...]) -> None:
    assert offenders(importer, *forbidden) == []


INGRESS_CORE = tuple(
    f"serve_app.server.{name}" for name in ("http", "workers", "generation", "model_registry")
)
"""What a chat passes in every protocol. Protocols, media, batches and views are its guests."""


def in_ingress_core(module: str) -> bool:
    return any(within(module, package) for package in INGRESS_CORE)


def test_the_core_of_the_ingress_imports_no_guest_and_no_protocol() -> None:
    imported = [
        found for package in INGRESS_CORE for found in offenders(package, "serve_app.server")
    ]
    guests = [(core, guest) for core, guest in imported if not in_ingress_core(guest)]
    assert [(core, guest) for core, guest in guests if guest != "serve_app.server"] == []
    assert imported, "the check found no import at all: it is broken"


ENGINE_CORE = "serve_app.engine.core"
CORE_NEEDS = (
    "backends.base",
    "autotune.clocks",
    "autotune.cost_model",
    "autotune.sampling_costs",
    "kv_cache.manager",
    "kv_cache.packing",
    "kv_cache.slots",
    "health",
    "metrics",
    "options",
    "policy",
)
"""The modules beside the core of the engine that it is built on."""


def test_the_core_of_the_engine_imports_no_guest_and_no_protocol() -> None:
    needed = (ENGINE_CORE, *(f"serve_app.engine.{name}" for name in CORE_NEEDS))
    imported = offenders(ENGINE_CORE, "serve_app")
    beside = (
        "serve_app.base.types",
        "serve_app.base.errors",
        "serve_app.kernels.llama.grammars.constraint",
    )
    shared = (*beside, "serve_app.channel.score", "serve_app.base.sampling")
    assert [
        (module, name)
        for module, name in imported
        if not any(within(name, package) or within(package, name) for package in (*needed, *shared))
    ] == []
    assert imported, "the check found no import at all: it is broken"


def n_lines(*packages: str) -> int:
    paths = {path for path in SOURCES for one in packages if within(module_name(path), one)}
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_the_cores_can_be_read_in_two_days() -> None:
    assert 1000 < n_lines(ENGINE_CORE) < 4000
    assert 1000 < n_lines(*INGRESS_CORE) < 4200
    assert n_lines(ENGINE_CORE, *INGRESS_CORE) < 8000


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
        for module, names in IMPORTS.items()
        for name in names
        if name.startswith(f"{formats}.") and not module.startswith(formats)
    }
    assert users == {
        ("serve_app.prompt.tool_calls", name)
        for name in ("FORMATS", "detect", "generic", "generic.GENERIC", "markup", "markup.derived")
    }


def test_only_the_llama_package_imports_llama_cpp() -> None:
    users = {module for module, _ in offenders("serve_app", "llama_cpp")}
    assert {module for module in users if not within(module, "serve_app.kernels.llama")} == set()
    assert users, "the check found no import at all: it is broken"


def test_ray_is_known_in_few_places_only() -> None:
    assert {module for module, _ in offenders("serve_app", "ray")} == {
        "serve_app.app",
        "serve_app.cluster.deployments",
        "serve_app.cluster.serve_check",
        "serve_app.plugins.batch.__main__",
        "serve_app.plugins.batch.answerer",
        "serve_app.plugins.batch.parts",
        "serve_app.plugins.batch.run",
        "serve_app.base.metrics",
        "serve_app.cluster.replica",
        "serve_app.cluster.ingress",
        "serve_app.cluster.responses",
        "serve_app.cluster.autoscaling",
        "serve_app.cluster.request_router",
        "serve_app.cluster.serve_handle",
        "serve_app.cluster.one_machine",
        "serve_app.cluster.ray_values",
    }


def test_loadtests_use_the_engine_the_pure_part_of_routing_and_what_they_share_with_the_command() -> (
    None
):
    pure = ("blocks", "score")
    shared = ("serve_app.cluster", "serve_app.cli.measure")
    usable = ("serve_app.engine", *shared, *(f"serve_app.cluster.{name}" for name in pure))
    users = {
        module
        for module, found in offenders("loadtests", "serve_app")
        if not any(within(found, package) for package in usable) and found != "serve_app"
    }
    assert users == {
        "loadtests.hostile.search",  # which measures the routes and the engine from within
        "loadtests.tune.paged_passes",  # which runs passes at depths of its own
        "loadtests.engine.peers.genai",  # which compiles and keeps a model as Corral does
        "loadtests.tune.perplexity",  # which says what a backend cannot read
    }


def test_loadtests_know_no_ray() -> None:
    deployments = ("serve_app.cluster.replica", "serve_app.cluster.ingress")
    assert offenders("loadtests", "ray", *deployments) == []


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_exist(name: str) -> None:
    assert f"serve_app.engine.{name}" in IMPORTS


def test_imports_are_absolute() -> None:
    relative = [
        (module, found)
        for module, names in IMPORTS.items()
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
