"""Responses that are kept, through the `openai` package, against a real server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.e2e.conftest import Corral, wait_until

STORY = "Tell me a story."


@pytest.fixture
def client(corral: Corral) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def long_one(client: openai.OpenAI, **fields: Any) -> Any:
    """A response of a model without any sense, which goes on for so long."""
    schema = {"type": "string", "minLength": 20_000}
    text: Any = {"format": {"type": "json_schema", "name": "long", "schema": schema}}
    return client.responses.create(model="big", input=STORY, background=True, text=text, **fields)


def ended(client: openai.OpenAI, response_id: str) -> Response:
    found: list[Response] = []

    def has_ended() -> bool:
        found[:] = [client.responses.retrieve(response_id)]
        return found[0].status not in ("queued", "in_progress")

    wait_until(has_ended, 60, "the response does not end")
    return found[0]


def test_a_chat_goes_on_from_a_response(client: openai.OpenAI) -> None:
    first = client.responses.create(model="demo", input="I live in Oslo.", temperature=0)
    second = client.responses.create(
        model="demo", input="Where do I live?", previous_response_id=first.id, temperature=0
    )
    assert second.output_text == "You live in Oslo."
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(second.id) == second
    items = client.responses.input_items.list(second.id, order="asc", limit=2)
    texts = [item.model_dump()["content"][0]["text"] for item in items]
    assert texts == ["I live in Oslo.", first.output_text, "Where do I live?"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model="demo", input="x", previous_response_id=first.id)
    assert bad.value.code == "previous_response_not_found"
    third = client.responses.create(
        model="demo", input="Where do I live?", previous_response_id=second.id, temperature=0
    )
    assert third.output_text == second.output_text
    ids = [item.id for item in client.responses.input_items.list(third.id, order="asc")]
    references: Any = [{"type": "item_reference", "id": item_id} for item_id in ids]
    fourth = client.responses.create(model="demo", input=references, temperature=0)
    assert fourth.output_text == third.output_text
    assert fourth.usage
    assert third.usage
    assert fourth.usage.input_tokens == third.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="Item with id 'msg_1' not found"):
        client.responses.create(model="demo", input=[{"id": "msg_1"}])


def test_a_response_in_the_background(client: openai.OpenAI) -> None:
    asked = client.responses.create(
        model="demo", input="What is the capital of Italy?", background=True, temperature=0
    )
    assert asked.status == "queued"
    done = ended(client, asked.id)
    assert (done.status, done.output_text) == ("completed", "The capital of Italy is Rome.")


def test_a_stream_that_broke_is_read_on(client: openai.OpenAI, corral: Corral) -> None:
    n_tokens = 600
    seen = []
    with long_one(client, stream=True, max_output_tokens=n_tokens) as stream:
        for event in itertools.islice(stream, 10):
            seen.append(event)
    response_id = seen[0].response.id
    last = seen[-1].sequence_number
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=last))
    numbers = [event.sequence_number for event in [*seen, *rest]]
    assert numbers == list(range(len(numbers)))
    pieces = [e.delta for e in [*seen, *rest] if e.type == "response.output_text.delta"]
    end = rest[-1]
    assert end.type == "response.completed"
    assert end.response.status == "incomplete"
    assert end.response.usage is not None
    assert end.response.usage.output_tokens == n_tokens
    assert "".join(pieces) == end.response.output_text
    again = list(client.responses.retrieve(response_id, stream=True))
    assert again[len(seen) :] == rest


def test_cancelling_frees_the_slots(client: openai.OpenAI, corral: Corral) -> None:
    # One alone is over within a second. Drafts are wrong at this temperature: repeats are no faster.
    asked = [long_one(client, max_output_tokens=1900, temperature=2) for _ in range(12)]

    def busy() -> int:
        return int(corral.stats(0)["queue"]["running"])

    wait_until(lambda: busy() > 0, 30, "they do not begin")
    cancelled = [client.responses.cancel(response.id) for response in asked]
    assert {response.status for response in cancelled} == {"cancelled"}
    wait_until(lambda: busy() == 0, 30, "their slots are not free")
    assert client.responses.retrieve(asked[-1].id).status == "cancelled"
