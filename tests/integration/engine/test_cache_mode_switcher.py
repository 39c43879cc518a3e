"""The kind of cache changes under a real model, and nobody sees it in a text."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.engine.backends import llama_cpp
from serve_app.engine.backends.llama_cpp import LlamaBackend
from serve_app.engine.backends.state_layout import Layout, convert_state
from serve_app.engine.choice.plan import REPACKED, CachePlan, Mode, Plan
from serve_app.engine.core import loop
from serve_app.engine.costs import profile_cache
from serve_app.engine.costs.cost_model import CostModel, Profile
from serve_app.kernels.llama.context import Context, ContextOptions
from serve_app.kernels.llama.model import Model
from tests.unit.engine.harness import PATIENCE_S
from tools.random_models.model import SHAPES, write_random_gguf

SYSTEM = "You are a helpful assistant who knows all about old houses by the sea. " * 2
PROMPTS = [SYSTEM + name for name in ("Ann", "Bob", "Cleo", "Dan")]
OWN = [name + " " + SYSTEM for name in ("Ann", "Bob", "Cleo", "Dan")]
OPTIONS = EngineOptions(
    n_slots=4, n_ctx_slot=256, threads=1, n_batch=64, flash_attn=False, cache_ram_bytes=2**26
)
SPLIT, UNIFIED = Mode(False, False), Mode(False, True)
COUNTS = (1, 2, 4)
# In a unified cache a batch takes as long as there are cells: with prompts of their own as in a split one.
SHALLOW = {n: 0.1 * n for n in COUNTS}
DEEP = Profile(
    SHALLOW, {16: 0.1, 64: 0.4}, {}, 100, {n: 20.0 * n for n in COUNTS}, {16: 0.1, 64: 0.4}
)
FLAT = replace(DEEP, deep_decode_s=dict.fromkeys(COUNTS, 20.0))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "exact.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    return path


@pytest.fixture(autouse=True)
def profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches take longer at depth in a split cache; only own cells count there."""

    def choose_cache(_plan: Plan, _model: Model, options: EngineOptions, *_: object) -> CachePlan:
        kind = options.kv_unified
        if kind is not None:
            profile = FLAT if kind else DEEP
            return CachePlan(Mode(False, kind), "as configured", profile)
        return CachePlan(SPLIT, "measured", DEEP, (UNIFIED, FLAT))

    monkeypatch.setattr(llama_cpp, "choose_cache", choose_cache)
    for method in ("observe_decode", "observe_prefill"):  # a profile is no fiction elsewhere
        monkeypatch.setattr(CostModel, method, lambda *measured: None)
    monkeypatch.setattr(loop, "_REST_S", 0.05)


async def tell(engine: Engine, prompt: str, n: int = 12) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    request = GenerationRequest(prompt, engine.tokenize(prompt), sampling)
    return [token async for delta in engine.submit(request) for token in delta.token_ids]


async def tell_all(engine: Engine, prompts: list[str]) -> list[list[int]]:
    return list(await asyncio.gather(*(tell(engine, prompt) for prompt in prompts)))


async def alone(path: Path, prompts: list[str]) -> list[list[int]]:
    """What they say one after the other, with nothing cached."""
    engine = Engine.load(path, replace(OPTIONS, n_slots=1, kv_unified=False, cache_ram_bytes=0))
    try:
        return [await tell(engine, prompt) for prompt in prompts]
    finally:
        engine.close()


async def test_a_common_prefix_changes_the_cache_and_no_text(path: Path) -> None:
    expected = await alone(path, PROMPTS + OWN)
    engine = Engine.load(path, OPTIONS)
    try:
        assert not engine.stats().compute.kv_unified
        # Requests that a busy machine happens to run one after the other show the engine nothing.
        async with asyncio.timeout(PATIENCE_S):
            while not engine.stats().compute.kv_unified:
                assert await tell_all(engine, PROMPTS) == expected[:4]
                await asyncio.sleep(4 * loop._REST_S)
        assert "by the traffic" in engine.stats().compute.mode_reason
        assert await tell_all(engine, PROMPTS) == expected[:4]
        assert await tell_all(engine, OWN) == expected[4:]
    finally:
        engine.close()


@pytest.mark.parametrize("kv_unified", [False, True])
async def test_what_is_configured_never_changes(path: Path, kv_unified: bool) -> None:
    engine = Engine.load(path, replace(OPTIONS, kv_unified=kv_unified))
    try:
        assert await tell_all(engine, PROMPTS) == await alone(path, PROMPTS)
        await asyncio.sleep(0.2)
        assert engine.stats().compute.kv_unified is kv_unified
        assert engine.stats().compute.mode_reason == "as configured"
    finally:
        engine.close()


async def test_prompts_of_their_own_change_nothing(path: Path) -> None:
    engine = Engine.load(path, OPTIONS)
    try:
        assert await tell_all(engine, OWN) == await alone(path, OWN)
        await asyncio.sleep(0.2)
        assert not engine.stats().compute.kv_unified
    finally:
        engine.close()


async def test_what_was_learned_is_kept_for_the_next_start(path: Path, tmp_path: Path) -> None:
    backend, learned = (
        LlamaBackend(path, replace(OPTIONS, profile_folder=tmp_path), plan=Plan(name="a")),
        replace(DEEP, masked=0.5),
    )
    try:
        assert backend.modes is not None
        with mock.patch.object(profile_cache, "save", wraps=profile_cache.save) as save:
            backend.modes.change("learned", learned)
        assert save.call_count == 1
    finally:
        backend.close()
    cache = CachePlan(UNIFIED, "learned", FLAT, (SPLIT, learned))
    kept = profile_cache.load(tmp_path, "a", Plan)
    assert kept == Plan(name="a", caches={str(REPACKED): cache})


@pytest.mark.parametrize("flash_attn", [False, True])
def test_states_go_from_any_kind_of_cache_to_any_other(path: Path, flash_attn: bool) -> None:
    model = Model(path)
    tokens = model.tokenize(SYSTEM, add_special=True, parse_special=True)
    rows = [(token, i, 1, i == len(tokens) - 1) for i, token in enumerate(tokens)]
    context = Context(
        model,
        ContextOptions(n_seq_max=3, n_ctx_slot=256, n_batch=256, threads=1, flash_attn=flash_attn),
    )
    try:
        context.decode(rows[:-1])
        state = context.save(1)
        context.decode(rows[-1:])
        expected = context.logits(0).copy()
        for kind in (Mode(True, True), Mode(False, True), Mode(False, False), Mode(True, False)):
            context.become(flash_attn=kind.flash_attn, kv_unified=kind.kv_unified)
            n_streams = 1 if kind.kv_unified else 3
            context.restore(2, convert_state(state, Layout(n_streams, not kind.flash_attn)))
            token, position, _, _ = rows[-1]
            state = context.save(2)
            context.decode([(token, position, 2, True)])
            assert abs(context.logits(0) - expected).max() < 0.05 * abs(expected).max()
    finally:
        context.close()
