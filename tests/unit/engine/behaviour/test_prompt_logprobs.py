"""Log probabilities of prompts, over the scripted backend: a token's is minus the tokens before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.base.values.answers import FinishReason
from serve_app.engine import GenerationRequest
from serve_app.engine.core.scheduler.scheduler import MAX_SCORED_ROWS
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import (
    Inbox,
    WatchedBackend,
    ask,
    continuation,
    endless,
    options,
    request,
    running,
    start,
)


def scored(name: str, prompt: str, max_tokens: int = 4) -> GenerationRequest:
    plain = request(name, prompt, max_tokens=max_tokens)
    return replace(plain, sampling=replace(plain.sampling, logprobs=1, prompt_logprobs=True))


def assert_scored(inbox: Inbox, prompt: str) -> None:
    """Every token of the prompt but the first, once and in order, before anything is generated."""
    tokens = list(prompt.encode())
    found = [one for delta in inbox.deltas for one in delta.prompt_logprobs]
    assert [one.logprob for one in found] == [-float(i) for i in range(1, len(tokens))]
    likeliest = [endless(tokens[:i]) for i in range(1, len(tokens))]
    assert [one.top for one in found] == [((token, 0.0),) for token in likeliest]
    assert not any(delta.prompt_logprobs for delta in inbox.deltas[1:])


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("prompt", ["a", "ab", "some words that take several chunks to compute"])
def test_a_prompt_is_scored(prompt: str, max_tokens: int) -> None:
    with running(WatchedBackend(n_slots=2)) as engine:
        inbox = ask(engine, scored("a", prompt, max_tokens))
    assert_scored(inbox, prompt)
    assert inbox.end.reason == FinishReason.LENGTH
    assert inbox.token_ids == continuation(prompt.encode(), max_tokens)
    assert inbox.end.usage.completion_tokens == max_tokens


def test_a_prompt_without_an_answer_is_in_the_cache_then() -> None:
    with running(WatchedBackend(n_slots=1)) as engine:
        nothing = ask(engine, request("a", "some words that are long enough", max_tokens=0))
        assert (nothing.text, nothing.token_ids) == ("", [])
        after = ask(engine, request("b", "some words that are long enough"))
    assert after.end.usage.cached_tokens == after.end.usage.prompt_tokens - 1


def test_it_is_computed_whole_and_others_start_from_it() -> None:
    prompt = "some words that are long enough"
    with running(WatchedBackend(n_slots=2)) as engine:
        ask(engine, request("a", prompt))
        whole = ask(engine, scored("b", prompt))
        after = ask(engine, request("c", prompt))
    assert_scored(whole, prompt)
    assert whole.end.usage.cached_tokens == 0
    assert after.end.usage.cached_tokens == len(prompt) - 1


def test_only_its_rows_have_logits_and_few_at_a_time() -> None:
    backend = WatchedBackend(n_slots=3)
    prompts = ["x" * 100, "y" * 90, "z" * 80]
    sizes = options(3, n_ctx_slot=128, n_batch=64)
    backend.hold()
    with running(backend, sizes) as engine:
        requests = [scored("a", prompts[0]), scored("b", prompts[1]), request("c", prompts[2])]
        inboxes = start(engine, *requests)
        backend.resume()
        for inbox in inboxes:
            inbox.wait()
    assert_scored(inboxes[0], prompts[0])
    assert_scored(inboxes[1], prompts[1])
    for batch in backend.batches:
        assert sum(wanted for *_, wanted in batch) <= MAX_SCORED_ROWS + 3
        plain = [row for row in batch if row[0] == ord("z") and row[1] < len(prompts[2]) - 1]
        assert not any(wanted for *_, wanted in plain)
    assert any(len(batch) == 64 for batch in backend.batches)  # the plain prompt took the rest


@settings(max_examples=60)
@given(
    prompts=st.lists(
        st.tuples(st.text("ab", min_size=1, max_size=20), st.integers(0, 12), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    n_cells=st.integers(48, 120),
    cache_ram_bytes=st.sampled_from([0, 200, 100_000]),
)
def test_who_had_to_give_way_is_scored_once(
    prompts: list[tuple[str, int, bool]], n_cells: int, cache_ram_bytes: int
) -> None:
    backend = FakeBackend(endless, n_slots=4, n_cells=n_cells)
    sizes = options(4, n_ctx_slot=48, max_waiting=8, cache_ram_bytes=cache_ram_bytes)
    with running(backend, sizes) as engine:
        inboxes = start(
            engine,
            *(
                (scored if wanted else request)(str(i), text, max_tokens=n)
                for i, (text, n, wanted) in enumerate(prompts)
            ),
        )
        for inbox, (text, max_tokens, wanted) in zip(inboxes, prompts, strict=True):
            assert inbox.wait().reason == FinishReason.LENGTH
            assert inbox.token_ids == continuation(text.encode(), max_tokens)
            if wanted:
                assert_scored(inbox, text)
