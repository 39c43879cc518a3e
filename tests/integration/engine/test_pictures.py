"""Pictures in real engines: what they change, what is shared, and what is computed once.

With random projectors: the text means nothing, but depends on every pixel that is seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.base.errors import ConfigError, CorralError, InvalidRequestError, PromptTooLongError
from serve_app.base.values.answers import SequenceEnd, TokenDelta, TokenLogprobs
from serve_app.base.values.media import MEDIUM, Picture
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.engine.guests.embedding import Texts
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.integration.engine.opening import opener
from tests.integration.engine.picture_reference import MARKER, reference
from tools.random_models.model import SHAPES as MODELS
from tools.random_models.model import write_random_gguf
from tools.random_models.projector import QWEN_TOKENS, SHAPES, write_random_projector

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
ROUNDING = 0.05
"""Of a log-probability, at most: batches of other sizes round in other ways, and weights have 8 bits."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def drawn(seed: int, width: int = 128, height: int = 128) -> Picture:
    """Four squares of random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), np.uint8)
    pixels = colours.repeat(height // 2, 0).repeat(width // 2, 1)
    return Picture.of(pixels.tobytes(), width, height)


@dataclass(frozen=True)
class Seeing:
    """A model, its projector, and what stands around pictures in its tokens."""

    model: Path
    projector: Path
    before: tuple[int, ...]
    after: tuple[int, ...]
    more: tuple[int, ...]

    @classmethod
    def of(cls, model: Path, projector: Path, shape: str) -> Seeing:
        """A new projector of that shape."""
        words = Tokenizer(model)
        write_random_projector(projector, SHAPES[shape], words.model.n_embd)
        after, more = (
            words.tokenize(text, False, False) for text in ("? I see", " How many are there?")
        )
        return cls(model, projector, words.encode("What is in "), after, more)

    def asked(
        self, name: str, *pictures: Picture, after: Sequence[int] | None = None
    ) -> GenerationRequest:
        """A question about pictures."""
        places = (MEDIUM,) * len(pictures)
        after = self.after if after is None else after
        prompt = (*self.before, *places, *after)
        return GenerationRequest(name, prompt, GREEDY, media=pictures)

    def text(self, name: str) -> GenerationRequest:
        """A question about none."""
        return GenerationRequest(name, (*self.before, *self.after), GREEDY)

    def opened(self, **changed: Any) -> AbstractAsyncContextManager[Engine]:
        """An engine of it."""
        return opened(self.model, projector=self.projector, **changed)


async def answer(engine: Engine, request: GenerationRequest) -> tuple[list[int], SequenceEnd]:
    """The answer's tokens, and its end."""
    tokens: list[int] = []
    async for delta in engine.submit(request):
        tokens += delta.token_ids
        if delta.end is not None:
            assert delta.end.error is None
            return tokens, delta.end
    raise AssertionError("no end")


KINDS = {
    "tiny-llava": None,
    "tiny-gemma3": None,  # not causal
    "tiny-qwen2vl": "tiny-qwen2vl",
    "tiny-qwen2.5vl": "tiny-qwen2vl",
    "tiny-qwen3vl": "tiny-qwen3vl",
}
"""Shapes of projectors, and of the models that they are for; the built-in one by default."""


