"""The engine with a tiny model, over both backends."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.base.sampling import LogitBias
from serve_app.engine import (
    ConfigError,
    Engine,
    EngineClosedError,
    EngineOptions,
    FinishReason,
    GenerationRequest,
    PromptTooLongError,
    SamplingParams,
    SequenceEnd,
    TokenStream,
)
from serve_app.kernels.llama.model import Model
from tests.integration.engine.kernels import NAMES, with_kernels
from tools.random_models.model import SHAPES, write_random_gguf

OPTIONS = EngineOptions(
    profile_limit_s=0,
    n_slots=4,
    n_ctx_slot=256,
    threads=1,
    n_batch=64,
    flash_attn=False,
    kv_unified=False,
)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HOT = replace(GREEDY, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0)
HELLO = "Hello there, how are you?"
FRANCE = "The capital of France is"
LONG = "It was the best of times, it was the worst of times. " * 5


@dataclass(frozen=True)
class Answer:
    """All that one request gave."""

    text: str
    token_ids: tuple[int, ...]
    end: SequenceEnd


async def read(stream: TokenStream) -> Answer:
    deltas = [delta async for delta in stream]
    end = deltas[-1].end
    assert end is not None
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    return Answer("".join(delta.text for delta in deltas), tokens, end)


async def ask_all(engine: Engine, *pairs: tuple[str, SamplingParams]) -> list[Answer]:
    """The requests, submitted together."""
    streams = engine.submit_many(
        [
            GenerationRequest(str(i), engine.tokenize(prompt), sampling)
            for i, (prompt, sampling) in enumerate(pairs)
        ]
    )
    return await asyncio.gather(*(read(s) for s in streams if isinstance(s, TokenStream)))


async def ask(engine: Engine, prompt: str, sampling: SamplingParams = GREEDY) -> Answer:
    (answer,) = await ask_all(engine, (prompt, sampling))
    return answer


@pytest.fixture(scope="module")
def exact_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits do not depend on the batch: Q8_0 products are sums of integers.

    With floats, llama.cpp computes a batch of one row by other kernels than one of many: the logits
    differ in the third decimal, and of two tokens that are as likely, sometimes the other one wins.
    """
    path = tmp_path_factory.mktemp("model") / "exact.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    return path


@pytest.fixture(scope="module", params=NAMES)
def options(request: pytest.FixtureRequest) -> EngineOptions:
    return with_kernels(OPTIONS, request.param)


@pytest.fixture(scope="module")
def engine(exact_gguf: Path, options: EngineOptions) -> Iterator[Engine]:
    """Shared by all tests here: their requests also find each other's slots."""
    made = Engine.load(exact_gguf, options)
    yield made
    made.close()


