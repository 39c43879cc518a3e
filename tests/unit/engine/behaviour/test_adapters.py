"""Requests with different adapters on one engine."""

from __future__ import annotations

from dataclasses import replace

from serve_app.engine import GenerationRequest
from serve_app.types import Adapters, AdapterUse
from tests.unit.engine.harness import (
    WatchedBackend,
    assert_only_own_tokens_were_fed,
    continuation,
    options,
    request,
    running,
    start,
)


def adapted(name: str, prompt: str, adapter: str) -> GenerationRequest:
    used: Adapters = (AdapterUse(adapter, 1.0),) if adapter else ()
    return replace(request(name, prompt, max_tokens=8), adapters=used)


def test_no_batch_has_sequences_of_two_adapters() -> None:
    backend = WatchedBackend(n_slots=8)
    backend.adapter_ids = {"a", "b", "c"}
    backend.hold()
    asked = [adapted(f"{i}", f"prompt {i}\n", "abc "[i % 4].strip()) for i in range(8)]
    with running(backend, options(8)) as engine:
        inboxes = start(engine, *asked)
        backend.resume()
        for inbox in inboxes:
            inbox.wait()
    for one, inbox in zip(asked, inboxes, strict=True):
        assert inbox.token_ids == continuation(one.prompt, 8)
    assert_only_own_tokens_were_fed(backend)
    adapters = {
        tenancy.prompt: one.adapters
        for tenancy in backend.tenancies
        for one in asked
        if one.prompt == tenancy.prompt
    }
    slots = {tenancy.slot: adapters[tenancy.prompt] for tenancy in backend.tenancies}
    for rows, used in zip(backend.batches, backend.used_adapters, strict=True):
        wanted = {slots[slot_id] for _, _, slot_id, wants_logits in rows if wants_logits}
        assert wanted <= {used}
    assert set(backend.used_adapters) == {one.adapters for one in asked}


def test_a_prefix_of_other_adapters_is_computed_again() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.adapter_ids = {"a"}
    cached = []
    with running(backend) as engine:
        for i, adapter in enumerate(["", "a", "a", ""]):
            (inbox,) = start(engine, adapted(f"{i}", "a prompt that is shared\n", adapter))
            cached.append(inbox.wait().usage.cached_tokens)
    assert cached == [0, 0, len("a prompt that is shared"), 0]