@pytest.fixture(scope="module", params=KINDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """Every kind."""
    folder, kind = tmp_path_factory.mktemp("seeing"), request.param
    model, shape = BUILTIN_MODEL, KINDS[kind]
    if shape is not None:
        model = folder / "model.gguf"
        write_random_gguf(model, MODELS[shape], "q8_0", more_control=QWEN_TOKENS)
    return Seeing.of(model, folder / "projector.gguf", kind)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """The built-in model with a projector."""
    path = tmp_path_factory.mktemp("projector") / "llava.gguf"
    return Seeing.of(BUILTIN_MODEL, path, "tiny-llava")


async def test_an_answer_depends_on_the_picture_alone_and_is_the_same_in_a_shared_batch(
    seeing: Seeing,
) -> None:
    asked = seeing.asked
    async with seeing.opened(n_slots=1) as engine:
        alone = [(await answer(engine, asked(f"a{i}", drawn(i))))[0] for i in range(3)]
    async with seeing.opened(n_slots=4) as engine:
        shared = await asyncio.gather(
            *(answer(engine, asked(f"b{i}", drawn(i))) for i in range(3)),
            answer(engine, seeing.text("text")),
        )
    assert [tokens for tokens, _ in shared[:3]] == alone
    assert len({tuple(tokens) for tokens in (*alone, shared[3][0])}) == 4


async def test_the_second_question_computes_its_words_only(seeing: Seeing) -> None:
    asked = seeing.asked
    async with seeing.opened(n_slots=1) as engine:
        seen = drawn(0)
        _, first = await answer(engine, asked("a", seen))
        second_tokens, second = await answer(engine, asked("b", seen, after=seeing.more))
        encoded = engine.stats().pictures.encoded_tiles
        fresh_tokens, other = await answer(engine, asked("c", drawn(1), after=seeing.more))
    async with seeing.opened(n_slots=1) as engine:
        expected, _ = await answer(engine, asked("d", seen, after=seeing.more))
    n_whole = second.usage.prompt_tokens - len(seeing.more)
    assert first.usage.cached_tokens == 0
    assert n_whole > len(seeing.before) + 4
    assert second.usage.cached_tokens >= n_whole
    assert encoded == 1
    assert other.usage.cached_tokens <= n_whole - 16  # all that is before it
    assert second_tokens == expected != fresh_tokens


PICTURES = drawn(0), drawn(1, 300, 60), drawn(2, 60, 200)


@pytest.mark.parametrize("n_batch", [48, 128])
async def test_tokens_are_as_likely_as_by_llama_cpps_helper(seeing: Seeing, n_batch: int) -> None:
    """Several pictures in a prompt, the first of them cached, in chunks of any size."""
    places = (MEDIUM,) * len(PICTURES)
    sampling = replace(GREEDY, logprobs=5)
    prompt = (*seeing.before, *places[:1], *seeing.after, *places[1:], *seeing.more)
    request = GenerationRequest("a", prompt, sampling, media=PICTURES)
    seen, between = f"What is in {MARKER}", f"? I see{MARKER}{MARKER} How many are there?"
    async with seeing.opened(n_slots=1, n_batch=n_batch) as engine:
        await answer(engine, seeing.asked("b", PICTURES[0]))
        deltas = [delta async for delta in engine.submit(request)]
    n_found = 0
    with reference(seeing.model, seeing.projector, 512, 128) as expected:
        expected.prompt(seen + between, PICTURES)
        for token, found in ((t, p) for one in deltas for t, p in _told(one)):
            likely = expected.logprobs
            assert {t: likely[t] for t, _ in found.top} == pytest.approx(
                dict(found.top), abs=ROUNDING
            )
            expected.feed(token)
            n_found += 1
    assert n_found == GREEDY.max_tokens


def _told(delta: TokenDelta) -> Iterable[tuple[int, TokenLogprobs]]:
    return zip(delta.token_ids, delta.logprobs, strict=True)


async def test_a_text_with_pictures_has_the_vector_of_llama_cpps_helper(seeing: Seeing) -> None:
    """Other texts, and an answer about one of the pictures, are computed beside it."""
    places = (MEDIUM,) * len(PICTURES)
    text = (*seeing.before, *places[:1], *seeing.after, *places[1:], *seeing.more)
    seen, between = f"What is in {MARKER}", f"? I see{MARKER}{MARKER} How many are there?"
    with reference(seeing.model, seeing.projector, 512, 128, embeds=True) as expected:
        expected.prompt(seen + between, PICTURES)
        theirs = expected.vector
    async with seeing.opened(n_slots=1, embedding_pooling="last") as engine:
        texts = Texts([seeing.more, text, seeing.after, text], media=PICTURES * 2)
        (outcome,) = engine.embed_many([texts])
        assert not isinstance(outcome, CorralError)
        _, ours = await asyncio.gather(
            answer(engine, seeing.asked("a", PICTURES[1])), asyncio.wrap_future(outcome)
        )
        alone = await asyncio.wrap_future(engine.embed([seeing.more, seeing.after]))
        assert engine.stats().pictures.encoded_tiles == len(PICTURES)
    assert cosine(ours[1], theirs) > 0.9999
    assert cosine(ours[3], theirs) > 0.9999
    assert cosine(ours[0], alone[0]) > 0.9999
    assert cosine(ours[2], alone[1]) > 0.9999
    assert cosine(ours[0], ours[1]) < 0.99


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


async def test_one_picture_is_encoded_once_for_all_who_ask_at_once(llava: Seeing) -> None:
    asked = llava.asked
    async with llava.opened(n_slots=2) as engine:
        await asyncio.gather(*(answer(engine, asked(f"a{i}", drawn(0))) for i in range(6)))
        assert engine.stats().pictures.encoded_tiles == 1


async def test_several_pictures_stand_where_the_prompt_has_them(seeing: Seeing) -> None:
    asked = seeing.asked
    async with seeing.opened(n_slots=1) as engine:
        one, end = await answer(engine, asked("a", drawn(0), drawn(1)))
        other, _ = await answer(engine, asked("b", drawn(1), drawn(0)))
        again, _ = await answer(engine, asked("c", drawn(0), drawn(1)))
        n_seen = engine.media_tokens([(128, 128)] * 2)
    assert one == again != other
    assert end.usage.prompt_tokens == len(seeing.before) + n_seen + len(seeing.after)


@pytest.mark.parametrize("kv_unified", [False, True])
async def test_what_is_behind_a_picture_stands_right_wherever_it_comes_from(
    seeing: Seeing, kv_unified: bool
) -> None:
    """From its own slot, from a copy of another one's, or from the store."""
    first, other = drawn(0), drawn(1, 60, 100)
    talk = (*seeing.after, MEDIUM, *seeing.more)
    last = (*talk, *seeing.after)

    def asked(name: str, after: Sequence[int]) -> GenerationRequest:
        pictures = (first, other) if MEDIUM in after else (first,)
        return GenerationRequest(name, (*seeing.before, MEDIUM, *after), GREEDY, media=pictures)

    async with seeing.opened(n_slots=1, kv_unified=kv_unified) as engine:
        expected, end = await answer(engine, asked("a", last))
    async with seeing.opened(kv_unified=kv_unified, cache_ram_bytes=2**26) as engine:
        await answer(engine, asked("b", seeing.after))
        await answer(engine, asked("c", talk))
        in_place, cached = await answer(engine, asked("d", last))
        both = await asyncio.gather(*(answer(engine, asked(f"e{i}", last)) for i in range(2)))
        for i in range(4):  # they take its slots
            await answer(engine, seeing.asked(f"f{i}", drawn(2 + i)))
        stored, restored = await answer(engine, asked("g", last))
        assert engine.stats().tokens.restored_tokens > 0
    n_prompt = end.usage.prompt_tokens
    assert in_place == stored == expected
    assert [tokens for tokens, _ in both] == [expected] * 2
    for one in (cached, restored, *(end for _, end in both)):
        assert one.usage.cached_tokens >= n_prompt - len(seeing.after) - 1


async def test_an_answer_about_pictures_goes_on_in_another_engine(seeing: Seeing) -> None:
    request = seeing.asked("a", drawn(2), drawn(3, 100, 60))
    async with seeing.opened(n_slots=1) as engine:
        expected, _ = await answer(engine, request)
    async with seeing.opened() as engine:
        rest, end = await answer(engine, replace(request, generated=tuple(expected[:5])))
    assert rest == expected[5:]
    assert end.timings.n_resumed == 5


async def test_a_prefix_with_a_picture_goes_to_another_engine_and_to_a_file(
    seeing: Seeing, tmp_path: Path
) -> None:
    seeing = replace(seeing, before=8 * seeing.before)
    first, second = (
        seeing.asked(name, drawn(0), after=after)
        for name, after in (("a", seeing.after), ("b", seeing.more))
    )
    async with seeing.opened(
        n_slots=1, cache_ram_bytes=2**26, slot_folder=tmp_path / "slots"
    ) as engine:
        await answer(engine, second)
        expected, _ = await answer(engine, first)
        (hottest,) = engine.prefixes.offers(2)
        payload = engine.prefixes.export_prefix(hottest.prefix)
        saved = engine.slot_files.act("save", 0, "seen.bin")
        assert payload is not None
    n_shared = len(hottest.prefix.tokens) // 4
    async with seeing.opened(kv_unified=True, cache_ram_bytes=2**26) as engine:
        assert engine.prefixes.import_prefix(payload, n_shared) > 0
        assert (await answer(engine, first))[0] == expected
        assert engine.stats().pictures.encoded_tiles == 0
    async with seeing.opened(n_slots=1, slot_folder=tmp_path / "slots") as engine:
        assert engine.slot_files.act("restore", 0, "seen.bin").n_tokens == saved.n_tokens
        tokens, end = await answer(engine, first)
        assert tokens == expected
        assert end.usage.cached_tokens == end.usage.prompt_tokens - 1
        assert engine.stats().pictures.encoded_tiles == 0


async def test_who_leaves_within_a_picture_leaves_what_is_before_it(seeing: Seeing) -> None:
    """Chunks are smaller than pictures; whoever comes next finds a slot that begins as it was."""
    before = seeing.before * 6
    seen = drawn(0, 240, 240)

    def asked(name: str) -> GenerationRequest:
        return GenerationRequest(name, (*before, MEDIUM, *seeing.after), GREEDY, media=(seen,))

    async with seeing.opened(n_slots=1) as engine:
        expected, _ = await answer(engine, asked("a"))
    async with seeing.opened(n_slots=1, n_batch=64) as engine:
        for i in range(3):
            request = replace(asked(f"b{i}"), return_progress=True)
            async with engine.submit(request) as deltas:
                async for delta in deltas:
                    if any(one.n_processed > len(before) + i for one in delta.progress):
                        break
        tokens, end = await answer(engine, asked("c"))
    assert tokens == expected
    assert end.usage.cached_tokens >= len(before)


async def test_what_cannot_be_seen_is_refused(llava: Seeing, tmp_path: Path) -> None:
    asked = llava.asked
    async with llava.opened(n_ctx_slot=64) as engine:
        with pytest.raises(PromptTooLongError):
            await answer(engine, asked("a", *(drawn(i) for i in range(4))))
        with pytest.raises(InvalidRequestError, match="Text must follow"):
            await answer(engine, asked("b", drawn(0), after=()))
    async with opened(BUILTIN_MODEL) as engine:
        with pytest.raises(InvalidRequestError, match="no projector"):
            await answer(engine, asked("c", drawn(0)))
    wrong = tmp_path / "wrong.gguf"
    write_random_projector(wrong, SHAPES["tiny-llava"], Tokenizer(BUILTIN_MODEL).model.n_embd + 32)
    with pytest.raises(ConfigError, match="projector"):
        Engine.load(BUILTIN_MODEL, replace(OPTIONS, projector=wrong))
    with pytest.raises(ConfigError, match="no projector file"):
        Engine.load(BUILTIN_MODEL, replace(OPTIONS, projector=tmp_path / "none.gguf"))
