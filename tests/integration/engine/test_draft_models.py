"""Draft models with real files: the same greedy and the same seeded text, and what cannot be a draft.

With the built-in model. Without flash attention and with Q8_0 weights its logits do not depend on how the
work was cut: the tokens must be equal. Its drafts, of any format, may round as they like.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from serve_app.cli.measure.quality import quantised_file
from serve_app.engine import (
    ConfigError,
    Engine,
    EngineOptions,
    GenerationRequest,
    SamplingParams,
    TokenStream,
)
from serve_app.engine.backends.draft_model import check_draft
from serve_app.engine.costs.cost_model import CostModel
from serve_app.engine.guests.drafts.drafter import Drafter
from serve_app.engine.guests.drafts.drafting import Drafting
from serve_app.kernels.llama.model import Model
from serve_app.prompt.conversation import Turn
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.integration.models.forgetful_models import write_mamba
from tools.random_models.model import SHAPES, write_random_gguf

TOKENIZER = Tokenizer(BUILTIN_MODEL)
PROMPTS = [
    TOKENIZER.encode_chat([Turn("user", (question,))])
    for question in (
        "Tell me a story about a brave fox.",
        "Name three fruits.",
        "What is the capital of Italy?",
        "Tell me a story about a brave fox. " * 40,
    )
]
OPTIONS = EngineOptions(
    n_slots=4,
    n_ctx_slot=1024,
    threads=1,
    n_batch=128,
    flash_attn=False,
    kv_unified=False,
    speculate=False,
    profile_limit_s=0.5,
)
SEEDS = range(24)


def as_if_drafts_were_free(engine: Engine) -> None:
    """As on a machine on which they cost nothing."""
    model, draft = _costs_of(engine)
    for costs, names in ((model, ["verify_s"]), (draft, ["verify_s", "decode_s", "prefill_s"])):
        _take(1e-6, costs, names)


def as_if_every_batch_took_as_long(engine: Engine) -> None:
    """As on a machine that takes as long for a batch of the draft as for a batch of the model."""
    for costs in _costs_of(engine):
        _take(1e-3, costs, ["steps_s", "verify_s", "decode_s", "prefill_s"])


def _costs_of(engine: Engine) -> tuple[CostModel, CostModel]:
    drafter = engine.core.guest(Drafting)._drafter
    assert isinstance(drafter, Drafter)
    return engine.core.costs, drafter._costs


def _take(seconds: float, costs: CostModel, names: list[str]) -> None:
    for name in names:
        mock.patch.object(costs, name, return_value=seconds).start()


@pytest.fixture(scope="module")
def q4_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, quantised once more."""
    return quantised_file(BUILTIN_MODEL, "Q4_0", tmp_path_factory.mktemp("draft"), 1)


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    engine = Engine.load(BUILTIN_MODEL, OPTIONS)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=["itself", "Q4_0"])
def drafted(request: pytest.FixtureRequest, q4_gguf: Path) -> Iterator[Engine]:
    draft = {"itself": BUILTIN_MODEL, "Q4_0": q4_gguf}[request.param]
    engine = Engine.load(BUILTIN_MODEL, replace(OPTIONS, draft=draft))
    as_if_drafts_were_free(engine)
    yield engine
    engine.close()


def say(engine: Engine, *requests: tuple[tuple[int, ...], SamplingParams]) -> list[list[int]]:
    """The answers to prompts that arrive together."""

    async def read(stream: object) -> list[int]:
        assert isinstance(stream, TokenStream), stream
        return [token async for delta in stream for token in delta.token_ids]

    async def run() -> list[list[int]]:
        streams = engine.submit_many(
            [GenerationRequest(str(n), *one) for n, one in enumerate(requests)]
        )
        return await asyncio.gather(*map(read, streams))

    return asyncio.run(run())


def test_greedy_text_is_the_same(alone: Engine, drafted: Engine) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=60)
    expected = [say(alone, (prompt, greedy))[0] for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert say(drafted, (prompt, greedy)) == [answer]
    assert say(drafted, *((prompt, greedy) for prompt in PROMPTS)) == expected
    stats = drafted.stats()
    assert stats.speculation.accepted_proposed_tokens > stats.speculation.proposed_tokens / 2
    assert stats.speculation.proposed_tokens > 60


def test_seeded_text_is_the_same(alone: Engine, drafted: Engine) -> None:
    """And so the distribution: each seed draws what it draws without a draft."""
    before = drafted.stats()
    found: list[Counter[tuple[int, ...]]] = []
    for engine in (alone, drafted):
        answers = Counter[tuple[int, ...]]()
        for seed in SEEDS:
            sampling = SamplingParams(temperature=1.3, seed=seed, max_tokens=16)
            answers[tuple(say(engine, (PROMPTS[0], sampling))[0])] += 1
        found.append(answers)
    assert found[0] == found[1]
    assert len(found[0]) > len(SEEDS) / 2
    stats = drafted.stats()
    n_proposed = stats.speculation.proposed_tokens - before.speculation.proposed_tokens
    accepted_before = before.speculation.accepted_proposed_tokens
    assert 0 < stats.speculation.accepted_proposed_tokens - accepted_before < n_proposed


def test_memory_counts_the_draft(alone: Engine, drafted: Engine) -> None:
    without, beside = alone.stats(), drafted.stats()
    assert beside.memory.weights_bytes > without.memory.weights_bytes
    assert beside.memory.cache_bytes == pytest.approx(1.5 * without.memory.cache_bytes)
    assert beside.memory.cache_bytes_per_slot > without.memory.cache_bytes_per_slot


def test_nothing_is_proposed_where_a_draft_takes_as_long_as_the_model() -> None:
    engine = Engine.load(BUILTIN_MODEL, replace(OPTIONS, draft=BUILTIN_MODEL))
    as_if_every_batch_took_as_long(engine)
    try:
        for prompt in PROMPTS:
            say(engine, (prompt, SamplingParams(temperature=0, max_tokens=40)))
        stats = engine.stats()
    finally:
        engine.close()
    assert (stats.speculation.proposed_tokens, stats.tokens.generated_tokens) == (0, 106)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    with pytest.raises(
        ConfigError, match=r"engine.draft: other.gguf has another vocabulary: it has"
    ):
        Engine.load(BUILTIN_MODEL, replace(OPTIONS, draft=path))


def test_a_token_that_differs_is_named(tmp_path: Path) -> None:
    for name, more in (("a", "<|here|>"), ("b", "<|there|>")):
        write_random_gguf(tmp_path / f"{name}.gguf", SHAPES["tiny"], "q8_0", more_control=[more])
    one, other = (Model(tmp_path / f"{name}.gguf", vocab_only=True) for name in "ab")
    with pytest.raises(ConfigError, match=r"its token 511 is '<\|there\|>', that of a.gguf '<\|he"):
        check_draft(one, other)


def test_a_recurrent_model_is_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "mamba.gguf"
    write_mamba(path)
    with pytest.raises(ConfigError, match=r"mamba\.gguf cannot take back what it proposed"):
        check_draft(Model(BUILTIN_MODEL, vocab_only=True), Model(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no model file"):
        Engine.load(BUILTIN_MODEL, replace(OPTIONS, draft=tmp_path / "none.gguf"))
