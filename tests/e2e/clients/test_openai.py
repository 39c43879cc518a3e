"""The `openai` package against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.conftest import Corral


@pytest.fixture
def client(corral: Corral) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def greedy(client: openai.OpenAI, prompt: str, max_tokens: int = 24) -> str:
    return (
        client.completions.create(model="big", prompt=prompt, max_tokens=max_tokens, temperature=0)
        .choices[0]
        .text
    )


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["big", "small", "demo"]
    assert client.models.retrieve("small").id == "small"


def test_chat_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="big", messages=[{"role": "user", "content": "Hello"}], max_tokens=24, temperature=0
    )
    chunks = list(
        client.chat.completions.create(
            model="big",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.choices[0].finish_reason == "length"
    *text_chunks, usage_chunk = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in text_chunks)
    assert text == whole.choices[0].message.content
    assert text_chunks[-1].choices[0].finish_reason == "length"
    assert usage_chunk.usage is not None
    assert usage_chunk.usage.total_tokens == whole.usage.total_tokens


def test_a_repeated_prompt_is_found_in_the_cache(client: openai.OpenAI) -> None:
    def cached() -> int:
        usage = client.completions.create(
            model="big", prompt="A prompt that comes twice, word by word.", temperature=0
        ).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens - (usage.prompt_tokens_details.cached_tokens or 0)

    assert cached() > 1
    assert cached() == 1  # at least the last token is decoded again


def test_stop_strings_are_not_shown(client: openai.OpenAI) -> None:
    text = greedy(client, "Tell me")
    stop = text[8:12]
    answer = client.completions.create(
        model="big", prompt="Tell me", max_tokens=24, temperature=0, stop=stop
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


async def test_16_streams_at_once_each_get_their_own(corral: Corral, client: openai.OpenAI) -> None:
    prompts = [f"Story number {i} is about the {'very ' * i}old house" for i in range(16)]
    alone = [greedy(client, prompt, 40) for prompt in prompts]
    assert len(set(alone)) == 16
    before = corral.stats()
    async with openai.AsyncOpenAI(base_url=f"{corral.url}/v1", api_key="none") as many:

        async def stream(prompt: str) -> tuple[str, str | None]:
            text = ""
            reason: str | None = None
            async for chunk in await many.completions.create(
                model="big", prompt=prompt, max_tokens=40, temperature=0, stream=True
            ):
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason  # null in all chunks but the last
            return text, reason

        together = await asyncio.gather(*(stream(prompt) for prompt in prompts))
    assert together == [(text, "length") for text in alone]
    after = corral.stats()
    generated = after["tokens"]["generated_tokens"] - before["tokens"]["generated_tokens"]
    assert generated == 16 * 40
    assert (
        after["timing"]["steps"] - before["timing"]["steps"] < generated / 2
    )  # they shared their steps


def test_clients_see_errors_as_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'none' does not exist"):
        client.completions.create(model="none", prompt="x")
    with pytest.raises(openai.BadRequestError, match="grammar: ") as bad:
        client.completions.create(model="big", prompt="x", extra_body={"grammar": "root ::= ("})
    assert bad.value.param == "grammar"
    raw = client.completions.with_raw_response.create(
        model="big", prompt="x", max_tokens=1, extra_body={"nobody": "knows"}
    )
    assert raw.headers["x-corral-ignored"] == "nobody"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as too_long:
            client.completions.create(model="big", prompt=[1] * 2048, stream=stream)
        assert too_long.value.code == "context_length_exceeded"
        assert "2048 tokens exceeds the available context size of 2048" in str(too_long.value)
