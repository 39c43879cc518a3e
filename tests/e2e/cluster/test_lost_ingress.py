"""A response in the background outlives its client and a rollout. It fails with its ingress."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.e2e.conftest import Corral, model, wait_until

N_TOKENS = 12_000
N_CHARS = 160_000


def long(n_tokens: int) -> dict[str, Any]:
    """A request in the background that is answered for long."""
    schema = {"type": "string", "minLength": N_CHARS}
    text = {"format": {"type": "json_schema", "name": "long", "schema": schema}}
    asked = {"model": "big", "input": "x", "max_output_tokens": n_tokens}
    return asked | {"background": True, "text": text}


@pytest.mark.long
def test_a_response_ends_with_its_ingress_and_not_with_a_rollout(
    start: Callable[[list[dict[str, Any]]], Corral], gguf: Path
) -> None:
    corral = start([model(gguf, "big", n_slots=2, n_ctx_slot=16_384)])
    corral.wait_ready()
    client = openai.OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0)
    kept = client.responses.create(model="big", input="y", max_output_tokens=4)

    def is_replaced_by_another(ingress: int) -> bool:
        pids = corral.pids("Ingress")
        return bool(pids) and ingress not in pids and corral.http.get("/health").is_success

    # A deploy replaces the ingress, which makes its response first.
    (ingress,) = corral.pids("Ingress")
    made = client.responses.create(**long(N_TOKENS))
    config = corral.directory / "serve_config.yaml"
    changed = yaml.safe_load(config.read_text())
    changed["applications"][0]["args"]["models"][0]["tags"] = ["new"]
    config.write_text(yaml.safe_dump(changed))
    corral.deploy()
    wait_until(lambda: is_replaced_by_another(ingress), 240, "the old ingress is still there")
    made = client.responses.retrieve(made.id)
    assert made.usage is not None
    assert (made.status, made.usage.output_tokens) == ("incomplete", N_TOKENS)

    # An ingress that dies makes nothing more.
    (ingress,) = corral.pids("Ingress")
    with client.responses.create(**long(N_TOKENS), stream=True) as stream:
        seen: list[Any] = list(itertools.islice(stream, 20))
    response_id, last = seen[0].response.id, seen[-1].sequence_number
    os.kill(ingress, signal.SIGKILL)
    wait_until(lambda: is_replaced_by_another(ingress), 120, "there is no new ingress")
    for before in (kept, made):
        assert client.responses.retrieve(before.id).output_text == before.output_text
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=last))
    events: list[Any] = [*seen, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    end = events[-1]
    assert (end.type, end.response.status) == ("response.failed", "failed")
    assert end.response.error.message == "The process that made this response has ended."
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == end.response.output_text
    client.close()
