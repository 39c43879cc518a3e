"""OpenVINO behind the engine, beside llama.cpp with the same files."""

from __future__ import annotations

import asyncio
import itertools
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadtests.tune import perplexity
from serve_app.base.errors import ConfigError
from serve_app.base.formats import EmbeddingPooling
from serve_app.base.sampling import LogitBias
from serve_app.base.values.answers import TokenLogprobs
from serve_app.engine import (
    Engine,
    EngineOptions,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenDelta,
)
from serve_app.kernels.openvino.architectures import ARCHITECTURES
from serve_app.prompt.conversation import Turn
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.integration.engine.test_draft_models import as_if_drafts_were_free
from tests.integration.models.forgetful_models import FORGETFUL

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

from tests.integration.openvino.bf16 import COMPUTES_BF16

OPTIONS = EngineOptions(
    n_slots=4,
    n_ctx_slot=256,
    threads=2,
    n_batch=64,
    profile_limit_s=0,
    cache_ram_bytes=2**24,
    backend="openvino",
)
QUESTIONS = (
    "What is the capital of France?",
    "What is 17 plus 25?",
    "Write a list of three animals.",
    "Tell me a story about a fox.",
)
TOKENIZER = Tokenizer(BUILTIN_MODEL)
numbers = itertools.count()
LONG = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def engine(folder: None) -> Iterator[Engine]:
    opened = Engine.load(BUILTIN_MODEL, OPTIONS)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def other() -> Iterator[Engine]:
    opened = Engine.load(BUILTIN_MODEL, replace(OPTIONS, backend="llama.cpp"))
    yield opened
    opened.close()


async def ask(
    engine: Engine, text: str, params: SamplingParams, **more: object
) -> tuple[list[int], list[TokenDelta]]:
    name, prompt = str(next(numbers)), TOKENIZER.encode_chat([Turn("user", (text,))])
    request = GenerationRequest(name, prompt, params, **more)  # type: ignore[arg-type]
    async with engine.submit(request) as stream:
        deltas = [delta async for delta in stream]
    return [token for delta in deltas for token in delta.token_ids], deltas


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


async def test_greedy_texts_are_llama_cpps(engine: Engine, other: Engine) -> None:
    params = replace(GREEDY, ignore_eos=False)
    for text in QUESTIONS:
        found, _ = await ask(engine, text, params)
        expected, _ = await ask(other, text, params)
        assert found == expected


async def test_texts_do_not_depend_on_who_shares_the_batch(engine: Engine) -> None:
    alone = [(await ask(engine, text, GREEDY))[0] for text in QUESTIONS]
    together = await asyncio.gather(*(ask(engine, text, GREEDY) for text in QUESTIONS * 2))
    assert [tokens for tokens, _ in together] == alone * 2


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(SamplingParams(temperature=0.9, seed=7, top_k=0, top_p=1.0), id="all"),
        pytest.param(SamplingParams(temperature=0.9, seed=7), id="top_k"),
        pytest.param(SamplingParams(temperature=0, repeat_penalty=1.3), id="penalty"),
        pytest.param(
            SamplingParams(temperature=0, logit_bias=LogitBias.of({300: 50.0})), id="bias"
        ),
    ],
)
async def test_samplers_pick_as_with_llama_cpp(
    engine: Engine, other: Engine, params: SamplingParams
) -> None:
    params = replace(params, max_tokens=8, ignore_eos=True)
    found, _ = await ask(engine, QUESTIONS[3], params)
    expected, _ = await ask(other, QUESTIONS[3], params)
    assert found == expected


async def test_log_probabilities_are_llama_cpps(engine: Engine, other: Engine) -> None:
    params = replace(GREEDY, max_tokens=4, logprobs=5)
    _, ours = await ask(engine, QUESTIONS[0], params)
    _, theirs = await ask(other, QUESTIONS[0], params)
    for mine, other_one in zip(scores(ours), scores(theirs), strict=True):
        assert math.exp(mine.logprob) == pytest.approx(math.exp(other_one.logprob), abs=0.02)
        likeliest = [math.exp(value) for _, value in mine.top]
        assert likeliest == pytest.approx([math.exp(v) for _, v in other_one.top], abs=0.02)


def scores(deltas: Sequence[TokenDelta]) -> list[TokenLogprobs]:
    return [one for delta in deltas for one in delta.logprobs or ()]