@pytest.fixture
def load(exact_gguf: Path, options: EngineOptions) -> Iterator[Callable[..., Engine]]:
    """Makes engines of other sizes."""
    made: list[Engine] = []

    def make(**changed: Any) -> Engine:
        made.append(Engine.load(exact_gguf, replace(options, **changed)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def vocabulary(tiny_gguf: Path) -> Model:
    return Model(tiny_gguf, vocab_only=True)


# -- batching changes nothing ---------------------------------------------------------------------


async def test_interleaved_prompts_say_what_they_say_alone(engine: Engine) -> None:
    alone = [await ask(engine, HELLO), await ask(engine, FRANCE)]
    together = await ask_all(engine, (HELLO, GREEDY), (FRANCE, GREEDY))
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert alone[0].text != alone[1].text
    assert len(alone[0].token_ids) == 24


async def test_sixteen_over_four_slots_say_what_they_say_alone(load: Callable[..., Engine]) -> None:
    prompts = [f"{LONG[: 20 * (i % 5)]}Tell me about number {i}" for i in range(16)]
    engine = load(max_waiting=12)
    together = await ask_all(engine, *((prompt, GREEDY) for prompt in prompts))
    assert len(together) == 16
    fresh = load(n_slots=1)
    for prompt, answer in zip(prompts, together, strict=True):
        assert (await ask(fresh, prompt)).token_ids == answer.token_ids
    assert len({answer.token_ids for answer in together}) > 8


async def test_shared_prefix_is_computed_once_and_changes_nothing(
    load: Callable[..., Engine],
) -> None:
    prompts = [f"{LONG}Tell me about number {i}" for i in range(8)]
    fresh = load(n_slots=1)
    alone = [await ask(fresh, prompt) for prompt in prompts]
    engine = load(n_slots=8, n_ctx_slot=512)
    together = await ask_all(engine, *((prompt, GREEDY) for prompt in prompts))
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    n_common = len(engine.tokenize(LONG)) - 1  # its last token may grow into the next word
    assert sum(a.end.usage.cached_tokens >= n_common - 16 for a in together) == 7


async def test_prefix_of_a_busy_slot_is_copied(load: Callable[..., Engine]) -> None:
    engine = load(n_slots=2, n_ctx_slot=512)
    alone = await ask(load(n_slots=1), f"{LONG}And then")
    forever = GenerationRequest("busy", engine.tokenize(LONG), replace(GREEDY, max_tokens=None))
    async with engine.submit(forever) as stream:
        await anext(stream)
        copied = await ask(engine, f"{LONG}And then")
        assert engine.stats().queue.running == 1
    assert copied.end.usage.cached_tokens >= len(engine.tokenize(LONG)) - 1
    assert copied.token_ids == alone.token_ids


async def test_prompt_in_chunks_equals_prompt_in_one(
    load: Callable[..., Engine], vocabulary: Model
) -> None:
    n_prompt = len(vocabulary.tokenize(LONG, add_special=True, parse_special=True))
    chunked, whole = load(n_batch=16), load(n_batch=256)
    assert 16 < n_prompt < 200
    assert (await ask(chunked, LONG)).token_ids == (await ask(whole, LONG)).token_ids
    assert chunked.stats().timing.steps > whole.stats().timing.steps


async def test_slot_used_by_another_prompt_in_between(load: Callable[..., Engine]) -> None:
    engine = load(n_slots=1)
    first = await ask(engine, HELLO)
    await ask(engine, FRANCE)
    again = await ask(engine, HELLO)
    assert again.token_ids == first.token_ids
    assert again.end.usage.cached_tokens < again.end.usage.prompt_tokens // 2


async def test_cached_prefix_changes_nothing(load: Callable[..., Engine]) -> None:
    engine = load(n_slots=1)
    first = await ask(engine, LONG)
    again = await ask(engine, LONG)
    assert first.end.usage.cached_tokens == 0
    assert again.end.usage.cached_tokens == again.end.usage.prompt_tokens - 1
    assert again.token_ids == first.token_ids
    longer = await ask(engine, LONG + first.text + " and so on")
    assert longer.end.usage.cached_tokens >= first.end.usage.prompt_tokens
    fresh = load(n_slots=1)
    assert (await ask(fresh, LONG + first.text + " and so on")).token_ids == longer.token_ids


# -- sampling -------------------------------------------------------------------------------------


async def test_seed_decides_the_draw(engine: Engine) -> None:
    seeds = (1, 1, 2, -1, 2**40)
    answers = await ask_all(engine, *((HELLO, replace(HOT, seed=seed)) for seed in seeds))
    one, same, *others = [answer.token_ids for answer in answers]
    assert one == same
    assert len({one, *others}) == 4


async def test_no_seed_is_a_new_one_each_time(engine: Engine) -> None:
    first, second = await ask_all(engine, (HELLO, HOT), (HELLO, HOT))
    assert first.token_ids != second.token_ids


async def test_temperature_zero_ignores_the_seed(engine: Engine) -> None:
    answers = await ask_all(engine, *((HELLO, replace(GREEDY, seed=seed)) for seed in (None, 1, 2)))
    assert len({answer.token_ids for answer in answers}) == 1


async def test_top_k_of_one_is_greedy(engine: Engine) -> None:
    greedy, top = await ask_all(engine, (HELLO, GREEDY), (HELLO, replace(HOT, top_k=1)))
    assert greedy.token_ids == top.token_ids


async def test_logit_bias_forces_and_bans(engine: Engine) -> None:
    plain = await ask(engine, HELLO)
    banned = plain.token_ids[0]
    forced = await ask(engine, HELLO, replace(GREEDY, logit_bias=LogitBias.of({77: 1000.0})))
    assert set(forced.token_ids) == {77}
    without = await ask(
        engine, HELLO, replace(GREEDY, logit_bias=LogitBias.of({banned: -math.inf}))
    )
    assert banned not in without.token_ids
    assert without.token_ids[0] != banned


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
async def test_ignore_eos(engine: Engine, vocabulary: Model, temperature: float) -> None:
    eos = vocabulary.eos
    assert eos is not None
    eager = SamplingParams(
        temperature=temperature, max_tokens=8, logit_bias=LogitBias.of({eos: 1000.0})
    )
    stopped, ignored = await ask_all(
        engine, (HELLO, eager), (HELLO, replace(eager, ignore_eos=True))
    )
    assert (stopped.end.reason, stopped.token_ids, stopped.text) == (FinishReason.STOP, (eos,), "")
    assert (ignored.end.reason, len(ignored.token_ids)) == (FinishReason.LENGTH, 8)
    assert not set(ignored.token_ids) & set(vocabulary.eog_tokens)


@pytest.mark.parametrize(
    "penalty",
    [
        pytest.param(SamplingParams(repeat_penalty=5.0), id="repeat"),
        pytest.param(SamplingParams(presence_penalty=100.0), id="presence"),
        pytest.param(SamplingParams(frequency_penalty=100.0), id="frequency"),
    ],
)
async def test_penalty_stops_repetition(engine: Engine, penalty: SamplingParams) -> None:
    """A bias makes the model say one token over and over; a penalty breaks it up."""
    stuck = replace(GREEDY, logit_bias=LogitBias.of({77: 30.0}))
    plain, freed = await ask_all(
        engine,
        (HELLO, stuck),
        (
            HELLO,
            replace(
                stuck,
                repeat_penalty=penalty.repeat_penalty,
                presence_penalty=penalty.presence_penalty,
                frequency_penalty=penalty.frequency_penalty,
            ),
        ),
    )
    assert Counter(plain.token_ids)[77] == 24
    assert 1 <= Counter(freed.token_ids)[77] < 12


async def test_penalties_look_at_the_prompt(engine: Engine, vocabulary: Model) -> None:
    plain = await ask(engine, HELLO)
    seen = plain.token_ids[0]
    prompt = vocabulary.detokenize([seen]) * 3 + HELLO
    assert seen in engine.tokenize(prompt)
    heavy = replace(GREEDY, presence_penalty=1000.0, repeat_last_n=-1, max_tokens=8)
    near = replace(heavy, repeat_last_n=1)
    off = replace(heavy, repeat_last_n=0)
    nothing, everything, last = await ask_all(
        engine, (prompt, off), (prompt, heavy), (prompt, near)
    )
    assert not set(everything.token_ids) & set(engine.tokenize(prompt))
    assert len(set(everything.token_ids)) == 8
    assert nothing.token_ids == (await ask(engine, prompt)).token_ids[:8]
    assert all(a != b for a, b in zip(last.token_ids, last.token_ids[1:], strict=False))


# -- the end --------------------------------------------------------------------------------------


async def test_stop_string_cuts(engine: Engine) -> None:
    text = (await ask(engine, HELLO)).text
    stop = text[8:12]
    answer = await ask(engine, HELLO, replace(GREEDY, stop=("not in there at all", stop)))
    assert answer.text == text[: text.index(stop)]
    assert (answer.end.reason, answer.end.stop) == (FinishReason.STOP, stop)


async def test_text_is_the_tokens_text(engine: Engine, vocabulary: Model) -> None:
    for answer in await ask_all(engine, *((HELLO, replace(HOT, seed=i)) for i in range(6))):
        assert answer.text == vocabulary.detokenize(answer.token_ids)


async def test_context_is_used_to_its_last_token(load: Callable[..., Engine]) -> None:
    engine = load(n_ctx_slot=40)
    answers = await ask_all(
        engine, *((f"{HELLO} {i}", replace(GREEDY, max_tokens=None)) for i in range(6))
    )
    for answer in answers:
        assert answer.end.reason is FinishReason.LENGTH
        assert answer.end.usage.prompt_tokens + answer.end.usage.completion_tokens == 40


async def test_slots_together_hold_what_was_promised(load: Callable[..., Engine]) -> None:
    """Every slot full to the brim at once, at a length that llama.cpp rounds up."""
    engine = load(n_ctx_slot=300, n_batch=128)
    answers = await ask_all(
        engine, *((f"{i} {LONG}", replace(GREEDY, max_tokens=None)) for i in range(4))
    )
    assert [a.end.usage.prompt_tokens + a.end.usage.completion_tokens for a in answers] == [300] * 4


async def test_prompt_too_long_names_both_numbers(engine: Engine) -> None:
    prompt = engine.tokenize(HELLO * 40)
    with pytest.raises(PromptTooLongError) as refused:
        engine.submit(GenerationRequest("long", prompt))
    assert str(len(prompt)) in refused.value.message
    assert "256" in refused.value.message


async def test_close_with_a_short_deadline(load: Callable[..., Engine]) -> None:
    engine = load(n_slots=1, n_ctx_slot=4096)
    forever = replace(GREEDY, max_tokens=None)
    stream = engine.submit(GenerationRequest("a", engine.tokenize(HELLO), forever))
    waiting = engine.submit(GenerationRequest("b", engine.tokenize(HELLO), forever))
    await anext(stream)
    await asyncio.to_thread(engine.close, 0.0)
    for unfinished in (stream, waiting):
        with pytest.raises(EngineClosedError):
            await read(unfinished)
    with pytest.raises(EngineClosedError):
        engine.submit(GenerationRequest("c", (1,)))


def test_only_the_decoder_thread_has_a_team_of_workers(exact_gguf: Path) -> None:
    # In a process of its own: OpenMP keeps the workers of every engine that ever was.
    script = f"""
import os, threading
import llama_cpp  # brings NumPy, whose own threads do not count
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams

def native():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

before = native()
engine = Engine.load({str(exact_gguf)!r}, EngineOptions(
    n_slots=1, n_ctx_slot=64, threads=2, profile_limit_s=0
))
done = threading.Event()
request = GenerationRequest("a", engine.tokenize("Hello"), SamplingParams(max_tokens=4))
engine.submit_to([(request, lambda delta: delta.end and done.set())])
assert done.wait(60)
print(native() - before)
engine.close()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("1\n", 0), result.stderr


def test_closed_engine_still_tokenizes(load: Callable[..., Engine]) -> None:
    engine = load()
    tokens = engine.tokenize(HELLO)
    engine.close()
    assert engine.tokenize(HELLO) == tokens


async def test_abort_frees_the_slot(load: Callable[..., Engine]) -> None:
    engine = load(n_slots=1, n_ctx_slot=4096)
    forever = replace(GREEDY, max_tokens=None)
    async with engine.submit(GenerationRequest("a", engine.tokenize(HELLO), forever)) as stream:
        await anext(stream)
    answer = await ask(engine, FRANCE)
    assert len(answer.token_ids) == 24
    assert engine.stats().requests.ended == {"abort": 1, "length": 1}


# -- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", HELLO, "<|im_start|>user\nHi<|im_end|>\n", "€ 😀 \x00", LONG], ids=repr
)
def test_vocabulary_alone_tokenizes_like_the_model(
    tiny_gguf: Path, vocabulary: Model, text: str
) -> None:
    full = Model(tiny_gguf)
    for parse_special in (False, True):
        tokens = full.tokenize(text, add_special=True, parse_special=parse_special)
        assert tokens == vocabulary.tokenize(text, add_special=True, parse_special=parse_special)
        assert full.detokenize(tokens, special=True) == text
    assert (full.n_vocab, full.eos, full.bos) == (
        vocabulary.n_vocab,
        vocabulary.eos,
        vocabulary.bos,
    )
    assert full.eog_tokens == vocabulary.eog_tokens
    assert full.chat_template == vocabulary.chat_template is not None


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.gguf"):
        Engine.load(tmp_path / "absent.gguf", OPTIONS)


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"GGUF" + b"\xff" * 64], ids=len)
def test_file_that_is_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.gguf"):
        Engine.load(path, OPTIONS)


def test_truncated_model(tmp_path: Path, tiny_gguf: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"cut\.gguf"):
        Engine.load(path, OPTIONS)


def test_context_that_llama_cpp_refuses(tiny_gguf: Path) -> None:
    with pytest.raises(ConfigError, match=r"100000 slots"):
        Engine.load(tiny_gguf, EngineOptions(100_000, 2, threads=1, n_batch=100_001))
