"""A real chat model behind Serve: facts over every protocol, its end of turn, its whole context, JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import httpx
import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from loadtests.common.servers import Server, serve_run
from serve_app.kernels.llama.model import Model
from tests.real.models import TEXT, smollm2

CONTEXT = 8192
FACTS = {
    "How many days are in a week?": "7 days",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What color is the sky?": "blue",
}
"""Questions of which 135 million parameters know the answer."""
COMPLETIONS = {
    "The capital of France is": "Paris",
    "The capital of Italy is": "Rome",
    "The opposite of hot is": "cold",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = {"n_slots": 2, "n_ctx_slot": CONTEXT, "backend": "llama.cpp"}
    # Which attention is faster is measured, and each rounds in its own way: near ties would decide.
    engine |= {"flash_attn": True, "kv_unified": False}
    model = {"id": "smollm2", "source": {"path": str(smollm2())}, "engine": engine}
    with serve_run(model) as running:
        yield running


def messages(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


def openai(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def by_chat(server: Server, question: str) -> str:
    client = openai(server)
    completion = client.chat.completions.create(
        model="smollm2", messages=messages(question), temperature=0, max_tokens=200
    )
    (choice,) = completion.choices
    assert choice.finish_reason == "stop"
    return choice.message.content or ""


def by_stream(server: Server, question: str) -> str:
    client = openai(server)
    chunks = client.chat.completions.create(
        model="smollm2", messages=messages(question), temperature=0, max_tokens=200, stream=True
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[-1].finish_reason == "stop"
    return "".join(choice.delta.content or "" for choice in choices)


def by_responses(server: Server, question: str) -> str:
    client = openai(server)
    response = client.responses.create(
        model="smollm2", input=question, temperature=0, max_output_tokens=200
    )
    assert response.status == "completed"
    return response.output_text


def by_messages(server: Server, question: str) -> str:
    client = Anthropic(base_url=server.url, api_key="none", max_retries=0)
    message = client.messages.create(
        model="smollm2", messages=messages(question), max_tokens=200, extra_body={"temperature": 0}
    )
    assert message.stop_reason == "end_turn"
    return "".join(block.text for block in message.content if block.type == "text")


def by_ollama(server: Server, question: str) -> str:
    body = {"model": "smollm2", "messages": messages(question), "stream": False}
    options = {"temperature": 0, "num_predict": 200}
    answer = httpx.post(f"{server.url}/api/chat", json=body | {"options": options}, timeout=60)
    assert answer.json()["done_reason"] == "stop"
    return str(answer.json()["message"]["content"])


def by_llama_servers_routes(server: Server, question: str) -> str:
    prompt = httpx.post(f"{server.url}/apply-template", json={"messages": messages(question)})
    body = {"prompt": prompt.json()["prompt"], "temperature": 0, "n_predict": 200}
    answer = httpx.post(f"{server.url}/completion", json=body, timeout=60).json()
    assert answer["stop_type"] == "eos"
    return str(answer["content"])


PROTOCOLS = [by_chat, by_stream, by_responses, by_messages, by_ollama, by_llama_servers_routes]


@pytest.mark.parametrize("ask", PROTOCOLS, ids=lambda ask: ask.__name__)
def test_it_knows_facts_and_ends_its_turn(
    server: Server, ask: Callable[[Server, str], str]
) -> None:
    answers = {question: ask(server, question) for question in FACTS}
    assert {question for question, fact in FACTS.items() if fact not in answers[question]} == set()
    assert answers == {question: by_chat(server, question) for question in FACTS}


def test_it_goes_on_with_a_text_that_it_knows(server: Server) -> None:
    client = openai(server)
    for text, fact in COMPLETIONS.items():
        completion = client.completions.create(
            model="smollm2", prompt=text, temperature=0, max_tokens=8
        )
        assert fact in completion.choices[0].text


class Person(BaseModel):
    """What the model is to fill in."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=40)]
    age: Annotated[int, Field(ge=0, le=150)]
    role: Literal["doctor", "teacher", "engineer"]
    skills: Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=3)]


@pytest.mark.parametrize("seed", range(10))
def test_json_by_schema_is_always_valid(server: Server, seed: int) -> None:
    """However odd the words are that a high temperature draws."""
    form: Any = {"name": "person", "schema": Person.model_json_schema(), "strict": True}
    completion = openai(server).chat.completions.create(
        model="smollm2",
        messages=messages("Invent a person."),
        response_format={"type": "json_schema", "json_schema": form},
        temperature=1.5,
        seed=seed,
        max_tokens=600,
    )
    assert completion.choices[0].finish_reason == "stop"
    Person.model_validate_json(completion.choices[0].message.content or "")


def test_the_context_is_filled_to_its_last_token(server: Server) -> None:
    tokens = Model(smollm2(), vocab_only=True).tokenize(TEXT, add_special=True, parse_special=False)
    n_prompt = CONTEXT - 32
    prompt = (tokens * (n_prompt // len(tokens) + 1))[:n_prompt]
    completion = openai(server).completions.create(
        model="smollm2",
        prompt=list(prompt),
        temperature=0,
        max_tokens=1000,
        extra_body={"ignore_eos": True},
    )
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == n_prompt
    assert completion.usage.total_tokens == CONTEXT
    assert completion.choices[0].finish_reason == "length"


def test_a_prompt_that_fills_the_context_is_refused(server: Server) -> None:
    with pytest.raises(BadRequestError, match=r"8192|8,192"):
        openai(server).completions.create(model="smollm2", prompt=[20] * CONTEXT, max_tokens=1)
