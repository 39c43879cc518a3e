"""Structured output, several answers and log probabilities, through the `openai` package."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from tests.e2e.conftest import Corral

ASK: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of Portugal?"}
]


@pytest.fixture
def client(corral: Corral) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class City(BaseModel):
    """What the answer is parsed into."""

    name: str
    inhabitants: int
    coastal: bool


def test_an_answer_is_parsed_into_a_type(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="demo", messages=ASK, response_format=City, max_tokens=400, temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, City)


def test_a_json_object_is_streamed(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="demo",
        messages=ASK,
        response_format={"type": "json_object"},
        max_tokens=300,
        temperature=0,
        stream=True,
    )
    text, reason = "", None
    for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    assert text.startswith("{")
    if reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"regex": "[0-9]{3}-[0-9]{4}"}, r"[0-9]{3}-[0-9]{4}"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json_schema": {"enum": ["red", "green"]}}, '"(red|green)"'),
    ],
)
def test_texts_match(client: openai.OpenAI, extra: dict[str, object], pattern: str) -> None:
    answer = client.completions.create(
        model="big", prompt="My number is", max_tokens=50, extra_body=extra
    )
    assert re.fullmatch(pattern, answer.choices[0].text)
    assert answer.choices[0].finish_reason == "stop"


def test_what_is_no_schema_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="demo",
            messages=ASK,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "elephant"}},
            },
        )
    assert caught.value.param == "response_format"
    assert "elephant" in caught.value.message


def test_several_answers(client: openai.OpenAI, corral: Corral) -> None:
    answer = client.chat.completions.create(
        model="big", messages=ASK, n=4, seed=7, temperature=1.5, max_tokens=12
    )
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 48
    again = client.chat.completions.create(
        model="big", messages=ASK, seed=9, temperature=1.5, max_tokens=12
    )
    assert again.choices[0].message.content == texts[2]


def test_several_prompts_and_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="big", prompt=["One", "Two"], echo=True, max_tokens=4, temperature=0
    )
    assert [choice.text[:3] for choice in answer.choices] == ["One", "Two"]
    assert all(len(choice.text) > 3 for choice in answer.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_texts_are_scored(client: openai.OpenAI, stream: bool) -> None:
    """What lm-evaluation-harness asks: token ids in, their log probabilities out."""
    prompt = [(7 * i + 3) % 200 for i in range(90)]
    fields = {"model": "big", "prompt": prompt, "echo": True, "logprobs": 1, "temperature": 0}
    found = []
    for max_tokens in (0, 1):
        answer = client.completions.create(**fields, max_tokens=max_tokens, stream=stream)  # type: ignore[call-overload]
        parts = [c.choices[0].logprobs for c in answer] if stream else [answer.choices[0].logprobs]
        found.append([x for part in parts if part is not None for x in part.token_logprobs])
        tops = [x for part in parts if part is not None for x in part.top_logprobs]
        assert (found[-1][0], tops[0]) == (None, None)
        assert all(
            own <= max(top.values()) for own, top in zip(found[-1][1:], tops[1:], strict=True)
        )
    assert [len(one) for one in found] == [90, 91]
    assert found[0][1:] == pytest.approx(found[1][1:90], abs=0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client: openai.OpenAI, stream: bool) -> None:
    fields = {"model": "big", "messages": ASK, "max_tokens": 6, "temperature": 0}
    fields |= {"logprobs": True, "top_logprobs": 5, "stream": stream}
    answer = client.chat.completions.create(**fields)  # type: ignore[call-overload]
    if stream:
        found = [chunk.choices[0].logprobs for chunk in answer]
        content = [entry for one in found if one is not None for entry in one.content]
    else:
        content = answer.choices[0].logprobs.content
    assert len(content) == 6
    for entry in content:
        top = [one.logprob for one in entry.top_logprobs]
        assert top == sorted(top, reverse=True)
        assert entry.logprob == top[0]  # greedy takes the likeliest
        assert 0 < sum(map(math.exp, top)) <= 1 + 1e-6
