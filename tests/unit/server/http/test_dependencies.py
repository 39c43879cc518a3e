"""Routes name the functions that prepare their bodies, and workers import what these routes name."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter

import serve_app.apis
from serve_app.apis.api import WORKER_MODULES
from serve_app.apis.embeddings import preparation as embeddings
from serve_app.apis.openai import preparation as openai
from serve_app.server.http.dependencies import prepare_with, worker_modules


def test_workers_import_the_modules_of_what_routes_name_each_once() -> None:
    router = APIRouter()

    @router.post("/a")
    @router.post("/b")
    async def chat(body: Annotated[None, prepare_with(openai.chat)]) -> None: ...

    @router.get("/c")
    async def nothing() -> None: ...

    @router.post("/d")
    async def completion(
        one: Annotated[None, prepare_with(embeddings.rerank)],
        other: Annotated[None, prepare_with(openai.completion)],
    ) -> None: ...

    assert worker_modules([router]) == (openai.__name__, embeddings.__name__)


def test_answers_that_workers_write_are_functions_of_modules_that_they_have_imported() -> None:
    """The calls `bodies.work(module.function, ...)` in all routes."""
    functions = []
    for path in Path(serve_app.apis.__path__[0]).rglob("*.py"):
        relative = path.relative_to(Path(serve_app.apis.__path__[0])).with_suffix("")
        if "bodies.work(" not in path.read_text():
            continue
        routes = importlib.import_module(".".join(["serve_app.apis", *relative.parts]))
        for call in ast.walk(ast.parse(path.read_text())):
            match call:
                case ast.Call(
                    func=ast.Attribute(attr="work"),
                    args=[ast.Attribute(value=ast.Name(module), attr=function), *_],
                ):
                    if hasattr(routes, module):
                        functions.append(getattr(getattr(routes, module), function))
    assert len(functions) >= 4
    assert {function.__module__ for function in functions} <= set(WORKER_MODULES)
