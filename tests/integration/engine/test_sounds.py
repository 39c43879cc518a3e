"""Sounds in a real engine, with a random projector: as llama.cpp's helper hears them, and encoded once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from serve_app.base.errors import ConfigError, InvalidRequestError, PromptTooLongError
from serve_app.base.values.answers import SequenceEnd
from serve_app.base.values.media import MEDIUM, SAMPLE_RATE, Picture, Sound
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.kernels.llama.vision.senses import ProjectorFile, Senses
from serve_app.prompt.tokenizer import Tokenizer
from tests.integration.engine.opening import opener
from tests.integration.engine.picture_reference import MARKER, reference
from tools.random_models.model import SHAPES as MODELS
from tools.random_models.model import write_random_gguf
from tools.random_models.projector import SHAPES, write_random_projector

OPTIONS = EngineOptions(
    n_slots=2,
    n_ctx_slot=2048,
    threads=1,
    n_batch=128,
    flash_attn=False,
    kv_unified=False,
    speculate=False,
    profile_limit_s=0,
)
opened = opener(OPTIONS)
SAMPLING = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=5)
N_HEARD = 750
"""Tokens of half a minute."""
ROUNDING = 0.05
"""Of a log-probability: batches of other sizes round in other ways, and weights have 8 bits."""


@pytest.fixture(scope="module", params=["tiny", "tiny-qwen2vl"])
def files(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A model, also one with positions of several dimensions, and a projector that hears."""
    folder = tmp_path_factory.mktemp("hearing")
    model, projector = folder / "model.gguf", folder / "projector.gguf"
    write_random_gguf(model, MODELS[request.param], "q8_0")
    write_random_projector(projector, SHAPES["tiny-qwen2audio"], Tokenizer(model).model.n_embd)
    return model, projector


def tone(pitch: float, seconds: float = 1.0) -> Sound:
    """A sound."""
    at = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return Sound.of(np.sin(2 * np.pi * pitch * at).astype(np.float32).tobytes())


def asked(
    model: Path, *sounds: Sound, before: str = "Listen:", after: str = "? I hear"
) -> GenerationRequest:
    """A question about sounds."""
    words = Tokenizer(model)
    end = words.tokenize(after, False, False)
    prompt = (*words.encode(before), *(MEDIUM,) * len(sounds), *end)
    return GenerationRequest(f"{id(sounds)}", prompt, SAMPLING, media=sounds)


async def answer(
    engine: Engine, request: GenerationRequest
) -> tuple[list[int], list[dict[int, float]], SequenceEnd]:
    """The answer's tokens, how likely the first few candidates were, and its end."""
    deltas = [delta async for delta in engine.submit(request)]
    assert deltas[-1].end is not None
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, [dict(one.top) for d in deltas for one in d.logprobs], deltas[-1].end


def expected(
    files: tuple[Path, Path], tokens: Sequence[int], *sounds: Sound
) -> list[dict[int, float]]:
    """How likely all tokens were, by llama.cpp's helper."""
    found = []
    with reference(*files, 2048, 128) as one:
        one.prompt(f"Listen:{MARKER * len(sounds)}? I hear", sounds)
        for token in tokens:
            found.append(dict(enumerate(one.logprobs)))
            one.feed(token)
    return found


@pytest.mark.parametrize("sounds", [(tone(440),), (tone(300, 12), tone(700))], ids=["one", "two"])
async def test_tokens_are_as_likely_as_by_llama_cpps_helper(
    files: tuple[Path, Path], sounds: tuple[Sound, ...]
) -> None:
    async with opened(files[0], projector=files[1]) as engine:
        tokens, likely, end = await answer(engine, asked(files[0], *sounds))
    assert end.usage.prompt_tokens > N_HEARD * sum(-(-one.size[0] // 480_000) for one in sounds)
    for found, known in zip(likely, expected(files, tokens, *sounds), strict=True):
        assert found == pytest.approx({token: known[token] for token in found}, abs=ROUNDING)


async def test_a_sound_is_encoded_once_and_the_second_question_costs_its_words(
    files: tuple[Path, Path],
) -> None:
    model, projector = files
    async with opened(model, projector=projector) as engine:
        both = await asyncio.gather(
            *(answer(engine, asked(model, tone(440), after=text)) for text in ("? I", "? You"))
        )
        assert engine.stats().pictures.encoded_tiles == 1
        _, likely, end = await answer(engine, asked(model, tone(440), after="? Who"))
        assert engine.stats().pictures.encoded_tiles == 1
        _, other, fresh = await answer(engine, asked(model, tone(880), after="? Who"))
        assert engine.stats().pictures.encoded_tiles == 2
    assert end.usage.cached_tokens >= N_HEARD
    assert fresh.usage.cached_tokens < N_HEARD
    assert likely != other
    assert both[0][2].usage.completion_tokens == SAMPLING.max_tokens


def test_a_projector_that_llama_cpp_would_end_the_process_with_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ultravox.gguf"
    for n_stacked in (8, 10):
        writer = GGUFWriter(path, "clip")
        writer.add_string("clip.projector_type", "ultravox")
        writer.add_uint32("clip.audio.projector.stack_factor", n_stacked)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        if n_stacked == 10:
            ProjectorFile(path).check_counts()
            continue
        with pytest.raises(ConfigError, match="stacks 8 steps"):
            ProjectorFile(path).check_counts()


async def test_what_cannot_be_heard_is_refused(files: tuple[Path, Path]) -> None:
    model, projector = files
    assert ProjectorFile(projector).senses == Senses(sees=False, hears=True)
    async with opened(model, projector=projector) as engine:
        picture = Picture.of(bytes(3), 1, 1)
        with pytest.raises(InvalidRequestError, match="takes no pictures"):
            await answer(engine, replace(asked(model, tone(1)), media=(picture,)))
        with pytest.raises(PromptTooLongError):
            await answer(engine, asked(model, *(tone(i) for i in range(3))))
