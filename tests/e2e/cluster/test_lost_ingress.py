"""A response in the background outlives its client and its ingress."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Corral, model, wait_until

N_TOKENS = 12_000


@pytest.mark.long
def test_a_stream_is_read_on_when_its_ingress_was_lost(
    start: Callable[[list[dict[str, Any]]], Corral], gguf: Path
) -> None:
    corral = start([model(gguf, "big", n_slots=2, n_ctx_slot=16_384)])
    corral.wait_ready()
    client = openai.OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0)
    kept = client.responses.create(model="big", input="y", max_output_tokens=4)
    asked: dict[str, Any] = {"model": "big", "input": "x", "max_output_tokens": N_TOKENS}
    schema = {"type": "string", "minLength": 160_000}
    text = {"format": {"type": "json_schema", "name": "long", "schema": schema}}
    asked |= {"background": True, "stream": True, "text": text}
    seen = []
    with client.responses.create(**asked) as stream:
        for event in itertools.islice(stream, 20):
            seen.append(event)
    opening: Any = seen[0]
    response_id, last = opening.response.id, seen[-1].sequence_number

    (ingress,) = corral.pids("Ingress")
    os.kill(ingress, signal.SIGKILL)

    def is_back() -> bool:
        pids = corral.pids("Ingress")
        return bool(pids) and ingress not in pids and corral.http.get("/health").is_success

    wait_until(is_back, 120, "there is no new ingress")
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=last))
    events: list[Any] = [*seen, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    end = events[-1]
    assert (end.type, end.response.usage.output_tokens) == ("response.completed", N_TOKENS)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == end.response.output_text
    assert "continues in this ingress" in corral.log
    client.close()
