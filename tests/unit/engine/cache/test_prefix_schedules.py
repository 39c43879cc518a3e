"""Whatever is copied, stored, pinned or cut into chunks: every answer is as if it had been alone."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.costs.cost_model import Profile
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import continuation, endless, options, request, running, start

BEGINNINGS = [
    "a beginning that many share, " * n + tail for n in (1, 2) for tail in ("", "or not, ")
]
PROMPTS = st.builds(
    lambda beginning, end: beginning + end,
    st.sampled_from(["", *BEGINNINGS]),
    st.text("xyz", min_size=1, max_size=24),
)
WAVES = st.lists(
    st.lists(st.tuples(PROMPTS, st.integers(1, 5)), min_size=1, max_size=4), max_size=6
)


@settings(max_examples=60)
@given(
    waves=WAVES,
    n_slots=st.integers(1, 3),
    cache_ram_bytes=st.sampled_from([0, 400, 100_000]),
    pinned=st.lists(st.sampled_from([tuple(text.encode()) for text in BEGINNINGS]), max_size=1),
    max_stall_ms=st.sampled_from([math.inf, 20.0]),
)
def test_answers_do_not_depend_on_what_was_cached(
    waves: list[list[tuple[str, int]]],
    n_slots: int,
    cache_ram_bytes: int,
    pinned: list[tuple[int, ...]],
    max_stall_ms: float,
) -> None:
    backend = FakeBackend(endless, n_slots=n_slots + len(pinned))
    backend.profile = Profile({1: 0.01}, {4: 0.004, 8: 0.008, 16: 0.016})
    sizes = options(
        n_slots,
        n_ctx_slot=128,
        max_stall_ms=max_stall_ms,
        cache_ram_bytes=cache_ram_bytes,
        pinned=tuple(pinned),
    )
    with running(backend, sizes) as engine:
        for number, wave in enumerate(waves):
            inboxes = start(
                engine,
                *(
                    request(f"{number}/{i}", prompt, max_tokens=max_tokens)
                    for i, (prompt, max_tokens) in enumerate(wave)
                ),
            )
            for inbox, (prompt, max_tokens) in zip(inboxes, wave, strict=True):
                end = inbox.wait()
                assert inbox.token_ids == continuation(prompt.encode(), max_tokens)
                assert end.usage.cached_tokens < len(prompt)
            stats = engine.stats()
            assert stats.cache.stored_bytes <= cache_ram_bytes
            assert stats.tokens.restored_tokens <= stats.tokens.cached_tokens
            assert [slot.n_past for slot in stats.slots] == [len(slot) for slot in backend.slots]
        assert backend.slots[n_slots:] == [list(tokens) for tokens in pinned]