async def test_a_common_beginning_is_shared(engine: Engine) -> None:
    before = engine.stats()
    first, _ = await ask(engine, LONG, GREEDY)
    together = await asyncio.gather(*(ask(engine, LONG, GREEDY, client=f"u{i}") for i in range(3)))
    assert [tokens for tokens, _ in together] == [first] * 3
    n_prompt = len(engine.tokenize(LONG))
    assert (
        engine.stats().tokens.prompt_tokens - before.tokens.prompt_tokens < n_prompt + 3 * 8
    )  # and not four prompts


async def test_a_prefix_comes_back_from_memory(folder: None) -> None:
    engine = Engine.load(BUILTIN_MODEL, replace(OPTIONS, n_slots=1))
    try:
        first, _ = await ask(engine, LONG, GREEDY)
        await ask(engine, QUESTIONS[0] * 12, GREEDY)
        again, _ = await ask(engine, LONG, GREEDY)
        assert again == first
        assert engine.stats().tokens.restored_tokens > len(engine.tokenize(LONG)) // 2
    finally:
        engine.close()


async def test_a_prefix_travels_to_another_engine(engine: Engine, folder: None) -> None:
    expected, _ = await ask(engine, LONG, GREEDY)
    for end in ("One", "Two"):
        await ask(engine, LONG + end, GREEDY)
    offered = max(engine.prefixes.offers(2), key=lambda one: len(one.prefix.tokens))
    payload = engine.prefixes.export_prefix(offered.prefix)
    assert payload is not None
    fresh = Engine.load(BUILTIN_MODEL, OPTIONS)
    try:
        fresh.prefixes.import_prefix(payload, 32)
        found, _ = await ask(fresh, LONG, GREEDY)
        assert found == expected
        assert fresh.stats().tokens.restored_tokens >= 32
    finally:
        fresh.close()


@pytest.mark.parametrize("n_before", [1, 7])
@pytest.mark.parametrize("is_lost_by_openvino", [True, False])
async def test_a_text_goes_on_in_a_replica_of_the_other_backend(
    engine: Engine, other: Engine, n_before: int, is_lost_by_openvino: bool
) -> None:
    """Tokens travel, KV does not."""
    lost, left = (engine, other) if is_lost_by_openvino else (other, engine)
    whole, _ = await ask(lost, QUESTIONS[0], GREEDY)
    rest, deltas = await ask(
        left, QUESTIONS[0], GREEDY, generated=tuple(whole[:n_before]), n_failovers=1
    )
    assert whole[:n_before] + rest == whole
    assert deltas[-1].end is not None
    assert deltas[-1].end.reason is FinishReason.LENGTH


async def test_a_prefix_of_the_other_backend_is_refused(engine: Engine, other: Engine) -> None:
    assert engine.core.backend.states.key != other.core.backend.states.key


async def test_a_request_that_is_aborted_leaves_others_as_they_are(engine: Engine) -> None:
    expected, _ = await ask(engine, QUESTIONS[0], GREEDY)
    request = GenerationRequest("gone", engine.tokenize(LONG * 1), replace(GREEDY, max_tokens=60))
    stream = engine.submit(request)
    beside = asyncio.create_task(ask(engine, QUESTIONS[0], GREEDY))
    async with stream as reading:
        async for _ in reading:
            engine.abort("gone")
    assert (await beside)[0] == expected
    (_, deltas) = await ask(engine, QUESTIONS[0], GREEDY)
    assert deltas[-1].end is not None
    assert deltas[-1].end.reason is FinishReason.LENGTH


async def test_a_full_context_ends_or_is_shifted(engine: Engine, other: Engine) -> None:
    endless = replace(GREEDY, max_tokens=OPTIONS.n_ctx_slot + 40)
    tokens, deltas = await ask(engine, QUESTIONS[3], endless)
    assert len(tokens) < OPTIONS.n_ctx_slot
    assert deltas[-1].end is not None
    assert deltas[-1].end.reason is FinishReason.LENGTH
    before = engine.stats().requests.context_shifts
    shifted, _ = await ask(engine, QUESTIONS[3], endless, context_shift=True)
    assert engine.stats().requests.context_shifts > before
    assert len(shifted) == endless.max_tokens
    assert shifted[: len(tokens)] == tokens
    expected, _ = await ask(other, QUESTIONS[3], endless, context_shift=True)
    assert shifted[: len(tokens) + 20] == expected[: len(tokens) + 20]


