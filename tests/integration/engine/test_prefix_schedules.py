"""Greedy text is the same, whatever was copied, stored, pinned, preempted, drafted or cut into chunks.

With the built-in model. Without flash attention, whose kernel for 64 rows and more rounds differently, and
with Q8_0 weights, the logits do not depend on how the work was cut: the tokens must be equal.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams, TokenStream
from serve_app.engine.backends.llama_cpp import LlamaBackend
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.store.builtin_model import BUILTIN_MODEL
from tools.messages import from_messages

TOKENIZER = Tokenizer(BUILTIN_MODEL)
SYSTEM = "You are a patient assistant who answers every question of every guest in this house."
HISTORY = [
    {"role": "user", "content": "My name is Ana, and I live in Lisbon."},
    {"role": "assistant", "content": "Nice to meet you, Ana!"},
    {"role": "user", "content": "Tell me a story about a brave fox."},
    {"role": "assistant", "content": "Once upon a time, there was a brave fox called Pip. " * 3},
]
QUESTIONS = [
    "What is my name?",
    "Name three fruits.",
    "What is the capital of Italy?",
    "Tell me a story about a brave fox.",
]
ALONE = EngineOptions(
    profile_limit_s=0,
    n_slots=1,
    n_ctx_slot=512,
    threads=1,
    n_batch=128,
    flash_attn=False,
    kv_unified=False,
    max_stall_ms=math.inf,
    speculate=False,
)
PINNED = (TOKENIZER.encode_system_prompt(SYSTEM),)
CRAMPED = replace(ALONE, n_slots=4, n_ctx_slot=160, n_ctx=256, kv_unified=True)
OTHERS = {
    "one slot and a store": replace(ALONE, cache_ram_bytes=32 * 2**20),
    "little room": replace(ALONE, n_slots=2, cache_ram_bytes=400_000, n_batch=48),
    "pinned, small chunks": replace(ALONE, n_slots=3, max_stall_ms=4, pinned=PINNED),
    "unified": replace(ALONE, n_slots=3, kv_unified=True, pinned=PINNED, cache_ram_bytes=2**20),
    "preempted": replace(CRAMPED, cache_ram_bytes=2**22),
    "preempted, no store": CRAMPED,
    "speculating": replace(ALONE, n_slots=2, speculate=True, max_stall_ms=4, profile_limit_s=1.0),
}
CHATS = st.builds(
    lambda system, n_turns, question: TOKENIZER.encode_chat(
        from_messages(
            [{"role": "system", "content": SYSTEM}] * system
            + HISTORY[:n_turns]
            + [{"role": "user", "content": question}]
        )
    ),
    st.booleans(),
    st.sampled_from([0, 2, 4]),
    st.sampled_from(QUESTIONS),
)


def open_engine(name: str, sizes: EngineOptions) -> Engine:
    engine = Engine(lambda: LlamaBackend(BUILTIN_MODEL, sizes), sizes)
    if name == "speculating":  # as on a machine on which drafts cost nothing
        mock.patch.object(engine.core.costs, "verify_s", return_value=1e-6).start()
    return engine


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    made = {name: open_engine(name, sizes) for name, sizes in {"": ALONE, **OTHERS}.items()}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="module")
def alone() -> dict[tuple[int, ...], list[int]]:
    """What is said to each prompt, computed when it is first needed."""
    return {}


async def say(engine: Engine, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """The answers to prompts that arrive together."""
    sampling = SamplingParams(temperature=0, max_tokens=12)
    streams = engine.submit_many(
        [GenerationRequest(str(n), prompt, sampling) for n, prompt in enumerate(prompts)]
    )

    async def read(stream: object) -> list[int]:
        assert isinstance(stream, TokenStream), stream
        return [token async for delta in stream for token in delta.token_ids]

    return await asyncio.gather(*map(read, streams))


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(waves=st.lists(st.lists(CHATS, min_size=1, max_size=5), min_size=1, max_size=4))
def test_text_does_not_depend_on_what_was_cached(
    engines: dict[str, Engine],
    alone: dict[tuple[int, ...], list[int]],
    name: str,
    waves: list[list[tuple[int, ...]]],
) -> None:
    """The engines go on from one example to the next, with all that their caches hold by then."""

    async def run() -> None:
        for wave in waves:
            for prompt in wave:
                if prompt not in alone:
                    (alone[prompt],) = await say(engines[""], [prompt])
            assert await say(engines[name], wave) == [alone[prompt] for prompt in wave]

    asyncio.run(run())


def test_everything_was_used(engines: dict[str, Engine]) -> None:
    """The schedules above did what they are there for; runs after them."""
    stats = {name: engine.stats() for name, engine in engines.items()}
    assert stats["one slot and a store"].tokens.restored_tokens > 0
    assert stats["little room"].cache.stored_bytes <= 400_000
    assert stats["pinned, small chunks"].slots[-1].state == "pinned"
    assert stats["preempted"].requests.preemptions > 0
    assert stats["preempted, no store"].requests.preemptions > 0
    speculation = stats["speculating"].speculation
    assert speculation.drafted_tokens > speculation.accepted_tokens > 0
    assert all(stats[name].tokens.cached_tokens > 0 for name in OTHERS)
