"""Responses that are kept: over a scripted engine, by one ingress or several."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI
from openai.types.responses import Response, ResponseItemList

from serve_app.apis.responses import background, store
from serve_app.apis.responses.background import BackgroundResponses
from serve_app.apis.responses.store import Event, LogAppend, Store
from serve_app.base.errors import DecodeError, QueueFullError
from serve_app.base.values.answers import TokenDelta
from serve_app.config.schema import IngressConfig
from serve_app.server.access.turnstile import OpenRequests
from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tests.unit.server.harness import HELLO, N_CTX_SLOT, ByteTokenizer, ScriptedEngine, named_events

KEYS = {name: f"secret-of-{name}-0123456789" for name in ("ann", "bob")}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Ingress:
    """One of those that share a store."""

    def __init__(self, shared: Store, engine: ScriptedEngine, access: IngressConfig) -> None:
        tokenizer: Any = ByteTokenizer()
        models = {"m": ServedModel("m", N_CTX_SLOT, tokenizer, engine=engine)}
        self.open = OpenRequests(100)
        self.app: FastAPI = build_api(models, access, open_requests=self.open, store=shared)
        self.responses: BackgroundResponses = self.app.state.responses

    def client(self, name: str = "ann") -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://127.0.0.1",
            headers={"Authorization": f"Bearer {KEYS[name]}"},
        )

    def die(self) -> None:
        """As a process does: nothing is told to anybody."""
        for response in self.responses._responses.values():
            response.task.cancel()
        assert self.responses._telling is not None
        self.responses._telling.cancel()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shared(clock: Clock) -> Store:
    return Store(clock)


@pytest.fixture
def access(tmp_path: Path) -> IngressConfig:
    keys = [{"name": name, "key": key, "max_concurrent_requests": 2} for name, key in KEYS.items()]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
    return IngressConfig(api_key_file=tmp_path / "keys.yaml")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "TELL_S", 0.001)


@pytest.fixture
async def ingresses(
    shared: Store, access: IngressConfig
) -> AsyncIterator[Callable[[ScriptedEngine], Ingress]]:
    made: list[Ingress] = []

    def make(engine: ScriptedEngine) -> Ingress:
        made.append(Ingress(shared, engine, access))
        return made[-1]

    yield make
    for one in made:
        tasks = [response.task for response in one.responses._responses.values()]
        tasks += [one.responses._telling] if one.responses._telling is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def first(ingresses: Callable[[ScriptedEngine], Ingress], engine: ScriptedEngine) -> Ingress:
    return ingresses(engine)


@pytest.fixture
def second(ingresses: Callable[[ScriptedEngine], Ingress], engine: ScriptedEngine) -> Ingress:
    return ingresses(engine)


async def posted(ingress: Ingress, name: str = "ann", **fields: Any) -> Any:
    async with ingress.client(name) as client:
        answer = await client.post("/v1/responses", json={"input": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def got(ingress: Ingress, path: str, name: str = "ann", **query: Any) -> httpx.Response:
    async with ingress.client(name) as client:
        return await client.get(f"/v1/responses/{path}", params=query)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def ended(ingress: Ingress, response_id: str) -> Any:
    """The response, when it has."""
    async with asyncio.timeout(20):
        while True:
            body = (await got(ingress, response_id)).json()
            if body["status"] not in ("queued", "in_progress"):
                return body
            await asyncio.sleep(0.002)


async def test_a_long_conversation_is_read_again_as_it_came(
    first: Ingress, second: Ingress
) -> None:
    """Two inputs together have more lists than one request may have, and numbers of any size."""
    unknown: dict[str, Any] = {"type": "unknown", "x": [[]] * 130_000 + [2**70]}
    asked = [{"role": "user", "content": "Hi"}, unknown]
    response_id = None
    for ingress in (first, second):
        body = await posted(ingress, input=asked, previous_response_id=response_id)
        response_id = body["id"]
    page = (await got(first, f"{response_id}/input_items")).json()
    assert [item["x"] for item in page["data"] if "x" in item] == [unknown["x"]] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_found_again_by_any_ingress(
    first: Ingress, second: Ingress, stream: bool
) -> None:
    if stream:
        async with first.client() as client:
            asked = {"input": "Hi", "stream": True, "metadata": {"a": "b"}}
            events = named_events(await client.post("/v1/responses", json=asked))
        body = events[-1]["response"]
    else:
        body = await posted(first, metadata={"a": "b"})
    for ingress in (first, second):
        found = (await got(ingress, body["id"])).json()
        assert found == body
        Response.model_validate(found)


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
async def test_what_is_still_on_its_way_to_the_store_can_be_read_and_deleted(
    first: Ingress, shared: Store, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """And its items can be referred to."""
    monkeypatch.setattr(background, "PUT_S", 0.0)
    answered, put = asyncio.Event(), shared.put

    async def waits(*arguments: Any) -> None:
        await answered.wait()
        await put(*arguments)

    monkeypatch.setattr(shared, "put", waits)
    body = await posted(first)
    async with first.client() as client:
        path, asked = f"/v1/responses/{body['id']}", None
        if method == "POST":
            path, asked = "/v1/responses/input_tokens", {"input": refer(body["output"][0]["id"])}
        asking = asyncio.create_task(client.request(method, path, json=asked))
        await asyncio.sleep(0.01)
        assert not asking.done()
        answered.set()
        assert (await asking).status_code == 200
    assert (await got(first, body["id"])).status_code == (404 if method == "DELETE" else 200)
    assert len(shared) == (0 if method == "DELETE" else 1)


async def test_store_false_keeps_nothing(first: Ingress, shared: Store) -> None:
    body = await posted(first, store=False)
    assert (body["store"], len(shared)) == (False, 0)
    answer = await got(first, body["id"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


async def test_another_key_finds_nothing(first: Ingress, engine: ScriptedEngine) -> None:
    body = await posted(first)
    path = f"/v1/responses/{body['id']}"
    async with first.client("bob") as bob:
        asked = {"input": "x", "previous_response_id": body["id"]}
        refused = [
            await bob.get(path),
            await bob.get(path, params={"stream": True}),
            await bob.get(f"{path}/input_items"),
            await bob.post(f"{path}/cancel"),
            await bob.delete(path),
        ]
        assert [answer.status_code for answer in refused] == [404] * 5
        answer = await bob.post("/v1/responses", json=asked)
        assert answer.json()["error"]["code"] == "previous_response_not_found"
        assert answer.json()["error"]["param"] == "previous_response_id"
    assert len(engine.requests) == 1
    assert (await got(first, body["id"])).status_code == 200


async def test_going_on_from_a_response(
    first: Ingress, second: Ingress, engine: ScriptedEngine
) -> None:
    one = await posted(first, input="A", instructions="not told again")
    two = await posted(second, input="B", previous_response_id=one["id"])
    assert two["previous_response_id"] == one["id"]
    assert bytes(engine.requests[1].prompt) == b"user:A|assistant:Hello|user:B"
    async with first.client() as client:
        assert (await client.delete(f"/v1/responses/{one['id']}")).json() == {
            "id": one["id"],
            "object": "response",
            "deleted": True,
        }
        path = "/v1/responses/input_tokens"
        asked = {"input": "C", "previous_response_id": two["id"], "what": 1}
        counted = await client.post(path, json=asked)
    assert counted.headers["x-corral-ignored"] == "what"
    await posted(first, input="C", previous_response_id=two["id"])
    prompt = engine.requests[2].prompt
    assert bytes(prompt) == b"user:A|assistant:Hello|user:B|assistant:Hello|user:C"
    assert counted.json()["input_tokens"] == len(prompt)


async def test_a_call_and_its_output_over_responses(first: Ingress, engine: ScriptedEngine) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    engine.scripts = [[TokenDelta(call, (1,)), HELLO[-1]]]
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    one = await posted(first, input="Go", tools=tools)
    (asked, _) = one["output"]
    output = {"type": "function_call_output", "call_id": asked["call_id"], "output": "7"}
    await posted(first, input=[output], previous_response_id=one["id"])
    assert bytes(engine.requests[1].prompt) == b"user:Go|assistant:f{'x': 1}|assistant:lo|tool:7"


def refer(*item_ids: str) -> list[dict[str, str]]:
    return [{"type": "item_reference", "id": item_id} for item_id in item_ids]


async def refused(ingress: Ingress, name: str = "ann", **fields: Any) -> tuple[int, Any]:
    async with ingress.client(name) as client:
        answer = await client.post("/v1/responses", json={"input": "Hi", **fields})
    return answer.status_code, answer.json()["error"]


def not_found(item_id: str, more: str = "") -> tuple[int, Any]:
    message = f"Item with id '{item_id}' not found.{more}"
    error = {"message": message, "type": "invalid_request_error", "param": "input", "code": None}
    return 404, error


async def test_items_are_referred_to(
    first: Ingress, second: Ingress, engine: ScriptedEngine
) -> None:
    """As `@ai-sdk/openai` 4.0.118 does by default. A later response has its own copy of each."""
    one = await posted(first, input="A")
    page = (await got(first, f"{one['id']}/input_items")).json()
    asked, (said,) = page["data"][0]["id"], one["output"]
    items = [*refer(asked), {"id": said["id"]}, {"role": "user", "content": "B"}]
    two = await posted(second, input=items)
    behind = await posted(second, input="B", previous_response_id=one["id"])
    assert engine.requests[1].prompt == engine.requests[2].prompt
    assert behind["usage"] == two["usage"]
    page = (await got(first, f"{two['id']}/input_items", order="asc")).json()
    assert [item["id"] for item in page["data"][:2]] == [asked, said["id"]]
    async with first.client() as client:
        for body in (one, behind):
            await client.delete(f"/v1/responses/{body['id']}")
        counted = await client.post(
            "/v1/responses/input_tokens", json={"input": refer(asked, said["id"])}
        )
    assert counted.status_code == 200
    ids = [item["id"] for item in page["data"]]
    await posted(first, input=[*refer(*ids), {"role": "user", "content": "C"}])
    assert bytes(engine.requests[3].prompt) == b"user:A|assistant:Hello|user:B|user:C"


async def test_items_of_a_call_are_referred_to(first: Ingress, engine: ScriptedEngine) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    engine.scripts = [[TokenDelta(call, (1,)), HELLO[-1]]]
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    one = await posted(first, input="Go", tools=tools)
    output = {"type": "function_call_output", "call_id": one["output"][0]["call_id"], "output": "7"}
    ids = [item["id"] for item in one["output"]]
    user = {"role": "user", "content": "Go"}
    await posted(first, input=[user, *refer(*ids), output])
    await posted(first, input=[output], previous_response_id=one["id"])
    assert engine.requests[1].prompt == engine.requests[2].prompt


async def test_items_that_are_not_there_for_a_client(
    first: Ingress, engine: ScriptedEngine
) -> None:
    """In OpenAI's words."""
    (said,) = (await posted(first, input="A"))["output"]
    kind, _, number = said["id"].partition("_")
    others = [f"{kind}_{int(number, 16) + 1:032x}", f"rs_{number}", "msg_1", number[:24], "x" * 128]
    for item_id in others:
        for ids in ((said["id"], item_id), (item_id, said["id"])):
            assert await refused(first, input=refer(*ids)) == not_found(item_id)
    assert await refused(first, "bob", input=refer(said["id"])) == not_found(said["id"])
    more = (
        " Items are not persisted when `store` is set to false. Try again with `store` set to true, "
        "or remove this item from your input."
    )
    assert await refused(first, input=refer("rs_1"), store=False) == not_found("rs_1", more)
    (unsaid,) = (await posted(first, store=False))["output"]
    assert await refused(first, input=refer(unsaid["id"])) == not_found(unsaid["id"])
    assert len(engine.requests) == 2
    await posted(first, input=refer(said["id"]), store=False)