async def test_chunks_of_a_prompt_are_taken_from_other_places(engine: Engine) -> None:
    await ask(engine, "I say: " + LONG + "One", GREEDY)
    before = engine.stats()
    tokens, _ = await ask(engine, LONG + "One", GREEDY, n_cache_reuse=16)
    assert len(tokens) == GREEDY.max_tokens
    computed = engine.stats().tokens.prompt_tokens - before.tokens.prompt_tokens
    assert computed < len(engine.tokenize(LONG)) // 2


@pytest.mark.parametrize("pooling", ["mean", "last", "none"])
async def test_embeddings_are_llama_cpps(pooling: EmbeddingPooling, folder: None) -> None:
    vectors = []
    for backend in ("openvino", "llama.cpp"):
        options = replace(OPTIONS, backend=backend, embedding_pooling=pooling)
        engine = Engine.load(BUILTIN_MODEL, options)
        try:
            texts = [engine.tokenize(text) for text in (*QUESTIONS, LONG * 2)]
            generating = asyncio.create_task(ask(engine, QUESTIONS[0], GREEDY))
            vectors.append(await asyncio.wrap_future(engine.embed(texts, "e")))
            assert await generating
        finally:
            engine.close()
    found, expected = vectors
    assert found.shape == expected.shape
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1)
    cosines /= np.linalg.norm(expected, axis=1)
    assert cosines.min() > 0.999


async def test_a_draft_model_of_llama_cpps_proposes(folder: None) -> None:
    options = replace(OPTIONS, draft=BUILTIN_MODEL, speculate=False, profile_limit_s=1.0)
    engine = Engine.load(BUILTIN_MODEL, options)
    as_if_drafts_were_free(engine)
    plain = Engine.load(BUILTIN_MODEL, replace(OPTIONS, speculate=False))
    try:
        for text in QUESTIONS:
            assert (await ask(engine, text, GREEDY))[0] == (await ask(plain, text, GREEDY))[0]
        stats = engine.stats()
        assert stats.speculation.accepted_tokens > stats.speculation.drafted_tokens // 2 > 0
        assert engine.stats().memory.weights_bytes > plain.stats().memory.weights_bytes
    finally:
        engine.close()
        plain.close()


@pytest.mark.parametrize("kind", sorted(FORGETFUL.keys() - ARCHITECTURES.keys()))
def test_models_that_it_cannot_serve_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"{kind}.gguf"
    FORGETFUL[kind](path)
    with pytest.raises(ConfigError, match=r"llama\.cpp"):
        Engine.load(path, OPTIONS)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_unified": True},
        {"flash_attn": False},
        {"cache_type_k": "q8_0"},
        {"cache_type_k": "bf16"},
        {"threads_batch": 1},
    ],
)
def test_options_that_it_lacks_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.backend: openvino does not support"):
        replace(OPTIONS, **options)  # type: ignore[arg-type]


def test_batches_are_profiled(folder: None) -> None:
    engine = Engine.load(BUILTIN_MODEL, replace(OPTIONS, profile_limit_s=2.0))
    curve = engine.stats().costs.step_time
    engine.close()
    assert curve
    assert np.isfinite(engine.stats().costs.token_s)


def test_both_backends_read_a_text_alike(capsys: pytest.CaptureFixture[str]) -> None:
    backends = "llama.cpp,openvino,openvino-bf16" if COMPUTES_BF16 else "llama.cpp,openvino"
    arguments = "--model", str(BUILTIN_MODEL), "--windows", "4", "--threads", "2"
    perplexity.main([*arguments, "--backends", backends])
    heading, _, *rows = capsys.readouterr().out.splitlines()
    assert heading.endswith("508 tokens in 4 windows")
    found = {cells[1].strip(): float(cells[2]) for row in rows[2:] if (cells := row.split("|"))}
    assert found["openvino"] == pytest.approx(found["llama.cpp"], rel=0.01)
    assert len(found) == 2 or found["openvino-bf16"] == pytest.approx(found["llama.cpp"], rel=0.05)


def test_google_is_not_told_that_openvino_is_in_use() -> None:
    """OpenVINO tells it with this module at each import, and forks a process for it."""
    code = (
        "import serve_app.kernels.openvino.graph, openvino.tools.ovc.telemetry_utils as telemetry;"
        "print(telemetry.tm.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "openvino.tools.ovc.telemetry_stub\n"
