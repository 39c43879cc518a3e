"""Sequence states in and out of a real context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine import DecodeError, Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.kernels.llama.context import Context, ContextOptions
from serve_app.kernels.llama.model import Model
from tests.integration.engine.kernels import openvino
from tools.random_models.model import SHAPES, write_random_gguf

# Without flash attention, logits do not depend on how a prompt was cut; with Q8_0, nor on the batch.
OPTIONS = EngineOptions(
    n_slots=1, n_ctx_slot=256, threads=1, n_batch=64, flash_attn=False, profile_limit_s=0
)
STORIES = [f"Story number {n} is about {'a very ' * n}old house by the sea. " * 2 for n in range(4)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "exact.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    return path


@pytest.fixture
def context(path: Path) -> Iterator[Context]:
    made = Context(
        Model(path),
        ContextOptions(n_seq_max=2, n_ctx_slot=256, n_batch=64, threads=1, flash_attn=False),
    )
    yield made
    made.close()


async def tell(engine: Engine, prompt: str) -> tuple[list[int], int]:
    """The tokens that follow, and the prompt's cached ones."""
    sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    request = GenerationRequest(prompt, engine.tokenize(prompt), sampling)
    deltas = [delta async for delta in engine.submit(request)]
    assert deltas[-1].end is not None
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, deltas[-1].end.usage.cached_tokens


@pytest.mark.parametrize("formats", [{}, {"cache_type_k": "q8_0"}, openvino()])
async def test_chats_in_turn_on_one_slot_say_the_same(path: Path, formats: dict[str, Any]) -> None:
    said = []
    for budget in (0, 64 * 2**20):
        engine = Engine.load(path, replace(OPTIONS, cache_ram_bytes=budget, **formats))
        try:
            said.append(
                [await tell(engine, story + end) for end in ("It", "He") for story in STORIES]
            )
            restored = engine.stats().tokens.restored_tokens
        finally:
            engine.close()
    without, with_it = said
    assert [tokens for tokens, _ in with_it] == [tokens for tokens, _ in without]
    assert [cached for _, cached in without[4:]] != [cached for _, cached in with_it[4:]]
    assert sum(cached for _, cached in with_it[4:]) == restored > 100


def test_a_state_goes_to_another_sequence(context: Context) -> None:
    context.decode([(300 + i, i, 0, i == 19) for i in range(20)])
    state = context.save(0)
    context.restore(1, state)
    assert len(context.save(1)) == len(state)
    context.truncate(1, 19)
    context.decode([(319, 19, 1, True)])


@pytest.mark.parametrize("damage", [b"", b"nonsense", "cut"])
def test_a_damaged_state_is_refused(context: Context, damage: bytes | str) -> None:
    context.decode([(300 + i, i, 0, i == 19) for i in range(20)])
    state = context.save(0)
    with pytest.raises(DecodeError, match="does not take back"):
        context.restore(1, state[: len(state) // 2] if isinstance(damage, str) else damage)
    context.decode([(300, 0, 1, True)])  # the sequence is empty, and of use
