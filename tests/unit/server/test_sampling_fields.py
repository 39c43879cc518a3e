"""Every sampling parameter goes from every API that has it to the engine, and back to who asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from annotated_types import Interval, MaxLen

from serve_app.base.sampling import CHAIN, PARAMETERS, Api, Bounds, Parameter
from tests.unit.server.harness import ScriptedEngine

TURN = {"role": "user", "content": "x"}
ENDPOINTS: dict[str, tuple[Api, dict[str, Any]]] = {
    "/v1/completions": (Api.OPENAI, {"prompt": "x"}),
    "/v1/chat/completions": (Api.OPENAI, {"messages": [TURN]}),
    "/completion": (Api.OPENAI, {"prompt": "x"}),
    "/infill": (Api.OPENAI, {"input_prefix": "x", "input_suffix": "x"}),
    "/v1/responses": (Api.RESPONSES, {"input": "x"}),
    "/v1/messages": (Api.ANTHROPIC, {"messages": [TURN], "max_tokens": 5}),
}
TAKEN = [
    pytest.param(path, one, id=f"{path}-{one.name}")
    for path, (api, _) in ENDPOINTS.items()
    for one in PARAMETERS
    if api in one.apis
]


def another(parameter: Parameter) -> Any:
    """A value that is not the default."""
    if parameter.name == "mirostat":
        return 2
    of_types = {float: 0.25, int: 3, int | None: 3, bool: not parameter.default}
    return of_types.get(parameter.type, ["x"])


def ends(bounds: Bounds | None) -> Iterator[tuple[Any, Any]]:
    """The last value inside of each bound, and the first one outside."""
    if isinstance(bounds, MaxLen):
        yield ["x"] * bounds.max_length, ["x"] * (bounds.max_length + 1)
    if not isinstance(bounds, Interval):
        return
    for inside, step in ((bounds.ge, -1), (bounds.le, 1)):
        if isinstance(inside, int | float):
            yield inside, inside + step
    if isinstance(bounds.gt, int | float):
        yield bounds.gt + 1, bounds.gt
    if isinstance(bounds.lt, int | float):
        yield bounds.lt - 1, bounds.lt


def asked(path: str, parameter: Parameter, value: Any) -> dict[str, Any]:
    api, body = ENDPOINTS[path]
    return body | {parameter.name_in(api): value}


@pytest.mark.parametrize(("path", "parameter"), TAKEN)
async def test_what_is_asked_reaches_the_engine_and_null_leaves_the_default(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, parameter: Parameter
) -> None:
    value = another(parameter)
    for sent in (value, None):
        await client.post(path, json=asked(path, parameter, sent))
    changed, default = (getattr(request.sampling, parameter.name) for request in engine.requests)
    assert changed == (tuple(value) if isinstance(value, list) else value)
    assert default == parameter.default != changed


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        pytest.param(path, one, id=f"{path}-{one.name}")
        for path in ("/v1/completions", "/v1/responses", "/v1/messages")
        for one in PARAMETERS
        if (api := ENDPOINTS[path][0]) in one.apis and [*ends(one.apis[api].bounds)]
    ],
)
async def test_bounds(client: httpx.AsyncClient, path: str, parameter: Parameter) -> None:
    """Each of the three APIs has its own."""
    api, _ = ENDPOINTS[path]
    for inside, outside in ends(parameter.apis[api].bounds):
        taken = await client.post(path, json=asked(path, parameter, inside))
        refused = await client.post(path, json=asked(path, parameter, outside))
        assert (taken.status_code, refused.status_code) == (200, 400)
        assert parameter.name_in(api) in refused.text


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda one: one.name)
async def test_llama_server_tells_it(client: httpx.AsyncClient, parameter: Parameter) -> None:
    value = another(parameter)
    answer = await client.post("/completion", json=asked("/completion", parameter, value))
    assert answer.json()["generation_settings"][parameter.name] == value
    settings = (await client.get("/props")).json()["default_generation_settings"]["params"]
    default = -1 if parameter.default is None else parameter.default
    assert settings[parameter.name] == (list(default) if isinstance(default, tuple) else default)


async def test_a_response_tells_what_it_was_made_with(client: httpx.AsyncClient) -> None:
    taken = [one for one in PARAMETERS if Api.RESPONSES in one.apis]
    given = {one.name_in(Api.RESPONSES): another(one) for one in taken}
    body = (await client.post("/v1/responses", json={"input": "x", **given})).json()
    assert len(given) >= 2
    assert {name: body[name] for name in given} == given


@pytest.mark.parametrize(
    ("samplers", "used"),
    [
        ("kpt", ("top_k", "top_p", "temperature")),
        ("edskypmxt", CHAIN),
        ("t?tk", ("temperature", "temperature", "top_k")),
        (["top-k", "typical", "temp", "nobody"], ("top_k", "typ_p", "temperature")),
        ([], ()),
    ],
)
async def test_samplers_by_names_and_by_letters(
    client: httpx.AsyncClient, engine: ScriptedEngine, samplers: Any, used: tuple[str, ...]
) -> None:
    answer = await client.post("/completion", json={"prompt": "x", "samplers": samplers})
    assert engine.requests[0].sampling.samplers == used
    assert answer.json()["generation_settings"]["samplers"] == list(used)
