"""Cache groups: nobody starts from, or is faster by, what another group has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.base.formats import Row, State
from serve_app.engine import Engine
from serve_app.engine.cache.packing import common_prefix
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import (
    SteppedBackend,
    ask,
    continuation,
    endless,
    options,
    request,
    running,
    start,
)

STORY = "a story that is long enough to be worth keeping, "
GROUPS = ["", "mine", "theirs"]


def n_cached(engine: Engine, name: str, prompt: str, group: str, max_tokens: int = 4) -> int:
    """Run a prompt; returns how many of its tokens were found."""
    inbox = ask(engine, request(name, prompt, max_tokens=max_tokens, group=group))
    assert inbox.token_ids == continuation(prompt.encode(), max_tokens)
    return inbox.end.usage.cached_tokens


# -- who shares -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_slots", [1, 2, 3])
@pytest.mark.parametrize("cache_ram_bytes", [0, 10_000])
def test_only_the_same_cache_group_starts_from_it(n_slots: int, cache_ram_bytes: int) -> None:
    sizes = options(n_slots, n_ctx_slot=256, cache_ram_bytes=cache_ram_bytes)
    with running(FakeBackend(endless, n_slots=n_slots), sizes) as engine:
        assert n_cached(engine, "1", STORY + "A", "mine") == 0
        assert n_cached(engine, "2", STORY + "B", "mine") == len(STORY)
        assert n_cached(engine, "3", STORY + "B", "theirs") == 0
        assert n_cached(engine, "4", STORY + "B", "") == 0
        kept = n_slots == 3 or cache_ram_bytes > 0
        assert n_cached(engine, "5", STORY + "C", "mine") == (len(STORY) if kept else 0)
        assert n_cached(engine, "6", STORY + "C", "theirs") == (len(STORY) if kept else 0)


@pytest.mark.parametrize("group", GROUPS)
def test_system_prompts_of_the_configuration_are_for_all(group: str) -> None:
    backend = FakeBackend(endless, n_slots=2)
    pinned = tuple(STORY.encode())
    with running(backend, options(1, n_ctx_slot=256, pinned=(pinned,))) as engine:
        assert n_cached(engine, "1", STORY + "A is here", "other") == len(STORY)
        assert n_cached(engine, "2", STORY + "A is here", group) == len(STORY)
        assert n_cached(engine, "3", STORY + "A is here", group) == len(STORY + "A is here") - 1


def test_of_prompts_that_arrive_together_each_cache_group_computes_its_own() -> None:
    backend = SteppedBackend(n_slots=4)
    with running(backend, options(4, n_ctx_slot=256)) as engine:
        (first,) = start(engine, request("first", "x"))
        backend.wait_for_batch()  # what comes now is seen by one step
        inboxes = {
            (group, name): start(engine, request(group + name, STORY + name, group=group))[0]
            for group in ("mine", "theirs")
            for name in "AB"
        }
        backend.resume()
        found = {key: inbox.wait().usage.cached_tokens for key, inbox in inboxes.items()}
        first.wait()
    assert {group: found[group, "A"] for group in ("mine", "theirs")} == {"mine": 0, "theirs": 0}
    nearly = range(len(STORY) - 15, len(STORY) + 1)  # for the last few tokens nobody waits
    assert all(found[group, "B"] in nearly for group in ("mine", "theirs"))


def test_a_unified_cache_shares_cells_within_a_cache_group_only() -> None:
    backend = FakeBackend(endless, n_slots=3, n_cells=1000)
    copies = mock.Mock(side_effect=backend.copy)
    with (
        mock.patch.object(backend, "copy", copies),
        running(backend, options(3, n_ctx_slot=256)) as engine,
    ):
        backend.hold()
        inboxes = start(
            engine,
            *(request(f"{group} {i}", STORY * 2, group=group) for i, group in enumerate(GROUPS)),
        )
        backend.resume()
        assert [inbox.wait().usage.cached_tokens for inbox in inboxes] == [0, 0, 0]
    assert copies.call_args_list == []


def test_what_is_preempted_comes_back_to_its_own_cache_group() -> None:
    """Two sequences that the cache has no room for: one loses its slot, and starts from the store."""
    backend = FakeBackend(endless, n_slots=2, n_cells=100)
    sizes = options(2, n_ctx_slot=96, cache_ram_bytes=10_000)
    with running(backend, sizes) as engine:
        inboxes = start(
            engine, *(request(group, "x" * 40, max_tokens=30, group=group) for group in GROUPS[1:])
        )
        for inbox in inboxes:
            assert inbox.wait().usage.cached_tokens == 0
            assert inbox.token_ids == continuation(b"x" * 40, 30)
        stats = engine.stats()
        assert stats.requests.preemptions > 0
        stored = n_cached(engine, "again", "x" * 40, "mine"), n_cached(engine, "n", "x" * 40, "")
    assert stored == (39, 0)


# -- what a restart finds, and slot files ---------------------------------------------------------


def test_a_restart_keeps_cache_groups(tmp_path: Path) -> None:
    sizes = options(1, n_ctx_slot=256, cache_ram_bytes=10_000, prefix_folder=tmp_path)
    found = []
    for n_started in range(2):
        with running(FakeBackend(endless, n_slots=1), sizes) as engine:
            for group in ("theirs", "") if n_started else ("mine",):
                found.append(n_cached(engine, f"{n_started}{group}", STORY, group))
            found.append(n_cached(engine, f"{n_started} again", STORY + "!", "mine"))
            engine.close()
    assert found == [0, len(STORY), 0, 0, len(STORY)]


def test_a_restored_slot_belongs_to_the_cache_group_that_it_was_saved_of(tmp_path: Path) -> None:
    sizes = options(1, n_ctx_slot=256, slot_folder=tmp_path)
    with running(FakeBackend(endless, n_slots=1), sizes) as engine:
        assert n_cached(engine, "1", STORY, "mine") == 0
        engine.slot_files.save(0, "slot")
        for group, expected in [("theirs", 0), ("", 0), ("mine", len(STORY))]:
            assert n_cached(engine, f"before {group}", "something else", "theirs") == 0
            engine.slot_files.restore(0, "slot")
            assert n_cached(engine, f"after {group}", STORY + "!", group) == expected
            engine.slot_files.erase(0)


# -- whatever happens -----------------------------------------------------------------------------

BEGINNINGS = ["", STORY, STORY + "and more of it, ", STORY[:20] + "or another one, "]
PROMPTS = st.builds(
    lambda beginning, end: beginning + end,
    st.sampled_from(BEGINNINGS),
    st.text("xyz", min_size=1, max_size=20),
)
ASKED = st.tuples(PROMPTS, st.sampled_from(GROUPS), st.integers(1, 5))


@settings(max_examples=60)
@given(
    waves=st.lists(st.lists(ASKED, min_size=1, max_size=5), max_size=6),
    n_slots=st.integers(1, 3),
    cache_ram_bytes=st.sampled_from([0, 400, 100_000]),
    n_cells=st.sampled_from([None, 200]),
    pinned=st.sampled_from([(), (tuple(STORY.encode()),)]),
)
def test_nobody_finds_more_than_their_cache_group_had(
    waves: list[list[tuple[str, str, int]]],
    n_slots: int,
    cache_ram_bytes: int,
    n_cells: int | None,
    pinned: tuple[tuple[int, ...], ...],
) -> None:
    backend = FakeBackend(endless, n_slots=n_slots + len(pinned), n_cells=n_cells)
    sizes = options(n_slots, n_ctx_slot=128, cache_ram_bytes=cache_ram_bytes, pinned=pinned)
    had = defaultdict[str, list[Sequence[int]]](lambda: list(pinned))
    with running(backend, sizes) as engine:
        for number, wave in enumerate(waves):
            inboxes = start(
                engine,
                *(
                    request(f"{number}/{i}", prompt, max_tokens=max_tokens, group=group)
                    for i, (prompt, group, max_tokens) in enumerate(wave)
                ),
            )
            found = [inbox.wait().usage.cached_tokens for inbox in inboxes]
            for i, (prompt, group, max_tokens) in enumerate(wave):
                tokens = tuple(prompt.encode())
                assert inboxes[i].token_ids == continuation(tokens, max_tokens)
                beside = [
                    tuple(text.encode())
                    for j, (text, other, _) in enumerate(wave)
                    if j != i and other == group
                ]
                known = [common_prefix(tokens, tuple(one)) for one in had[group] + beside]
                assert found[i] <= max(known, default=0)
            for prompt, group, max_tokens in wave:
                tokens = tuple(prompt.encode())
                had[group].append(tokens + tuple(continuation(tokens, max_tokens)))


class Noting(FakeBackend):
    """Notes all that is done, but for the tokens."""

    def __init__(self, n_slots: int, n_cells: int | None) -> None:
        super().__init__(lambda tokens: ord("0"), n_slots=n_slots, n_cells=n_cells)
        self.done: list[tuple[object, ...]] = []

    def decode(self, rows: Sequence[Row]) -> None:
        self.done.append(("decode", *(row[1:] for row in rows)))
        super().decode(rows)

    def truncate(self, seq_id: int, n_past: int) -> None:
        self.done.append(("truncate", seq_id, n_past))
        super().truncate(seq_id, n_past)

    def copy(self, source: int, target: int) -> None:
        self.done.append(("copy", source, target))
        super().copy(source, target)

    def save(self, seq_id: int, *, cancellable: bool = False) -> bytes:
        self.done.append(("save", seq_id))
        return super().save(seq_id, cancellable=cancellable)

    def restore(self, seq_id: int, state: State) -> None:
        self.done.append(("restore", seq_id, len(state)))
        super().restore(seq_id, state)


@settings(max_examples=60)
@given(
    asked=st.lists(
        st.tuples(st.sampled_from(["guess", "victim"]), PROMPTS), min_size=1, max_size=8
    ),
    n_slots=st.integers(1, 3),
    cache_ram_bytes=st.sampled_from([0, 400, 100_000]),
    n_cells=st.sampled_from([None, 200]),
)
def test_what_others_said_changes_nothing_that_is_done_for_a_prompt(
    asked: list[tuple[str, str]], n_slots: int, cache_ram_bytes: int, n_cells: int | None
) -> None:
    """Two engines with the same requests in the same order. In the second one, the victim's tokens are all
    others, so that nobody who guesses could be right: whoever guesses cannot tell the two apart."""
    done = []
    for shift in (0, 3):
        backend = Noting(n_slots, n_cells)
        sizes = options(n_slots, n_ctx_slot=128, cache_ram_bytes=cache_ram_bytes)
        with ExitStack() as stack:
            stack.enter_context(mock.patch("serve_app.engine.core.loop._REST_S", 1e6))
            engine = stack.enter_context(running(backend, sizes))
            for i, (group, prompt) in enumerate(asked):
                moved = shift if group == "victim" else 0
                text = bytes(byte + moved for byte in prompt.encode()).decode()
                inbox = ask(engine, request(f"{i}", text, max_tokens=3, group=group))
                backend.done.append(("found", inbox.end.usage.cached_tokens))
        done.append(backend.done)
    assert done[0] == done[1]