async def test_an_item_comes_once(first: Ingress) -> None:
    one = await posted(first, input="A")
    item_id = one["output"][0]["id"]
    for fields in (
        {"input": refer(item_id, item_id)},
        {"input": refer(item_id), "previous_response_id": one["id"]},
    ):
        status, error = await refused(first, **fields)
        assert (status, error["param"]) == (400, "input")
        assert error["message"].startswith(f"Duplicate item found with id {item_id}.")


async def test_an_item_that_is_being_made_is_not_there(
    first: Ingress, engine: ScriptedEngine
) -> None:
    held = asyncio.Event()
    engine.scripts = [[HELLO[0], held, *HELLO[1:]]]
    body = await posted(first, background=True, input="A")
    output: list[Any] = []
    async with asyncio.timeout(20):
        while not output:
            output = (await got(first, body["id"])).json()["output"]
    item_id = output[0]["id"]
    assert await refused(first, input=refer(item_id)) == not_found(item_id)
    page = (await got(first, f"{body['id']}/input_items")).json()
    await posted(first, input=refer(page["data"][0]["id"]))
    held.set()
    await ended(first, body["id"])
    await posted(first, input=refer(item_id))


async def test_ids_of_clients_name_nothing(first: Ingress) -> None:
    """Else who names an item as another client's would be read in its place."""
    foreign = {"type": "of_the_future", "id": "item_1", "text": "A"}
    await posted(first, input=[foreign, {"role": "user", "content": "A", "id": "msg_1"}])
    for item_id in ("item_1", "msg_1"):
        assert await refused(first, input=refer(item_id)) == not_found(item_id)


