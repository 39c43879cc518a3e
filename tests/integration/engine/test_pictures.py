"""Pictures in real engines: what they change, what is shared, and what is computed once.

With random projectors: the text means nothing, but depends on every pixel that is seen.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serve_app.demo_model import BUILTIN_MODEL
from serve_app.demo_model.random_projector import SHAPES, write_random_projector
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.errors import ConfigError, InvalidRequestError, PromptTooLongError
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.types import PICTURE, Picture, SequenceEnd
from tests.integration.engine.opening import opener

TOKENIZER = Tokenizer(BUILTIN_MODEL)
OPTIONS = EngineOptions(
    n_slots=2,
    n_ctx_slot=512,
    threads=1,
    n_batch=128,
    flash_attn=False,
    kv_unified=False,
    speculate=False,
    profile_limit_s=0,
)
opened = opener(OPTIONS)
BEFORE, AFTER = TOKENIZER.encode("What is in "), TOKENIZER.tokenize("? I see", False, False)
MORE = TOKENIZER.tokenize(" How many are there?", False, False)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def drawn(seed: int) -> Picture:
    """Four squares of random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), np.uint8)
    return Picture.of(colours.repeat(20, 0).repeat(20, 1).tobytes(), 40, 40)


def asked(name: str, *pictures: Picture, after: tuple[int, ...] = AFTER) -> GenerationRequest:
    """A question about pictures."""
    places = (PICTURE,) * len(pictures)
    return GenerationRequest(name, (*BEFORE, *places, *after), GREEDY, pictures=pictures)


async def answer(engine: Engine, request: GenerationRequest) -> tuple[list[int], SequenceEnd]:
    """The answer's tokens, and its end."""
    tokens: list[int] = []
    async for delta in engine.submit(request):
        tokens += delta.token_ids
        if delta.end is not None:
            assert delta.end.error is None
            return tokens, delta.end
    raise AssertionError("no end")


@pytest.fixture(scope="module", params=["tiny-llava", "tiny-gemma3"])
def projector(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A projector for the built-in model: causal, and not."""
    path = tmp_path_factory.mktemp("projector") / f"{request.param}.gguf"
    write_random_projector(path, SHAPES[request.param], TOKENIZER.n_embd)
    return path


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A projector for the built-in model."""
    path = tmp_path_factory.mktemp("projector") / "llava.gguf"
    write_random_projector(path, SHAPES["tiny-llava"], TOKENIZER.n_embd)
    return path


async def test_an_answer_depends_on_the_picture_alone_and_is_the_same_in_a_shared_batch(
    projector: Path,
) -> None:
    async with opened(BUILTIN_MODEL, n_slots=1, projector=projector) as engine:
        alone = [(await answer(engine, asked(f"a{i}", drawn(i))))[0] for i in range(3)]
    async with opened(BUILTIN_MODEL, n_slots=4, projector=projector) as engine:
        text = GenerationRequest("text", (*BEFORE, *AFTER), GREEDY)
        shared = await asyncio.gather(
            *(answer(engine, asked(f"b{i}", drawn(i))) for i in range(3)), answer(engine, text)
        )
    assert [tokens for tokens, _ in shared[:3]] == alone
    assert len({tuple(tokens) for tokens in (*alone, shared[3][0])}) == 4


async def test_the_second_question_computes_its_words_only(projector: Path) -> None:
    async with opened(BUILTIN_MODEL, n_slots=1, projector=projector) as engine:
        seen = drawn(0)
        _, first = await answer(engine, asked("a", seen))
        second_tokens, second = await answer(engine, asked("b", seen, after=MORE))
        encoded = engine.stats().encoded_tiles
        fresh_tokens, other = await answer(engine, asked("c", drawn(1), after=MORE))
    async with opened(BUILTIN_MODEL, n_slots=1, projector=projector) as engine:
        expected, _ = await answer(engine, asked("d", seen, after=MORE))
    n_whole = second.usage.prompt_tokens - len(MORE)
    assert first.usage.cached_tokens == 0
    assert n_whole > len(BEFORE) + 4
    assert second.usage.cached_tokens >= n_whole
    assert encoded == 1
    assert other.usage.cached_tokens <= n_whole - 16  # all that is before it
    assert second_tokens == expected != fresh_tokens


async def test_one_picture_is_encoded_once_for_all_who_ask_at_once(llava: Path) -> None:
    async with opened(BUILTIN_MODEL, n_slots=2, projector=llava) as engine:
        await asyncio.gather(*(answer(engine, asked(f"a{i}", drawn(0))) for i in range(6)))
        assert engine.stats().encoded_tiles == 1


async def test_several_pictures_stand_where_the_prompt_has_them(llava: Path) -> None:
    async with opened(BUILTIN_MODEL, n_slots=1, projector=llava) as engine:
        one, end = await answer(engine, asked("a", drawn(0), drawn(1)))
        other, _ = await answer(engine, asked("b", drawn(1), drawn(0)))
        again, _ = await answer(engine, asked("c", drawn(0), drawn(1)))
    assert one == again != other
    assert end.usage.prompt_tokens == len(BEFORE) + 2 * 16 + len(AFTER)


async def test_what_cannot_be_seen_is_refused(llava: Path, tmp_path: Path) -> None:
    async with opened(BUILTIN_MODEL, n_ctx_slot=64, projector=llava) as engine:
        with pytest.raises(PromptTooLongError):
            await answer(engine, asked("a", *(drawn(i) for i in range(4))))
        with pytest.raises(InvalidRequestError, match="Text must follow"):
            await answer(engine, asked("b", drawn(0), after=()))
    async with opened(BUILTIN_MODEL) as engine:
        with pytest.raises(InvalidRequestError, match="no projector"):
            await answer(engine, asked("c", drawn(0)))
    wrong = tmp_path / "wrong.gguf"
    write_random_projector(wrong, SHAPES["tiny-llava"], TOKENIZER.n_embd + 32)
    with pytest.raises(ConfigError, match="projector"):
        Engine.load(BUILTIN_MODEL, replace(OPTIONS, projector=wrong))
    with pytest.raises(ConfigError, match="no projector file"):
        Engine.load(BUILTIN_MODEL, replace(OPTIONS, projector=tmp_path / "none.gguf"))
