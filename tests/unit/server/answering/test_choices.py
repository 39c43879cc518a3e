"""Several answers, log probabilities, echoes: what one request may ask for at once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import httpx
import pytest

from serve_app.base.errors import QueueFullError
from serve_app.base.values.answers import FinishReason, TokenDelta, TokenLogprobs
from tests.unit.server.harness import END, HELLO, ByteTokenizer, ScriptedEngine, chat, events

LIKELY = [
    TokenDelta("H", (72,), None, (TokenLogprobs(-0.5, ((72, -0.5), (74, -1.0))),)),
    TokenDelta("", (195,), None, (TokenLogprobs(-0.1, ((195, -0.1), (65, -3.0))),)),
    TokenDelta(
        "é",
        (169, 256),
        END,
        (TokenLogprobs(-0.2, ((169, -0.2), (256, -2.0))), TokenLogprobs(-0.3, ((256, -0.3),))),
    ),
]


async def test_every_prompt_gets_its_answers(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "seed": 7}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(i, "Hello") for i in range(4)]
    assert [bytes(r.prompt) for r in engine.requests] == [b"a", b"a", b"b", b"b"]
    assert [r.sampling.seed for r in engine.requests] == [7, 8, 7, 8]
    assert [r.id for r in engine.requests] == [f"{answer['id']}.{i}" for i in range(4)]
    # A prompt's tokens count once.
    assert answer["usage"]["prompt_tokens"] == 2 * END.usage.prompt_tokens
    assert answer["usage"]["completion_tokens"] == 4 * END.usage.completion_tokens


async def test_batches_of_tokens(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    await client.post("/v1/completions", json={"prompt": [[1, 2], [3]]})
    assert [r.prompt for r in engine.requests] == [(1, 2), (3,)]


async def test_streamed_choices_have_their_index(client: httpx.AsyncClient) -> None:
    *chunks, usage, done = events(
        await client.post(
            "/v1/chat/completions",
            json=chat(n=3, stream=True, stream_options={"include_usage": True}),
        )
    )
    assert done == "[DONE]"
    texts = ["", "", ""]
    reasons: list[Any] = [None, None, None]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        reasons[choice["index"]] = choice["finish_reason"]
    assert (texts, reasons) == (["Hello"] * 3, ["stop"] * 3)
    assert usage["usage"]["completion_tokens"] == 3 * END.usage.completion_tokens


async def test_one_refusal_refuses_all(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.scripts = [HELLO, [QueueFullError("full", 7)]]
    response = await client.post("/v1/chat/completions", json=chat(n=2))
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")


async def test_the_best_of_several(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    def said(text: str, *logprobs: float) -> list[TokenDelta | Exception]:
        found = tuple(TokenLogprobs(logprob, ()) for logprob in logprobs)
        return [TokenDelta(text, tuple(range(len(found))), END, found)]

    engine.scripts = [said("worst", -3, -3), said("best", -1), said("good", -1, -2, -1)]
    body = {"prompt": "x", "best_of": 3, "n": 2}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "best"), (1, "good")]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 3 * END.usage.completion_tokens
    assert {r.sampling.logprobs for r in engine.requests} == {0}


async def test_echo(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["ab", "c"], "echo": True}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [c["text"] for c in answer["choices"]] == ["abHello", "cHello"]
    body = {"prompt": [104, 105], "echo": True, "stream": True}
    *chunks, _ = events(await client.post("/v1/completions", json=body))
    assert [c["choices"][0]["text"] for c in chunks] == ["hi", "Hel", "lo", ""]


async def test_infill(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    await client.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert bytes(engine.requests[0].prompt) == b"<a|b>"


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = list(LIKELY)
    body = chat(logprobs=True, top_logprobs=2, stream=stream)
    response = await client.post("/v1/chat/completions", json=body)
    if stream:
        chunks = [chunk["choices"][0] for chunk in events(response)[:-1]]
        content = [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]]
        assert "".join(c["delta"].get("content") or "" for c in chunks) == "Hé"
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert engine.requests[0].sampling.logprobs == 2
    # Control tokens, 256 here, are no text.
    assert [(e["token"], e["bytes"], e["logprob"]) for e in content] == [
        ("H", [72], -0.5),
        ("�", [195], -0.1),
        ("�", [169], -0.2),
    ]
    assert [t["token"] for t in content[0]["top_logprobs"]] == ["H", "J"]
    assert bytes(byte for e in content for byte in e["bytes"]).decode() == "Hé"


@pytest.mark.parametrize("stream", [False, True])
async def test_text_logprobs(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = list(LIKELY)
    body = {"prompt": "x", "logprobs": 2, "stream": stream}
    response = await client.post("/v1/completions", json=body)
    if stream:
        bodies = [chunk["choices"][0]["logprobs"] for chunk in events(response)[:-1]]
        found = {name: [x for body in bodies for x in body[name]] for name in bodies[0]}
    else:
        found = response.json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["H", "�", "�"]
    assert found["token_logprobs"] == [-0.5, -0.1, -0.2]
    assert found["text_offset"] == [0, 1, 2]
    assert found["top_logprobs"][0] == {"H": -0.5, "J": -1.0}
    assert math.isclose(sum(found["token_logprobs"]), -0.8)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "regex": "[a-z]+"}),
        ("/v1/completions", {"prompt": "x", "grammar": 'root ::= "yes" | "no"'}),
        ("/v1/completions", {"prompt": "x", "json_schema": {"type": "integer"}}),
        ("/v1/chat/completions", chat(response_format={"type": "json_object"})),
        (
            "/v1/chat/completions",
            chat(
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "integer"}, "strict": True},
                }
            ),
        ),
    ],
)
async def test_formats_reach_the_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, fields: dict[str, Any]
) -> None:
    assert (await client.post(path, json=fields)).status_code == 200
    assert engine.requests[0].sampling.grammar


def likely(*found: float) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(logprob, ((65, logprob),)) for logprob in found)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "tokens", "offsets"),
    [
        ("xé", ["x", "�", "�"], [0, 1, 2]),
        ([120, 256, 121], ["x", "</s>", "y"], [0, 1, 1]),  # 256 is a control token, and no text
    ],
)
async def test_echo_with_logprobs_tells_every_token(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    stream: bool,
    prompt: Any,
    tokens: list[str],
    offsets: list[int],
) -> None:
    engine.script = [
        TokenDelta("H", (72,), None, likely(-1.0), likely(-2.0, -3.0)),
        TokenDelta("", (256,), END, likely(-4.0)),
    ]
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "stream": stream}
    response = await client.post("/v1/completions", json=body)
    assert engine.requests[0].sampling.prompt_logprobs
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response)[:-1]]
        bodies = [choice["logprobs"] for choice in choices]
        found = {name: [x for body in bodies for x in body[name]] for name in bodies[0]}
        text = "".join(choice["text"] for choice in choices)
    else:
        (choice,) = response.json()["choices"]
        found, text = choice["logprobs"], choice["text"]
    shown = prompt if isinstance(prompt, str) else "xy"
    assert text == f"{shown}H"
    assert found["tokens"] == [*tokens, "H", "</s>"]
    assert found["token_logprobs"] == [None, -2.0, -3.0, -1.0, -4.0]
    assert found["top_logprobs"] == [None, {"A": -2.0}, {"A": -3.0}, {"A": -1.0}, {"A": -4.0}]
    assert found["text_offset"] == [*offsets, 2, 3]


async def test_a_text_is_scored_without_an_answer(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    end = dataclasses.replace(END, reason=FinishReason.LENGTH)
    engine.script = [TokenDelta("", (), end, (), likely(-2.0))]
    body = {"prompt": "xy", "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    assert engine.requests[0].sampling.max_tokens == 0
    assert (choice["text"], choice["finish_reason"]) == ("xy", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0]


async def test_a_blank_that_is_not_in_the_text_takes_no_room(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    tokenizer: ByteTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SentencePiece's tokenizers put one before a text, and a BOS before that."""
    monkeypatch.setattr(tokenizer, "encode", lambda text: (256, 32, *text.encode()))
    engine.script = [TokenDelta("H", (72,), END, likely(-1.0), likely(-2.0, -3.0, -4.0))]
    body = {"prompt": "xy", "echo": True, "logprobs": 0}
    (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["</s>", " ", "x", "y", "H"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 2]
