"""Own layers: the same texts, and right guesses where states are known.

The counting model's layer is right only where it is fed the hidden state of the token before, and its own
behind a guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.engine import ConfigError, Engine, EngineOptions, EngineStats, SamplingParams
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.integration.engine.test_draft_models import as_if_drafts_were_free, say
from tests.integration.models.prediction_models import (
    KINDS,
    write_counting,
    write_head,
    write_random,
)

OPTIONS = EngineOptions(
    n_slots=3,
    n_ctx_slot=640,
    threads=1,
    n_batch=128,
    flash_attn=False,
    kv_unified=False,
    speculate=False,
    profile_limit_s=0.5,
)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = [tuple(range(40, 60)), tuple(range(100, 300)), (5,)]


def opened(path: Path, *, kv_unified: bool = False) -> Engine:
    options = replace(OPTIONS, own_layers=True, kv_unified=kv_unified)
    engine = Engine.load(path, options)
    as_if_drafts_were_free(engine)
    return engine


@pytest.fixture(scope="module", params=[False, True], ids=["split", "unified"])
def counting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("own") / "counting.gguf"
    write_counting(path)
    engine = opened(path, kv_unified=request.param)
    yield engine
    engine.close()


OTHER_KINDS = [
    pytest.param(kind, marks=pytest.mark.long)
    for kind in KINDS
    if kind not in ("glm4moe", "mimo2", "qwen35", "qwen3next")
]


@pytest.fixture(scope="module", params=["glm4moe", "mimo2", "qwen35", *OTHER_KINDS])
def anything(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / f"{request.param}.gguf"
    write_random(path, request.param)
    return path


def counted(prompt: tuple[int, ...], n: int) -> list[int]:
    return [prompt[-1] + 1 + i for i in range(n)]


def proposals(before: EngineStats, after: EngineStats) -> tuple[int, int]:
    return (
        after.speculation.proposed_tokens - before.speculation.proposed_tokens,
        after.speculation.accepted_proposed_tokens - before.speculation.accepted_proposed_tokens,
    )


def test_each_guess_is_right_and_saves_steps(counting: Engine) -> None:
    for prompts in ([PROMPTS[0]], PROMPTS):
        before = counting.stats()
        answers = say(counting, *((prompt, GREEDY) for prompt in prompts))
        assert answers == [counted(prompt, 40) for prompt in prompts]
        after = counting.stats()
        n_proposed, n_right = proposals(before, after)
        assert n_right == n_proposed > 10 * len(prompts)
        n_steps = after.timing.steps - before.timing.steps
        assert n_steps < 40
        if len(prompts) == 1:  # of several, the one with the fewest right guesses takes the longest
            assert n_steps <= 40 - n_right + 8


def test_a_text_longer_than_its_cells(counting: Engine) -> None:
    before = counting.stats()
    prompt = tuple(100 + i % 7 for i in range(500))
    sampling = replace(GREEDY, max_tokens=100)
    assert say(counting, (prompt, sampling)) == [counted(prompt, 100)]
    n_proposed, n_right = proposals(before, counting.stats())
    assert n_right == n_proposed > 30


def test_behind_a_prefix_that_was_not_computed_again(counting: Engine) -> None:
    begin = tuple(300 + i % 11 for i in range(200))
    say(counting, (begin, replace(GREEDY, max_tokens=2)))
    before = counting.stats()
    prompts = [(*begin, 20, 30), (*begin, 21, 31), (*begin, 22, 32)]  # one goes on, two are copies
    answers = say(counting, *((prompt, GREEDY) for prompt in prompts))
    assert answers == [counted(prompt, 40) for prompt in prompts]
    after = counting.stats()
    assert after.tokens.prompt_tokens - before.tokens.prompt_tokens < 200
    n_proposed, n_right = proposals(before, after)
    assert n_right == n_proposed > 30


def test_the_text_is_the_same(anything: Path) -> None:
    """Wrong guesses change neither greedy nor seeded text, of a model with recurrent layers, too."""
    asked = [
        *((prompt, GREEDY) for prompt in PROMPTS),
        *((PROMPTS[0], SamplingParams(temperature=1.5, seed=n, max_tokens=20)) for n in range(12)),
    ]
    alone, drafted = Engine.load(anything, OPTIONS), opened(anything)
    try:
        for one in asked:
            assert say(drafted, one) == say(alone, one)
        stats = drafted.stats()
        assert stats.speculation.proposed_tokens > 60
        assert stats.speculation.accepted_proposed_tokens < stats.speculation.proposed_tokens / 2
        assert stats.memory.cache_bytes > alone.stats().memory.cache_bytes
    finally:
        alone.close()
        drafted.close()


def test_files_without_them_are_refused(tmp_path: Path) -> None:
    left_out, several, recurrent = (
        tmp_path / f"{name}.gguf" for name in ("left-out", "several", "recurrent")
    )
    write_random(left_out, left_out=True)
    write_random(several, n_own_layers=2)
    write_random(recurrent, "qwen3next")
    for path, told in (
        (BUILTIN_MODEL, r"own_layers: corral-demo-q8_0\.gguf has no prediction layers"),
        (
            left_out,
            r"does not compute the prediction layers of left-out\.gguf: the file lacks them",
        ),
        (several, r"does not compute the prediction layers of several\.gguf"),
        (recurrent, r"recurrent\.gguf cannot take back tokens that were wrong"),
    ):
        with pytest.raises(ConfigError, match=told):
            Engine.load(path, replace(OPTIONS, own_layers=True))


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_heads_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    head = tmp_path / "head.gguf"
    write_head(head, kind)
    told = r"head\.gguf is (an EAGLE-3 head|a DFlash draft), which Corral does not support\. A draft is"
    for path, draft in ((BUILTIN_MODEL, head), (head, None)):
        with pytest.raises(ConfigError, match=told):
            Engine.load(path, replace(OPTIONS, draft=draft))
