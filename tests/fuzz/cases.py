"""Requests that nobody would think of, from the API's own description, to the API over a real engine."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.result import Ok
from schemathesis.python.asgi import shutdown_lifespans
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.config.schema import IngressConfig
from serve_app.engine import Engine, EngineOptions
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.server.model_registry import ServedModel
from serve_app.server.workers import wire
from serve_app.server.workers.wire import Piece
from tests.doubles.api import InProcess, build_api
from tools.local_client import LocalClient

CHECKED = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
N_CTX_SLOT = 64
Operation = APIOperation[Any, Any, Any, Any]
T = TypeVar("T")
PER_ROUND = 20
"""Cases that one search makes of one route."""


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


TEXT = st.text(st.characters(exclude_categories=()))
"""Halves of surrogate pairs, too."""
ODD = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, 0, -1, 1, 2**31, -(2**31), 2**63, 2**64, 10**400, -(10**400)),
            *(0.1, -0.0, 1e-320, 1e300, "", "\0", "\r\nX: 1", "../..", "%s%n{}", "\u202e"),
            *("\U0010ffff", "e\u0301" * 40, "a" * 5000, "<|im_end|>", "{{ 1/0 }}", "NaN"),
            *([], {}, [[]], [{}], [None], {"": None}, {"__class__": 1}, {"type": None}),
        ]
    ),
    st.sampled_from(
        [
            *(math.inf, math.nan, {"x": math.inf}, "\ud800", {"\udfff": ["\ud800"]}),
            *(_nested(depth) for depth in (60, 90, 110)),
        ]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
        lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
        max_leaves=6,
    ),
)
"""Values that break what is written for the usual ones."""


_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
_FUNCTION: dict[str, Any] = {"name": "f", "parameters": _SCHEMA}
_LLAMAS: list[dict[str, Any]] = [
    {"json_schema": _SCHEMA},
    {"regex": "a+"},
    {"grammar": 'root ::= "a"'},
]
_TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": _FUNCTION}]}
FULLER: dict[str, list[dict[str, Any]]] = {
    "ChatCompletionRequest": [_TOOLS, {"chat_template_kwargs": {"a": 1}}, *_LLAMAS],
    "CompletionRequest": [{"echo": True, "logprobs": 2, "max_tokens": 0}, *_LLAMAS],
    "LlamaCompletionRequest": [*_LLAMAS, {"logit_bias": [["a", 1]]}],
    "InfillRequest": _LLAMAS,
    "ResponsesRequest": [{"tools": [{"type": "function", **_FUNCTION}]}],
    "MessagesRequest": [
        {"tools": [{"name": "f", "input_schema": _SCHEMA}]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
    ],
}
"""By the name of a body's type: what most examples of it would lack."""


class _PackingWorkers(InProcess):
    """Packs each result as workers do: their messages have no room for some values."""

    async def run(self, client: str, work: Callable[..., T], *pieces: Piece, **files: Any) -> T:
        made = await super().run(client, work, *pieces, **files)
        reader = asyncio.StreamReader()
        reader.feed_data(wire.packed_outcome(wire.WorkResult(made)))
        outcome: Any = await wire.receive_outcome(reader, wire.result_type(work))
        return cast(T, outcome.value)


class _FromHere:
    """Makes all requests this machine's own, who may do what operators do."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(
            {**scope, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1)}, receive, send
        )


@contextmanager
def served(path: str | os.PathLike[str]) -> Iterator[FastAPI]:
    """The API over a real engine of this model, in this process."""
    engine = Engine.load(
        path, EngineOptions(n_slots=4, n_ctx_slot=N_CTX_SLOT, threads=1, profile_limit_s=0)
    )
    try:
        models = {"m": ServedModel("m", N_CTX_SLOT, Tokenizer(path), engine=LocalClient(engine))}
        app = build_api(models, IngressConfig(allowed_hosts=["*"]), _PackingWorkers(models))
        app.add_middleware(_FromHere)
        yield app
    finally:
        shutdown_lifespans()  # else the process waits at its end, where no thread is started any more
        engine.close(timeout_s=0)


def run(app: FastAPI, n_cases: int, seed_: int, limit_s: float) -> Counter[int]:
    """Try so many cases, or as many as there is time for. How many answers had which status; raises what
    hypothesis finds."""
    load_all_checks()
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    found = [one.ok() for one in schema.get_all_operations() if isinstance(one, Ok)]
    operations = [operation for operation in found if operation.path != "/v1/live"]  # has no end
    statuses: Counter[int] = Counter()
    deadline = time.monotonic() + limit_s
    number = seed_
    while True:
        for operation in operations:
            if statuses.total() >= n_cases or time.monotonic() > deadline:
                return statuses
            number += 1
            _try(operation, number, statuses)


def _try(operation: Operation, number: int, statuses: Counter[int]) -> None:
    checks: list[Any] = [*map(CHECKS.get_one, CHECKED), _not_a_failure]

    @seed(number)
    @settings(
        max_examples=PER_ROUND,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(_cases(operation))
    def search(case: Case[Any]) -> None:
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response, checks=checks)

    search()


def _not_a_failure(_context: Any, response: Any, _case: Any) -> None:
    """A server error is a failure, but for 501: the model cannot do that, as the description says. Pictures
    for a model that has no projector are refused with llama-server's 500."""
    is_refusal = response.status_code == 501 or _NO_PICTURES.search(response.text)
    assert response.status_code < 500 or is_refusal, response.text


_NO_PICTURES = re.compile(r'"(message|error)":"(Image|Audio|Video) input is not supported: ')


def _cases(operation: Operation) -> st.SearchStrategy[Case[Any]]:
    """By the route's schema, against it, and with odd values in it."""
    made = [operation.as_strategy(mode) for mode in GenerationMode]
    content = operation.definition.raw.get("requestBody", {}).get("content", {})
    if not content:
        return st.one_of(made)
    ((media_type, about),) = content.items()
    if "examples" not in about:
        return st.one_of(made)
    reference = about["schema"]["$ref"].rpartition("/")[2]
    names = sorted(operation.schema.raw_schema["components"]["schemas"][reference]["properties"])
    fuller = [
        about["examples"]["example"]["value"] | more for more in ({}, *FULLER.get(reference, ()))
    ]
    bodies = made[0].map(lambda case: case.body) | st.sampled_from(fuller)

    @st.composite
    def spoilt(draw: st.DrawFn) -> Case[Any]:
        body = copy.deepcopy(draw(bodies))
        if isinstance(body, dict):
            body.pop("model", None)  # so that more than the name is looked at
        for _ in range(draw(st.integers(0, 3))):
            where = draw(st.sampled_from(_containers(body) or [{}]))
            places: list[Any] = list(where) if isinstance(where, dict) else list(range(len(where)))
            place = draw(st.sampled_from(places)) if places else "x"
            if isinstance(where, dict):
                place = draw(st.just(place) | TEXT | st.sampled_from(names))
            if isinstance(where, dict) or places:
                where[place] = copy.deepcopy(draw(ODD))
        return operation.Case(body=_written(body), media_type=media_type)

    return st.one_of(*made, spoilt(), spoilt())


def _containers(value: Any) -> list[Any]:
    """The objects and lists in a value, itself among them."""
    found, left = [], [value]
    while left:
        one = left.pop()
        if isinstance(one, dict | list):
            found.append(one)
            left += one.values() if isinstance(one, dict) else one
    return found


def _written(body: Any) -> bytes:
    """As JSON, or nearly so: NaN, infinity and halves of surrogate pairs are written, too."""
    return json.dumps(body).encode()
