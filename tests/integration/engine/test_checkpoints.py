"""Models with a window or recurrent layers: a conversation that comes back computes its new tokens only."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import pickle
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve_app.base.formats import CacheLayout
from serve_app.config.schema import EngineConfig
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.engine.backends.llama_cpp import LlamaBackend
from serve_app.engine.cache.contents import CHECKPOINTS_OF_SLOT
from serve_app.engine.cache.packing import pack
from serve_app.engine.cache.prefixes import Prefix
from serve_app.kernels.llama import library
from serve_app.kernels.llama.model import Model
from serve_app.run.sizing import CacheNeeds, ModelNeeds
from tests.integration.engine.opening import opener
from tests.integration.models.forgetful_models import FORGETFUL, WINDOW

# Without flash attention, logits hardly depend on how a prompt was cut.
OPTIONS = EngineOptions(
    n_slots=2,
    n_ctx_slot=2560,
    threads=1,
    n_batch=256,
    max_stall_ms=math.inf,
    flash_attn=False,
    kv_unified=False,
    profile_limit_s=0,
)
_RNG = np.random.default_rng(1)
_IDS = itertools.count()
Tokens = tuple[int, ...]


def text(n: int) -> Tokens:
    """Tokens of nothing special."""
    return tuple(_RNG.integers(20, 450, n).tolist())


CHAT, OTHER, SECOND = text(2000), text(1500), text(60)
# What a template makes of an answer may differ from what was generated, and from the end of its prompt.
EDITED = (*CHAT[:-4], *text(20), *SECOND)
KINDS = list(FORGETFUL)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind."""
    folder = tmp_path_factory.mktemp("models")
    for kind, write in FORGETFUL.items():
        write(folder / f"{kind}.gguf")
    return {kind: folder / f"{kind}.gguf" for kind in FORGETFUL}


opened = opener(OPTIONS)


async def answer(engine: Engine, prompt: Tokens, n_tokens: int = 12) -> tuple[Tokens, int]:
    """The tokens that follow, and how many of the prompt's were computed."""
    sampling = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
    request = GenerationRequest(str(next(_IDS)), prompt, sampling)
    deltas = [delta async for delta in engine.submit(request)]
    assert deltas[-1].end is not None
    assert deltas[-1].end.error is None
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    return tokens, len(prompt) - deltas[-1].end.usage.cached_tokens


_answers: dict[tuple[Path, Tokens], Tokens] = {}


async def anew(path: Path, prompt: Tokens) -> Tokens:
    """The answer of an engine that has seen nothing before."""
    if (path, prompt) not in _answers:
        async with opened(path, n_slots=1) as fresh:
            _answers[path, prompt] = (await answer(fresh, prompt))[0]
    return _answers[path, prompt]


async def expect_a_tie(engine: Engine, prompt: Tokens, answer: Tokens, expected: Tokens) -> None:
    """The two tokens where the answers part are as likely, so that the order of sums decides: a unified
    cache has its cells in the order of other requests. llama.cpp rounds keys, values and what its GELU
    reads to f16, which makes up to 0.006 of a log-probability out of that order."""
    part = next(
        i for i, pair in enumerate(zip(answer, expected, strict=True)) if len(set(pair)) > 1
    )
    request = GenerationRequest(
        str(next(_IDS)),
        (*prompt, *expected[:part]),
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=2),
    )
    (likeliest,) = [item async for delta in engine.submit(request) for item in delta.logprobs]
    (first, first_logprob), (second, second_logprob) = likeliest.top
    assert {first, second} == {answer[part], expected[part]}
    assert first_logprob == pytest.approx(second_logprob, abs=0.02)


async def expect_cheap(engine: Engine, path: Path, prompt: Tokens) -> None:
    """It is answered as if it were computed, for a twentieth of that."""
    said, n_computed = await answer(engine, prompt)
    assert n_computed <= len(prompt) / 20
    assert said == await anew(path, prompt)