async def test_input_items(first: Ingress, second: Ingress) -> None:
    one = await posted(first, input="A")
    two = await posted(first, input="B", previous_response_id=one["id"])
    path = f"{two['id']}/input_items"
    page = (await got(second, path, order="asc")).json()
    ResponseItemList.model_validate(page)
    assert [(i["role"], i["content"][0]["text"]) for i in page["data"]] == [
        ("user", "A"),
        ("assistant", "Hello"),
        ("user", "B"),
    ]
    ids = [item["id"] for item in page["data"]]
    assert ids[1] == one["output"][0]["id"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[0], ids[2], False)
    newest = (await got(second, path, limit=1)).json()
    assert ([item["id"] for item in newest["data"]], newest["has_more"]) == ([ids[2]], True)
    rest = (await got(second, path, after=ids[2])).json()
    assert [item["id"] for item in rest["data"]] == [ids[1], ids[0]]


async def test_events_are_told_again_from_any_place(first: Ingress, second: Ingress) -> None:
    async with first.client() as client:
        asked = {"input": "Hi", "stream": True}
        events = named_events(await client.post("/v1/responses", json=asked))
    response_id = events[0]["response"]["id"]
    for ingress in (first, second):
        again = named_events(await got(ingress, response_id, stream=True))
        assert again == events
        some = named_events(await got(ingress, response_id, stream=True, starting_after=4))
        assert some == events[5:]


