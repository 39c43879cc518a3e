"""Requests with different adapters on one engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from serve_app.base.errors import InvalidRequestError
from serve_app.base.values.adapters import Adapters, AdapterUse
from serve_app.engine import GenerationRequest
from tests.unit.engine.harness import (
    SteppedBackend,
    WatchedBackend,
    assert_only_own_tokens_were_fed,
    continuation,
    options,
    request,
    running,
    start,
)


def adapted(name: str, prompt: str, adapter: str, max_tokens: int = 8) -> GenerationRequest:
    used: Adapters = (AdapterUse(adapter, 1.0),) if adapter else ()
    return replace(request(name, prompt, max_tokens=max_tokens), adapters=used)


def test_no_batch_has_sequences_of_two_adapters() -> None:
    backend = WatchedBackend(n_slots=8)
    backend.adapters.loaded_keys = {"a", "b", "c"}
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
    backend.adapters.loaded_keys = {"a"}
    cached = []
    with running(backend) as engine:
        for i, adapter in enumerate(["", "a", "a", ""]):
            (inbox,) = start(engine, adapted(f"{i}", "a prompt that is shared\n", adapter))
            cached.append(inbox.wait().usage.cached_tokens)
    assert cached == [0, 0, len("a prompt that is shared"), 0]


def test_adapters_come_and_go_while_others_run() -> None:
    backend = WatchedBackend(n_slots=2)
    with running(backend) as engine:
        asked = adapted("early", "a prompt\n", "late")
        assert isinstance(engine.submit_to([(asked, print)])[0], InvalidRequestError)
        engine.adapters.load("late", Path("late.gguf"))
        (inbox,) = start(engine, asked)
        inbox.wait()

        engine.adapters.hide("late")
        refused = replace(asked, id="hidden")
        assert isinstance(engine.submit_to([(refused, print)])[0], InvalidRequestError)
        assert engine.adapters.free("late")
        assert backend.adapters.loaded_keys == set()
        engine.adapters.hide("late")
        assert engine.adapters.free("late")


def test_an_adapter_in_use_stays() -> None:
    backend = SteppedBackend(n_slots=1)
    backend.adapters.loaded_keys = {"a"}
    with running(backend) as engine, ThreadPoolExecutor(1) as pool:
        (inbox,) = start(engine, adapted("x", "a prompt\n", "a", max_tokens=64))
        engine.adapters.hide("a")
        freeing = pool.submit(engine.adapters.free, "a")
        while not freeing.done():
            backend.step_if_any()
        assert not freeing.result()
        backend.resume()
        inbox.wait()
        assert engine.adapters.free("a")


def test_one_that_is_gone_ends_its_request_and_no_other() -> None:
    backend = SteppedBackend(n_slots=2)
    backend.adapters.loaded_keys = {"a"}
    with running(backend) as engine:
        first, other = start(engine, adapted("first", "a\n", ""), adapted("gone", "b\n", "a"))
        backend.wait_for_batch()
        backend.adapters.loaded_keys = set()
        backend.resume()
        assert other.wait().error is not None
        assert first.wait().error is None
