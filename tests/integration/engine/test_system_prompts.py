"""Pinned system prompts, on a real tiny model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.base.errors import ConfigError
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.prompt.chat_template import ChatTemplate
from serve_app.prompt.conversation import Turn
from serve_app.prompt.tokenizer import Tokenizer
from tests.integration.engine.kernels import openvino
from tools.random_models.model import SHAPES, write_random_gguf

SYSTEM = "You are a patient assistant who answers every question of every guest in this house."
# Flash attention has a kernel of its own for 64 rows and more, which rounds differently: with it, a
# prefix computed in other chunks can turn a near-tie of two tokens.
OPTIONS = EngineOptions(
    n_slots=2, n_ctx_slot=512, threads=1, n_batch=64, flash_attn=False, profile_limit_s=0
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its logits do not depend on the batch."""
    path = tmp_path_factory.mktemp("model") / "exact.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    return path


def chat(tokenizer: Tokenizer, said: str) -> tuple[int, ...]:
    return tokenizer.encode_chat([Turn("system", (SYSTEM,)), Turn("user", (said,))])


async def answers(engine: Engine, tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """Tokens and cached tokens of some chats, one after the other."""
    found = []
    for said in ("Where is the key?", "Why?", "1 and 1"):
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        request = GenerationRequest(said, chat(tokenizer, said), sampling)
        deltas = [delta async for delta in engine.submit(request)]
        end = deltas[-1].end
        assert end is not None
        tokens = [token for delta in deltas for token in delta.token_ids]
        found.append((tokens, end.usage.cached_tokens))
    return found


@pytest.mark.parametrize("mode", [{}, openvino()])
async def test_chats_start_from_it_and_say_the_same(path: Path, mode: dict[str, Any]) -> None:
    tokenizer = Tokenizer(path)
    prefix = tokenizer.encode_system_prompt(SYSTEM)
    both = []
    for pinned in ((), (prefix,)):
        engine = Engine.load(path, replace(OPTIONS, pinned=pinned, **mode))
        try:
            both.append(await answers(engine, tokenizer))
            assert len(engine.stats().slots) == OPTIONS.n_slots + len(pinned)
        finally:
            engine.close()
    without, with_it = both
    assert [tokens for tokens, _ in with_it] == [tokens for tokens, _ in without]
    assert without[0][1] == 0
    assert with_it[0][1] == len(prefix)
    assert all(cached >= len(prefix) for _, cached in with_it)


def test_the_prefix_ends_where_the_user_begins(path: Path) -> None:
    tokenizer = Tokenizer(path)
    prefix = tokenizer.encode_system_prompt(SYSTEM)
    for said in ("Where?", "a", "1", "\n", "é"):
        prompt = chat(tokenizer, said)
        assert prompt[: len(prefix)] == prefix
        assert len(prompt) > len(prefix)
    assert len(prefix) > len(SYSTEM.split())


def test_a_template_without_system_prompts_stops_the_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(path)
    refusing = ChatTemplate("{{ raise_exception('no system prompts') }}", bos="", eos="")
    monkeypatch.setattr(tokenizer, "_template", refusing)
    with pytest.raises(ConfigError, match=r"system_prompts: .*no system prompts"):
        tokenizer.encode_system_prompt(SYSTEM)