@pytest.mark.parametrize("kv_unified", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_second_turn_computes_its_new_tokens(
    models: dict[str, Path], kind: str, kv_unified: bool
) -> None:
    """One that goes on where the first ended, one whose first turn reads otherwise now, and a second
    answer to the same."""
    path = models[kind]
    async with opened(path, kv_unified=kv_unified) as engine:
        said, n_computed = await answer(engine, CHAT)
        assert n_computed == len(CHAT)
        assert len(set(said)) > 3  # a model that repeats itself would show nothing
        for prompt in ((*CHAT, *said, *SECOND), EDITED, CHAT):
            await expect_cheap(engine, path, prompt)
        assert 0 < engine.stats().cache.checkpoints <= 2 * CHECKPOINTS_OF_SLOT


@pytest.mark.parametrize("kind", KINDS)
async def test_without_checkpoints_it_is_computed_anew(models: dict[str, Path], kind: str) -> None:
    async with opened(models[kind], checkpoint_ram_bytes=0) as engine:
        await answer(engine, CHAT)
        assert engine.stats().cache.checkpoints == 0
        said, n_computed = await answer(engine, EDITED)
    assert said == await anew(models[kind], EDITED)
    assert n_computed == len(EDITED) or kind == "gemma3"  # its window's cells are still there


@pytest.mark.parametrize("kind", KINDS)
async def test_after_others_had_the_slot(models: dict[str, Path], kind: str) -> None:
    path = models[kind]
    async with opened(path, n_slots=1, cache_ram_bytes=2**28) as engine:
        await answer(engine, CHAT)
        await answer(engine, OTHER)
        await expect_cheap(engine, path, EDITED)
        assert engine.stats().tokens.restored_tokens >= len(CHAT) - 8


@pytest.mark.parametrize("kind", KINDS)
async def test_after_a_restart(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    kept = {"cache_ram_bytes": 2**28, "prefix_folder": tmp_path}
    async with opened(models[kind], **kept) as engine:
        await answer(engine, CHAT)
    async with opened(models[kind], **kept) as engine:
        await expect_cheap(engine, models[kind], EDITED)


@pytest.mark.parametrize("kind", KINDS)
async def test_from_a_slot_file(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    async with opened(models[kind], n_slots=1, slot_folder=tmp_path) as engine:
        await answer(engine, CHAT)
        saved = engine.slot_files.save(0, "chat")
    async with opened(models[kind], n_slots=1, slot_folder=tmp_path) as engine:
        assert engine.slot_files.restore(0, "chat").n_bytes == saved.n_bytes
        await expect_cheap(engine, models[kind], EDITED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
async def test_from_another_engine(models: dict[str, Path], kind: str, cut: bool) -> None:
    async with opened(models[kind]) as source:
        await answer(source, CHAT)
        payload = source.prefixes.export_prefix(Prefix("", pack(CHAT)))
        assert payload is not None
        payload = pickle.loads(pickle.dumps(payload, protocol=5))
    async with opened(models[kind], cache_ram_bytes=2**28) as engine:
        n_tokens = len(payload.prefix.tokens) // 4
        n_bytes = engine.prefixes.import_prefix(payload, len(CHAT) - 2 if cut else n_tokens)
        await expect_cheap(engine, models[kind], EDITED)
        assert engine.stats().cache.received_bytes == n_bytes > 0


@pytest.mark.parametrize("kv_unified", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_from_a_slot_that_is_busy(
    models: dict[str, Path], kind: str, kv_unified: bool
) -> None:
    """A copy of it goes back to a checkpoint, and the slot itself goes on as if nothing had been."""
    path = models[kind]
    async with opened(path, kv_unified=kv_unified) as engine:
        await answer(engine, CHAT, 1)
        sampling = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
        said: Tokens = ()
        async for delta in engine.submit(GenerationRequest("long", CHAT, sampling)):
            if len(said) == 20:
                await expect_cheap(engine, path, EDITED)
            said += delta.token_ids
    async with opened(path, n_slots=1) as fresh:
        assert said == (await answer(fresh, CHAT, 80))[0]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_prompts_begin_with_is_known_from_the_second_on(
    models: dict[str, Path], kind: str
) -> None:
    shared = text(1500)
    first, second, third = ((*shared, *text(300)) for _ in range(3))
    async with opened(models[kind]) as engine:
        for prompt in (first, second):
            await answer(engine, prompt)
        said, n_computed = await answer(engine, third)
    assert n_computed == 300
    assert said == await anew(models[kind], third)


@pytest.mark.parametrize("kind", KINDS)
async def test_those_who_come_together_compute_their_beginning_once(
    models: dict[str, Path], kind: str
) -> None:
    shared = text(1500)
    prompts = [(*shared, *text(100)) for _ in range(4)]
    async with opened(models[kind], n_slots=4) as engine:
        said = await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))
        assert engine.stats().tokens.prompt_tokens == len(shared) + 4 * 100
    assert [tokens for tokens, _ in said] == [await anew(models[kind], one) for one in prompts]


@pytest.mark.parametrize("kv_unified", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_eight_long_chats_beside_each_other(
    models: dict[str, Path], kind: str, kv_unified: bool
) -> None:
    """Slots that began as copies of others, and went on far past their windows; nobody fails, and nobody is
    preempted for want of a window's cells."""
    path, shared = models[kind], text(600)
    sizes = {"n_slots": 8, "n_ctx_slot": 2048, "n_batch": 128, "kv_unified": kv_unified}
    async with opened(path, **sizes) as engine:
        chats: list[Tokens] = [(*shared, *text(40 * i)) for i in range(1, 9)]
        for _ in range(2):
            said = await asyncio.gather(*(answer(engine, chat, 150) for chat in chats))
            assert {len(tokens) for tokens, _ in said} == {150}
            chats = [
                (*chat, *new[0][:-3], *text(50)) for chat, new in zip(chats, said, strict=True)
            ]
        assert max(n_computed for _, n_computed in said) <= 250
        stats = engine.stats()
    assert stats.requests.preemptions == 0
    assert stats.requests.ended == {"length": 16}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cache_that_is_too_small_for_all(models: dict[str, Path], kind: str) -> None:
    """Some lose their slot, and go on later."""
    sizes = {"n_slots": 3, "n_ctx_slot": 1024, "n_ctx": 1280, "kv_unified": True}
    prompts = [text(300) for _ in range(6)]
    async with opened(models[kind], cache_ram_bytes=2**26, **sizes) as engine:
        said = await asyncio.gather(*(answer(engine, prompt, 200) for prompt in prompts))
        assert kind == "mamba" or engine.stats().requests.preemptions > 0
    assert {len(tokens) for tokens, _ in said} == {200}


@pytest.mark.parametrize("kv_unified", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_after_profiling_and_with_drafts(
    models: dict[str, Path], kind: str, kv_unified: bool
) -> None:
    prompts = [text(300) for _ in range(3)]
    profiled = {"n_slots": 3, "profile_limit_s": 0.5, "kv_unified": kv_unified}
    async with opened(models[kind], **profiled) as engine:
        assert engine.stats().costs.step_time["decode_ms"]
        said = await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))
    assert [tokens for tokens, _ in said] == [await anew(models[kind], one) for one in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_cache_never_changes(models: dict[str, Path], kind: str) -> None:
    options = replace(OPTIONS, kv_unified=None, profile_limit_s=0.5)
    with closing(LlamaBackend(models[kind], options)) as backend:
        assert backend.cache_plan.profile.decode_s
        assert backend.modes is None


@pytest.mark.parametrize("kv_unified", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_comes_is_answered_as_if_it_were_computed(
    models: dict[str, Path], kind: str, kv_unified: bool
) -> None:
    """Prompts that begin like others, alone and together, some of which are given up."""
    rng = random.Random(f"{kind} {kv_unified}")
    said: dict[tuple[Tokens, int], Tokens] = {}
    begun = [tuple(rng.choices(range(20, 450), k=300))]

    async def ask_one(engine: Engine) -> None:
        beginning = rng.choice(begun)[: rng.choice([40, 150, 290, 2000])]
        prompt = (*beginning, *rng.choices(range(20, 450), k=rng.choice([1, 10, 60, 200])))[:1300]
        n_tokens = rng.choice([1, 8, 40])
        asked = asyncio.ensure_future(answer(engine, prompt, n_tokens))
        if rng.random() < 0.15:
            await asyncio.sleep(0.05 * rng.random())
            asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            said[prompt, n_tokens], _ = await asked
            begun.append((*prompt, *said[prompt, n_tokens]))

    sizes: dict[str, Any] = {"n_ctx_slot": 1536, "n_batch": 128, "kv_unified": kv_unified}
    sizes["cache_ram_bytes"] = rng.choice([0, 2**20, 2**26])
    sizes["checkpoint_ram_bytes"] = rng.choice([2**18, 2**26])
    async with opened(models[kind], n_slots=3, **sizes) as engine:
        for _ in range(10):
            await asyncio.gather(*(ask_one(engine) for _ in range(rng.choice([1, 1, 2, 4]))))
        assert engine.stats().tokens.cached_tokens > 0
    async with opened(models[kind], n_slots=1, **sizes | {"checkpoint_ram_bytes": 0}) as fresh:
        for (prompt, n_tokens), tokens in said.items():
            await answer(fresh, (1, 2, 3), 1)  # whatever was there is gone
            expected, _ = await answer(fresh, prompt, n_tokens)
            if tokens != expected:
                await expect_a_tie(fresh, prompt, tokens, expected)


@pytest.mark.parametrize("kind", KINDS)
async def test_prefixes_that_share_a_beginning_serve_it_by_their_checkpoints(
    models: dict[str, Path], kind: str
) -> None:
    """Of several in the store, the one with a checkpoint there, whichever shares most."""
    shared = text(1000)
    first, second, third = ((*shared, *text(500)) for _ in range(3))
    async with opened(models[kind], n_slots=1, cache_ram_bytes=2**28) as engine:
        for prompt in (first, second, OTHER):
            await answer(engine, prompt)
        said, n_computed = await answer(engine, third)
    assert n_computed == 500
    assert said == await anew(models[kind], third)


async def test_what_is_planned_for_a_window_is_what_it_takes(models: dict[str, Path]) -> None:
    needs = ModelNeeds.of(Model(models["gemma3"], vocab_only=True))
    assert needs.window == WINDOW
    assert needs.window_share == pytest.approx(5 / 6)
    planned = CacheNeeds.of(EngineConfig(n_batch=256), needs).n_bytes(2, 2 * OPTIONS.n_ctx_slot)
    async with opened(models["gemma3"]) as engine:
        assert engine.stats().memory.cache_bytes == pytest.approx(
            planned, rel=0.15
        )  # cells come by 256


@pytest.mark.parametrize("kind", ["mamba", "lfm2", "qwen35", "nemotron_h"])
async def test_what_is_planned_for_recurrent_layers_is_what_they_take(
    models: dict[str, Path], kind: str
) -> None:
    """Past states, which drafts need, take of what checkpoints have."""
    needs = ModelNeeds.of(Model(models[kind], vocab_only=True))
    planned = CacheNeeds.of(EngineConfig(), needs).n_bytes(2, 2 * OPTIONS.n_ctx_slot)
    checkpoint_ram_bytes = 2**20
    async with opened(models[kind], checkpoint_ram_bytes=checkpoint_ram_bytes) as engine:
        rewind_bytes = engine._backend.memory.rewind_bytes
        present_bytes = engine.stats().memory.cache_bytes - rewind_bytes
        # llama.cpp says both in hundredths of a MiB.
        assert present_bytes == pytest.approx(planned, abs=0.02 * 2**20)
        assert (rewind_bytes > 0) is (kind in ("lfm2", "nemotron_h"))
        assert rewind_bytes <= checkpoint_ram_bytes / 2
        budget_bytes = engine.core.cache.checkpoints._budget_bytes
        assert budget_bytes == checkpoint_ram_bytes - rewind_bytes


@pytest.mark.parametrize("kv_unified", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_memory_beside_llama_servers(
    models: dict[str, Path], kind: str, kv_unified: bool
) -> None:
    """The cache without past states, and the checkpoints of as many slots as have a conversation."""
    import llama_cpp

    options = {"n_slots": 4, "n_batch": 512, "kv_unified": kv_unified}
    async with opened(models[kind], **options) as engine:
        said, _ = await answer(engine, CHAT)
        await answer(engine, (*CHAT, *said, *SECOND))
        stats = engine.stats()
        cache_bytes = stats.memory.cache_bytes - engine._backend.memory.rewind_bytes
    model = Model(models[kind])
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = 4 * OPTIONS.n_ctx_slot, 4
    params.n_batch, params.n_ubatch = 2048, 512
    params.swa_full, params.kv_unified = False, kv_unified
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    with library.capture_log() as lines:
        context = llama_cpp.llama_init_from_model(model.pointer, params)
    llama_cpp.llama_free(context)
    theirs = CacheLayout.read(lines, 0, 4)
    assert theirs is not None
    assert cache_bytes <= 1.01 * theirs.cache_bytes
    # It makes two at the end of each prompt.
    per_checkpoint = stats.cache.checkpoint_bytes / stats.cache.checkpoints
    assert stats.cache.checkpoints <= CHECKPOINTS_OF_SLOT
    assert cache_bytes + stats.cache.checkpoint_bytes <= 1.2 * (
        theirs.cache_bytes + 4 * per_checkpoint
    )
