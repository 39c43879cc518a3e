"""Requests that nobody would think of, from the API's own description, to the API over a real engine."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.result import Ok

from loadtests.bare_server import LocalClient
from serve_app.engine import Engine, EngineOptions
from serve_app.ingress.api import build_api
from serve_app.ingress.guard import Access
from serve_app.ingress.served import ServedModel
from serve_app.prompt.tokenizer import Tokenizer

CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
N_CTX_SLOT = 64
PER_ROUND = 20
"""Cases that one search makes of one route."""

ODD = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, 0, -1, 1, 2**31, -(2**31), 2**63, 2**64, 10**400, -(10**400)),
            *(0.1, -0.0, 1e-320, 1e300, math.inf, math.nan, "", "\ud800", "\0", "\r\nX: 1"),
            *("../..", "%s%n{}", "\u202e", "\U0010ffff", "e\u0301" * 40, "a" * 5000),
            *("<|im_end|>", "{{ 1/0 }}", "NaN", [], {}, [[]], [{}], [None], {"": None}),
            *({"__class__": 1}, {"type": None}),
        ]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=6,
    ),
)
"""Values that break what is written for the usual ones."""


@contextmanager
def served(path: str | os.PathLike[str]) -> Iterator[FastAPI]:
    """The API over a real engine of this model, in this process."""
    engine = Engine.load(
        path, EngineOptions(n_slots=4, n_ctx_slot=N_CTX_SLOT, threads=1, sweep_limit_s=0)
    )
    try:
        model = ServedModel("m", N_CTX_SLOT, Tokenizer(path), LocalClient(engine))
        yield build_api({"m": model}, Access(allow_anonymous=True))
    finally:
        engine.close(timeout_s=0)


def run(app: FastAPI, n_cases: int, seed_: int, limit_s: float) -> Counter[int]:
    """Try so many cases, or as many as there is time for. How many answers had which status; raises what
    hypothesis finds."""
    load_all_checks()
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    statuses: Counter[int] = Counter()
    deadline = time.monotonic() + limit_s
    number = seed_
    while True:
        for operation in operations:
            if statuses.total() >= n_cases or time.monotonic() > deadline:
                return statuses
            number += 1
            _try(operation, number, statuses)


def _try(operation: APIOperation[Any, Any, Any, Any], number: int, statuses: Counter[int]) -> None:
    checks: list[Any] = [CHECKS.get_one(name) for name in CHECKED]

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


def _cases(operation: APIOperation[Any, Any, Any, Any]) -> st.SearchStrategy[Case[Any]]:
    """By the route's schema, against it, and its example with odd values in some places."""
    made = [operation.as_strategy(mode) for mode in GenerationMode]
    content = operation.definition.raw.get("requestBody", {}).get("content", {})
    if not content:
        return st.one_of(made)
    (media_type,) = content
    example = content[media_type]["example"]
    reference = content[media_type]["schema"]["$ref"].rpartition("/")[2]
    names = sorted(operation.schema.raw_schema["components"]["schemas"][reference]["properties"])
    bodies = st.builds(
        lambda odd: example | odd, st.dictionaries(st.sampled_from(names), ODD, max_size=3)
    )
    return st.one_of(
        *made,
        *(strategy.map(_without_model) for strategy in made),
        bodies.map(lambda body: operation.Case(body=_written(body), media_type=media_type)),
    )


def _without_model(case: Case[Any]) -> Case[Any]:
    """So that more than the name is looked at."""
    if isinstance(case.body, dict):
        case.body.pop("model", None)
    return case


def _written(body: Any) -> bytes:
    """As JSON, or nearly so: NaN, infinity and halves of surrogate pairs are written, too."""
    return json.dumps(body).encode()