def check_waits(events: list[dict[str, Any]]) -> None:
    """Check that a stream waited, that its events have numbers without gaps, and that all came."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert sum(event["type"] == "response.in_progress" for event in events) > 3
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello"


async def test_the_waits_of_a_stream_are_told_again(
    first: Ingress, second: Ingress, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on behind an event finds what follows it, by the same numbers."""
    held, waits = asyncio.Event(), itertools.count()
    engine.scripts = [[HELLO[0], held, *HELLO[1:]]]
    first.app.state.sse_ping_interval_s = 0.001
    wait = Event.wait

    def counted() -> Event:
        if next(waits) > 3:
            held.set()
        return wait()

    monkeypatch.setattr(Event, "wait", counted)
    async with first.client() as client:
        answer = await client.post("/v1/responses", json={"input": "Hi", "stream": True})
    events = named_events(answer)
    check_waits(events)
    response_id = events[0]["response"]["id"]
    for ingress in (first, second):
        some = named_events(await got(ingress, response_id, stream=True, starting_after=7))
        assert some == events[8:]


async def test_who_follows_a_background_response_is_told_to_wait(
    first: Ingress, second: Ingress, engine: ScriptedEngine
) -> None:
    held = asyncio.Event()
    engine.scripts = [[HELLO[0], held, *HELLO[1:]]]
    first.responses._wait_interval_s = 0.001
    body = await posted(first, background=True)
    following = asyncio.create_task(got(second, body["id"], stream=True))
    await until(lambda: first.responses._responses[body["id"]].n_told > 6)
    held.set()
    events = named_events(await following)
    check_waits(events)
    some = named_events(await got(first, body["id"], stream=True, starting_after=7))
    assert some == events[8:]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_told_again_as_they_were(
    first: Ingress, second: Ingress, engine: ScriptedEngine, stream: bool
) -> None:
    call = 'So:<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    engine.script = [*(TokenDelta(char, (1,)) for char in call), HELLO[-1]]
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    asked = {"input": "Hi", "tools": tools, "stream": stream}
    async with first.client() as client:
        answer = await client.post("/v1/responses", json=asked)
    told = named_events(answer) if stream else []
    body = told[-1]["response"] if stream else answer.json()
    again = named_events(await got(second, body["id"], stream=True))
    assert again == told or not stream
    assert again[-1]["response"] == body
    assert (await got(second, body["id"])).json() == body


