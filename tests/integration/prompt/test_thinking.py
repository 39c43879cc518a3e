"""Anthropic's `thinking`, through its package, with a model whose chat template has reasoning."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import ThinkingConfigParam

from serve_app.engine import Engine, EngineOptions
from serve_app.prompt.conversation import Turn
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.server.model_registry import ServedModel
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.doubles.api import build_api
from tools import gguf_file
from tools.local_client import LocalClient
from tools.random_models.model import SHAPES, write_random_gguf

# The end of Qwen3's template, and that of its models that think always: they begin the reasoning.
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}
    {{- '<think>\\n' }}
{%- endif %}
"""
N_CTX_SLOT = 256
RAW = {"reasoning_format": "none"}
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "thinking.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_file, "CHAT_TEMPLATE", TEMPLATE)
        write_random_gguf(made, SHAPES["tiny"], "f16")
    return made


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[ServedModel]:
    options = EngineOptions(n_slots=2, n_ctx_slot=N_CTX_SLOT, threads=1, profile_limit_s=0)
    engine = Engine.load(path, options)
    yield ServedModel("m", N_CTX_SLOT, Tokenizer(path), engine=LocalClient(engine))
    engine.close(0)


@pytest.fixture
async def package(model: ServedModel) -> AsyncIterator[anthropic.AsyncAnthropic]:
    transport = httpx2.ASGITransport(build_api({"m": model}))
    async with anthropic.AsyncAnthropic(
        base_url="http://127.0.0.1",
        api_key="none",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=transport),
    ) as made:
        yield made


async def test_reasoning_that_the_template_begins(package: anthropic.AsyncAnthropic) -> None:
    """A random model never ends it, so all is reasoning; asked not to think, it says as much."""
    thinking: ThinkingConfigParam = {"type": "enabled", "budget_tokens": 1024}
    async with package.messages.stream(**ASK, max_tokens=1025, thinking=thinking) as events:
        deltas = [event.thinking async for event in events if event.type == "thinking"]
        reasoning = await events.get_final_message()
    (block,) = reasoning.content
    assert block.type == "thinking"
    assert (block.thinking, block.signature) == ("".join(deltas), "")
    assert block.thinking
    plain = await package.messages.create(**ASK, max_tokens=20)
    (text,) = plain.content
    assert text.type == "text"
    assert "<think>" not in text.text


@pytest.mark.parametrize("n_tokens", [0, 1, 9])
async def test_a_budget_ends_the_reasoning(
    package: anthropic.AsyncAnthropic, model: ServedModel, n_tokens: int
) -> None:
    body = {
        "messages": ASK["messages"],
        "max_tokens": 40,
        "reasoning_budget_tokens": n_tokens,
        "reasoning_budget_message": "Enough.",
        "ignore_eos": True,
    }
    transport = httpx2.ASGITransport(build_api({"m": model}))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        raw = (await client.post("/v1/chat/completions", json=body | RAW)).json()
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"].endswith("Enough.")
    assert message["content"]
    reasoning, _, answer = raw["choices"][0]["message"]["content"].partition("Enough.</think>")
    assert answer
    n_reasoned = len(model.tokenizer.tokenize(reasoning, False, False))
    assert n_tokens == 0 or 1 <= n_reasoned <= n_tokens + 4  # whole characters; texts merge tokens


async def test_a_budget_through_the_package(package: anthropic.AsyncAnthropic) -> None:
    thinking: ThinkingConfigParam = {"type": "enabled", "budget_tokens": 6}
    answer = await package.messages.create(**ASK, max_tokens=30, thinking=thinking)
    assert [block.type for block in answer.content] == ["thinking", "text"]


async def test_earlier_reasoning_is_the_templates_business(
    package: anthropic.AsyncAnthropic, model: ServedModel
) -> None:
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Hello."},
    ]
    turns = [*ASK["messages"], {"role": "assistant", "content": said}, *ASK["messages"]]
    counts = []
    for kind in ("adaptive", "disabled"):
        counted = await package.messages.count_tokens(
            model="m",
            messages=turns,
            thinking={"type": kind},  # type: ignore[arg-type]
        )
        counts.append(counted.input_tokens)
    before = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    after = "Hello.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    texts = [f"{before}<think>\nHm.\n</think>\n\n{after}", f"{before}{after}\n</think>\n\n"]
    assert counts == [len(model.tokenizer.tokenize(text, True, True)) for text in texts]


def test_an_effort_that_the_template_does_not_know_is_left_out() -> None:
    source = (
        "{% if reasoning_effort is defined and reasoning_effort not in ('low', 'high') %}"
        "{{ raise_exception('reasoning_effort: low or high') }}{% endif %}"
        "{{ messages[0].content }}|{{ reasoning_effort | default('none') }}"
    )
    tokenizer = Tokenizer(BUILTIN_MODEL, source)
    rendered = [
        tokenizer.render_chat([Turn("user", ("Hi",))], extra={"reasoning_effort": effort})
        for effort in ("low", "medium")
    ]
    assert rendered == ["Hi|low", "Hi|none"]
