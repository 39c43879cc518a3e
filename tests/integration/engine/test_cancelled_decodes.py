"""Decodes that are cancelled before their end, with llama.cpp and a tiny model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from serve_app.base.errors import DecodeCancelledError
from serve_app.base.formats import Row
from serve_app.engine import (
    Engine,
    EngineOptions,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenDelta,
    TokenStream,
)
from serve_app.engine.backends.llama_cpp import LlamaBackend
from serve_app.kernels.llama.context import Context, ContextOptions
from serve_app.kernels.llama.model import Model
from tools.random_models.model import SHAPES, write_random_gguf

OPTIONS = EngineOptions(n_slots=2, n_ctx_slot=256, threads=2, profile_limit_s=0)
HELLO = "Hello there, how are you?"
LONG = "It was the best of times, it was the worst of times. " * 5
MANY_ROWS = 32


@pytest.fixture(scope="module")
def exact_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits do not depend on the batch."""
    path = tmp_path_factory.mktemp("model") / "exact.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    return path


@pytest.fixture(params=[False, True], ids=["split", "unified"])
def context(exact_gguf: Path, request: pytest.FixtureRequest) -> Iterator[Context]:
    made = Context(
        Model(exact_gguf),
        ContextOptions(
            n_seq_max=2,
            n_ctx_slot=256,
            n_batch=128,
            threads=2,
            flash_attn=False,
            kv_unified=request.param,
        ),
    )
    yield made
    made.close()


def prompt(seq_id: int, n_rows: int) -> list[Row]:
    return [(7 * i % 97 + 5, i, seq_id, i == n_rows - 1) for i in range(n_rows)]


def test_what_a_left_pass_computed_is_dropped_again(context: Context) -> None:
    context.decode(prompt(0, 40))
    expected = context.logits(39).copy()
    context.truncate(0, 0)
    context.decode(prompt(1, 8))
    context.cancel(True)
    with pytest.raises(DecodeCancelledError):
        context.decode([*prompt(0, 40), (5, 8, 1, True)])
    with pytest.raises(DecodeCancelledError):
        context.decode(prompt(0, 1))
    context.cancel(False)
    context.truncate(0, 0)
    context.truncate(1, 8)
    context.decode(prompt(0, 40))
    assert (context.logits(39) == expected).all()


class AbortingBackend(LlamaBackend):
    """Aborts a request in the moment when a batch of many rows is begun."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, OPTIONS)
        self.engines: list[Engine] = []
        self.n_left = 0

    def decode(self, rows: Sequence[Row]) -> None:
        if len(rows) > MANY_ROWS:
            self.engines[0].abort("long")
        try:
            super().decode(rows)
        except DecodeCancelledError:
            self.n_left += 1
            raise


async def ask(engine: Engine, name: str, text: str) -> tuple[list[int], TokenDelta]:
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    stream: TokenStream = engine.submit(GenerationRequest(name, engine.tokenize(text), sampling))
    deltas = [delta async for delta in stream]
    return [token for delta in deltas for token in delta.token_ids], deltas[-1]


async def test_a_pass_that_nobody_wants_is_left(exact_gguf: Path) -> None:
    """Others have the text that they have without it, and nothing of it is taken for computed."""
    backends: list[AbortingBackend] = []

    def opened() -> AbortingBackend:
        backends.append(AbortingBackend(exact_gguf))
        return backends[0]

    engine = Engine(opened, OPTIONS)
    backends[0].engines.append(engine)
    try:
        before, _ = await ask(engine, "before", HELLO)
        beginning, _ = await ask(engine, "beginning", LONG[:50])
        tokens, last = await ask(engine, "long", LONG)
        assert tokens == []
        assert last.end is not None
        assert last.end.reason is FinishReason.ABORT
        assert backends[0].n_left == 1
        assert (await ask(engine, "after", HELLO))[0] == before
        assert (await ask(engine, "again", LONG[:50]))[0] == beginning
    finally:
        engine.close()