async def test_a_background_response_goes_on_when_its_client_leaves(
    first: Ingress, second: Ingress, engine: ScriptedEngine
) -> None:
    held = asyncio.Event()
    engine.scripts = [[HELLO[0], held, *HELLO[1:]]]
    body = await posted(first, background=True)
    assert (body["status"], body["background"], body["output"]) == ("queued", True, [])
    await until(lambda: first.responses._responses[body["id"]].n_told == 1)
    for ingress in (first, second):
        now = (await got(ingress, body["id"])).json()
        Response.model_validate(now)
        assert now["status"] == now["output"][0]["status"] == "in_progress"
        assert now["output"][0]["content"][0]["text"] == "Hel"
    early = await got_status(second, previous_response_id=body["id"])
    assert early == (400, "previous_response_id")
    held.set()
    for ingress in (first, second):
        done = await ended(ingress, body["id"])
        assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "Hello")
        assert done["id"] == body["id"]
    await until(lambda: not first.responses._responses)


async def got_status(ingress: Ingress, **fields: Any) -> tuple[int, str]:
    async with ingress.client() as client:
        answer = await client.post("/v1/responses", json={"input": "x", **fields})
    return answer.status_code, answer.json()["error"]["param"]


async def test_a_stream_is_resumed_by_another_ingress(
    first: Ingress, second: Ingress, engine: ScriptedEngine
) -> None:
    held = asyncio.Event()
    engine.scripts = [[HELLO[0], held, *HELLO[1:]]]
    body = await posted(first, background=True)
    following = asyncio.create_task(got(second, body["id"], stream=True, starting_after=2))
    whole = asyncio.create_task(got(first, body["id"], stream=True))
    await until(lambda: len(second.open) == 1)
    held.set()
    events, all_events = named_events(await following), named_events(await whole)
    assert [event["type"] for event in all_events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert events == all_events[3:]
    assert events[-1]["type"] == "response.completed"
    await until(lambda: len(second.open) == 0)


async def test_the_place_of_a_background_response_is_its_clients(
    first: Ingress, engine: ScriptedEngine
) -> None:
    held = asyncio.Event()
    engine.script = [HELLO[0], held, *HELLO[1:]]
    bodies = [await posted(first, background=True) for _ in range(2)]
    async with first.client() as client:
        asked = {"input": "Hi", "background": True}
        refused = await client.post("/v1/responses", json=asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert len(first.open) == 2
    other = await posted(first, "bob", background=True)
    held.set()
    for body in bodies:
        await ended(first, body["id"])
    await until(lambda: len(first.open) == 0)
    await posted(first, store=False)
    assert (await got(first, other["id"], "bob")).status_code == 200


@pytest.mark.parametrize("by", ["itself", "another"])
async def test_cancelling(first: Ingress, second: Ingress, engine: ScriptedEngine, by: str) -> None:
    engine.scripts = [[HELLO[0], asyncio.Event()]]
    body = await posted(first, background=True)
    await until(lambda: first.responses._responses[body["id"]].n_told == 1)
    ingress = first if by == "itself" else second
    for _ in range(2):
        async with ingress.client() as client:
            answer = await client.post(f"/v1/responses/{body['id']}/cancel")
        Response.model_validate(answer.json())
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    await until(lambda: engine.left_early and not first.responses._responses)
    last = named_events(await got(second, body["id"], stream=True))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")


async def test_what_is_not_in_the_background_cannot_be_cancelled(first: Ingress) -> None:
    body = await posted(first)
    async with first.client() as client:
        answer = await client.post(f"/v1/responses/{body['id']}/cancel")
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("by", ["itself", "another"])
async def test_deleting_ends_the_making(
    first: Ingress, second: Ingress, engine: ScriptedEngine, by: str
) -> None:
    engine.scripts = [[HELLO[0], asyncio.Event()]]
    body = await posted(first, background=True)
    await until(lambda: first.responses._responses[body["id"]].n_told == 1)
    async with (first if by == "itself" else second).client() as client:
        path = f"/v1/responses/{body['id']}"
        assert (await client.delete(path)).status_code == 200
        assert (await client.delete(path)).status_code == 404
    await until(lambda: engine.left_early and not first.responses._responses)
    assert (await got(first, body["id"])).status_code == 404


async def test_a_response_fails_when_its_ingress_dies(
    first: Ingress, second: Ingress, engine: ScriptedEngine, clock: Clock
) -> None:
    engine.scripts = [[HELLO[0], asyncio.Event()]]
    body = await posted(first, background=True)
    await until(lambda: first.responses._responses[body["id"]].n_told == 1)
    following = asyncio.create_task(got(second, body["id"], stream=True))
    await until(lambda: len(second.open) == 1)
    first.die()
    now = (await got(second, body["id"])).json()
    assert now["status"] == "in_progress", "it may only be slow"
    clock.now += store.LEASE_S
    done = (await got(second, body["id"])).json()
    Response.model_validate(done)
    assert (done["status"], done["output"][0]["content"][0]["text"]) == ("failed", "Hel")
    assert done["error"] == {
        "code": "server_error",
        "message": "The process that made this response has ended.",
    }
    last = named_events(await following)[-1]
    assert (last["type"], last["response"]) == ("response.failed", done)
    assert len(engine.requests) == 1


async def test_a_stream_of_a_response_that_is_deleted_meanwhile_fails(
    first: Ingress, second: Ingress, engine: ScriptedEngine
) -> None:
    engine.scripts = [[HELLO[0], asyncio.Event()]]
    body = await posted(first, background=True)
    following = asyncio.create_task(got(second, body["id"], stream=True))
    await until(lambda: len(second.open) == 1)
    async with first.client() as client:
        assert (await client.delete(f"/v1/responses/{body['id']}")).status_code == 200
    last = named_events(await following)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")


async def test_what_could_not_be_told_is_told_later(
    first: Ingress, engine: ScriptedEngine, shared: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_PAUSE_S", 0.001)
    held, n_lost = asyncio.Event(), 0
    engine.scripts = [[HELLO[0], held, *HELLO[1:]]]
    body = await posted(first, background=True)
    append = shared.append

    async def fails(appends: list[LogAppend]) -> list[bool]:
        nonlocal n_lost
        n_lost += 1
        if n_lost % 2:
            raise ConnectionError
        return await append(appends)

    monkeypatch.setattr(shared, "append", fails)
    await until(lambda: n_lost > 3)
    held.set()
    done = await ended(first, body["id"])
    assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "Hello")


async def test_a_lost_store_ends_what_is_being_made(
    first: Ingress, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.scripts = [[HELLO[0], asyncio.Event()], [asyncio.Event()]]
    body = await posted(first, background=True)
    monkeypatch.setattr(first.responses, "_store", Store())
    await until(lambda: engine.left_early and not first.responses._responses)
    assert (await got(first, body["id"])).status_code == 404
    assert len(first.open) == 0


async def test_an_ingress_that_stops_waits_for_its_responses_if_others_can_read_them(
    first: Ingress, second: Ingress, engine: ScriptedEngine, shared: Store
) -> None:
    held = asyncio.Event()
    engine.scripts = [[HELLO[0], held, *HELLO[1:]]]
    body = await posted(first, background=True)
    await first.responses.drain()
    shared.is_shared = True
    draining = asyncio.create_task(first.responses.drain())
    await until(lambda: first.responses._responses[body["id"]].n_told == 1)
    assert not draining.done()
    held.set()
    await draining
    done = (await got(second, body["id"])).json()
    assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "Hello")


@pytest.mark.parametrize("failure", [DecodeError("cannot decode"), ValueError("a mistake")])
async def test_a_failure_is_kept(
    first: Ingress, engine: ScriptedEngine, failure: Exception
) -> None:
    engine.scripts = [[HELLO[0], failure]]
    body = await posted(first, background=True)
    done = await ended(first, body["id"])
    assert (done["status"], done["error"]["code"]) == ("failed", "server_error")


async def test_a_refusal_has_a_status_and_leaves_nothing(
    first: Ingress, engine: ScriptedEngine, shared: Store
) -> None:
    engine.scripts = [[QueueFullError("full", 7)]]
    async with first.client() as client:
        answer = await client.post("/v1/responses", json={"input": "Hi", "background": True})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
    assert (len(shared), len(first.open), first.responses._responses) == (0, 0, {})


async def test_a_client_that_leaves_before_it_knows_the_id_ends_it(
    first: Ingress, engine: ScriptedEngine, shared: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def slow(request: Any) -> AsyncIterator[Any]:
        asked.set()
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(engine, "generate", slow)
    posting = asyncio.create_task(posted(first, background=True))
    await asked.wait()
    posting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await posting
    await until(lambda: not first.responses._responses and len(first.open) == 0)
    assert len(shared) == 0


async def test_where_none_is_kept(engine: ScriptedEngine, access: IngressConfig) -> None:
    ingress = Ingress(Store(), engine, access.model_copy(update={"responses_kept_s": 0}))
    body = await posted(ingress)
    assert body["store"] is False
    assert (await got(ingress, body["id"])).status_code == 404
    async with ingress.client() as client:
        answer = await client.post("/v1/responses", json={"input": "Hi", "background": True})
    assert (answer.status_code, answer.json()["error"]["type"]) == (501, "not_supported_error")


async def test_noise_hides_the_sizes_of_pieces(first: Ingress) -> None:
    async with first.client() as client:
        asked = {"input": "Hi", "stream": True, "stream_options": {"include_obfuscation": True}}
        events = named_events(await client.post("/v1/responses", json=asked))
        again = await client.get(
            f"/v1/responses/{events[0]['response']['id']}",
            params={"stream": True, "include_obfuscation": True},
        )
    for told in (events, named_events(again)):
        pieces = [event for event in told if event["type"].endswith(".delta")]
        assert [len(p["delta"] + p["obfuscation"]) for p in pieces] == [64, 64]
        assert all("obfuscation" not in event for event in told if event not in pieces)


async def test_long_logs_are_read_in_chunks_one_between_turns_of_the_event_loop(
    shared: Store, engine: ScriptedEngine, access: IngressConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams have their turns while logs of megabytes are read, whoever reads how many."""
    monkeypatch.setattr(store, "_CHUNK", 1)
    engine.script = [TokenDelta(character, (1,)) for character in "long" * 50] + HELLO[-1:]
    maker, other = (Ingress(shared, engine, access) for _ in range(2))
    response = await posted(maker)
    turns, read_at, unpacked = itertools.count(), list[int](), store.unpack_events
    turn = 0

    def noted(chunk: bytes) -> list[Event]:
        read_at.append(turn)
        return unpacked(chunk)

    async def take_turns() -> None:
        nonlocal turn
        for turn in turns:  # noqa: B007
            await asyncio.sleep(0)

    monkeypatch.setattr(background, "unpack_events", noted)
    taking = asyncio.create_task(take_turns())
    asked = (got(other, response["id"], stream=True) for _ in range(2))
    streams = [named_events(answer) for answer in await asyncio.gather(*asked)]
    taking.cancel()
    assert [events[-1]["response"] for events in streams] == [response] * 2
    assert len(read_at) == len(set(read_at)) > 400
