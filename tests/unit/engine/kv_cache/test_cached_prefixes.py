"""What an engine says that prompts could start from."""

from __future__ import annotations

from dataclasses import replace

from serve_app.engine import CachedPrefixes, GenerationRequest, SamplingParams
from serve_app.engine.kv_cache.slots import Slot
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import Inbox, endless, options, request, running
from tests.unit.engine.kv_cache.test_slots import busy


def test_what_was_published_does_not_change() -> None:
    seen: list[tuple[CachedPrefixes, list[tuple[int, ...]]]] = []
    backend = FakeBackend(endless, n_slots=2)
    opts = replace(options(2), cache_ram_bytes=600, context_shift=True, n_keep=4)
    with running(backend, opts) as engine:
        for i in range(24):
            prompt = f"{'abc'[i % 3] * 20}{i}\n"
            inbox = Inbox()
            engine.submit_callback(request(str(i), prompt, max_tokens=5 + 4 * i), inbox)
            held = engine.cached_prefixes()
            seen.append((held, [tuple(one.tokens) for one in held.prompts]))
            if i % 3 == 2:
                inbox.wait()
    assert any(len(held.prompts) > 2 for held, _ in seen)
    for held, copied in seen:
        assert [tuple(one.tokens) for one in held.prompts] == copied


def test_the_last_requests_are_named() -> None:
    backend = FakeBackend(endless, n_slots=1)
    with running(backend) as engine:
        for i in range(300):
            inbox = Inbox()
            params = SamplingParams(max_tokens=1)
            engine.submit_callback(GenerationRequest(str(i), (1, 2), params), inbox)
            inbox.wait()
        assert engine.cached_prefixes().taken == tuple(str(i) for i in range(44, 300))


def test_after_a_context_shift_only_what_is_kept_is_offered() -> None:
    slot = Slot(0, sequence=busy([1, 2, 3, 4], 4))
    assert list(slot.prompt) == [1, 2, 3, 4]
    assert slot.sequence is not None
    slot.sequence.n_exact = 3
    assert list(slot.prompt) == [1, 2, 3]
