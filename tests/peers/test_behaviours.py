"""What llama-server does, asked of it and of Corral one after the other: each test must hold for both."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.peers.answers import Pair
from tests.peers.conftest import N_CTX_SLOT

BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "Which is the best?"}]
FOX = "the quick brown fox jumps over the lazy dog "


@pytest.fixture(params=["llama-server", "Corral"])
def client(request: pytest.FixtureRequest, pair: Pair) -> httpx.Client:
    return pair.theirs if request.param == "llama-server" else pair.ours


def post(client: httpx.Client, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line not in ("[DONE]", "null")]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_does_not_fit(client: httpx.Client, path: str, is_streamed: bool) -> None:
    said = {"messages": [{"role": "user", "content": FOX * 60}]}
    body = (said if "chat" in path else {"prompt": FOX * 60}) | {"stream": is_streamed}
    error = post(client, path, body, 400)["error"]
    assert error["type"] == "exceed_context_size_error"
    assert "exceeds the available context size" in error["message"]
    assert error["n_prompt_tokens"] > error["n_ctx"] == N_CTX_SLOT


@pytest.mark.parametrize("field", ["stream", "n_probs", "stop", "seed", "temperature", "grammar"])
def test_null_is_as_if_it_were_missing(client: httpx.Client, field: str) -> None:
    asked = {"prompt": "Hello", "n_predict": 3}
    answer = post(client, "/completion", asked | {field: None})
    assert answer["content"] == post(client, "/completion", asked)["content"]


def test_several_prompts(client: httpx.Client) -> None:
    answer = post(client, "/completion", {"prompt": ["Hello", "There"], "n_predict": 3})
    assert [one["index"] for one in answer] == [0, 1]
    alone = [
        post(client, "/completion", {"prompt": one, "n_predict": 3}) for one in ("Hello", "There")
    ]
    assert [one["content"] for one in answer] == [one["content"] for one in alone]


def test_several_prompts_are_streamed_by_index(client: httpx.Client) -> None:
    found = stream(client, "/completion", {"prompt": ["Hello", "There"], "n_predict": 3})
    for index in (0, 1):
        own = [one for one in found if one["index"] == index]
        assert [one["stop"] for one in own] == [False] * (len(own) - 1) + [True]


def test_several_answers_differ_by_their_seeds(client: httpx.Client) -> None:
    body = {"messages": BOOK, "n": 2, "max_tokens": 8}
    choices = post(client, "/v1/chat/completions", body)["choices"]
    assert sorted(one["index"] for one in choices) == [0, 1]


def test_the_slot_that_is_asked_for(client: httpx.Client) -> None:
    for slot in (1, 0, 1):
        body = {"prompt": "Hello", "n_predict": 2, "id_slot": slot}
        assert post(client, "/completion", body)["id_slot"] == slot


def test_a_prompt_that_is_not_cached(client: httpx.Client) -> None:
    body = {"prompt": FOX * 3, "n_predict": 2, "id_slot": 0}
    post(client, "/completion", body)
    again = post(client, "/completion", body)["timings"]
    anew = post(client, "/completion", body | {"cache_prompt": False})["timings"]
    assert again["cache_n"] + again["prompt_n"] == anew["prompt_n"]
    assert (again["cache_n"] > 0, anew["cache_n"]) == (True, 0)


def test_chunks_behind_a_change(pair: Pair) -> None:
    """The cache has a sentence that the prompt has no more: what follows is moved, and not computed."""
    begun, gone, rest = "Once upon a time. ", "Nobody knew why it was so. ", FOX * 4
    first = {"prompt": begun + gone + rest, "n_predict": 1, "id_slot": 0}
    then = {"prompt": begun + rest, "n_predict": 4, "id_slot": 0, "n_cache_reuse": 4}
    told = []
    for client in (pair.theirs, pair.ours):
        post(client, "/completion", first | {"cache_prompt": True})
        answer = post(client, "/completion", then)
        told.append((answer["timings"]["cache_n"], answer["content"]))
    assert told[1] == told[0]
    assert told[1][0] > 30


def test_probabilities_before_sampling(client: httpx.Client) -> None:
    body = {"prompt": "Hello", "n_probs": 3, "n_predict": 4}
    found = post(client, "/completion", body)["completion_probabilities"]
    assert len(found) == 4
    for entry in found:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["id"] == entry["id"]  # greedy


def test_probabilities_after_sampling(pair: Pair) -> None:
    body = {"prompt": "Hello there", "n_probs": 3, "n_predict": 4, "post_sampling_probs": True}
    told = []
    for client in (pair.theirs, pair.ours):
        answer = post(client, "/completion", body | {"temperature": 1.2, "seed": 3})
        found = answer["completion_probabilities"]
        told.append([[one["prob"], *(top["prob"] for top in one["top_probs"])] for one in found])
    for theirs, ours in zip(*told, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-3)  # their kernels round otherwise


def test_a_time_limit_past_a_line(client: httpx.Client) -> None:
    body = {"prompt": "a", "n_predict": 150, "t_max_predict_ms": 1, "ignore_eos": True}
    lines = 'root ::= ("ab\\n"){1,100}'
    answer = post(client, "/completion", body | {"grammar": lines})
    assert answer["tokens_predicted"] < 150
    assert (answer["stop_type"], answer["content"][-1]) == ("limit", "\n")


def test_an_indentation_too_small(pair: Pair) -> None:
    grammar = 'root ::= "a\\n   b\\n c" "d"*'
    body = {"prompt": "hello", "n_predict": 40, "n_indent": 2, "grammar": grammar}
    theirs, ours = (post(one, "/completion", body) for one in (pair.theirs, pair.ours))
    names = ("content", "stop_type", "truncated")
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": FOX * 8, "n_predict": 4}),
        ("/v1/completions", {"prompt": FOX * 9, "max_tokens": 4}),
        ("/chat/completions", {"messages": [{"role": "user", "content": FOX * 7}]}),
        ("/v1/responses", {"input": FOX * 6, "max_output_tokens": 4}),
    ],
)
def test_progress(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    asked = body | {"return_progress": True, "timings_per_token": True}
    told = [one for one in stream(client, path, asked) if "prompt_progress" in one]
    steps = [one["prompt_progress"] for one in told]
    assert len({(one["total"], one["cache"]) for one in steps}) == 1
    assert steps[0]["cache"] == steps[0]["processed"]
    done = [one["processed"] for one in steps]
    assert done == sorted(set(done))
    assert done[-1] == steps[-1]["total"]
    if path != "/v1/responses":
        first = told[0]["timings"]
        assert (first["prompt_n"], first["predicted_n"]) == (0, 0)


def test_timings_of_each_token(client: httpx.Client) -> None:
    body = {"prompt": "Hello", "n_predict": 4, "timings_per_token": True}
    told = [one["timings"]["predicted_n"] for one in stream(client, "/completion", body)]
    assert told == sorted(told)
    assert told[-1] == 4


PREFILLED: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"continue_final_message": True, "add_generation_prompt": False},
]


@pytest.mark.parametrize("fields", PREFILLED)
@pytest.mark.parametrize(
    "text", ["Whi", [{"type": "text", "text": "W"}, {"type": "text", "text": "hi"}]], ids=str
)
def test_templates_of_begun_answers(pair: Pair, text: Any, fields: dict[str, Any]) -> None:
    begun = [*BOOK, {"role": "assistant", "content": text}]
    theirs, ours = pair.ask("POST", "/apply-template", {"messages": begun} | fields)
    assert (ours.status, ours.body) == (theirs.status, theirs.body)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": BOOK},
        {"messages": BOOK, "add_generation_prompt": False},
        {"messages": BOOK, "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]},
        {"messages": [*BOOK, {"role": "assistant", "content": "x"}, BOOK[1]]},
    ],
)
def test_templates(pair: Pair, body: dict[str, Any]) -> None:
    theirs, ours = pair.ask("POST", "/apply-template", body)
    assert (ours.status, ours.body) == (theirs.status, theirs.body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/input_tokens", {"messages": BOOK}),
        ("/v1/responses/input_tokens", {"input": "Hello"}),
        ("/v1/responses/input_tokens", {"input": BOOK, "instructions": "Be brief."}),
        ("/v1/messages/count_tokens", {"messages": BOOK[1:], "system": "Book"}),
    ],
)
def test_counts(pair: Pair, path: str, body: dict[str, Any]) -> None:
    theirs, ours = pair.ask("POST", path, body)
    assert (ours.status, ours.body) == (theirs.status, theirs.body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/props", {}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/slots/0?action=erase", {}),
        ("/slots/0?action=save", {"filename": "x"}),
    ],
)
def test_what_this_server_was_not_started_for(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert post(client, path, body, 501)["error"]["type"] == "not_supported_error"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/v1/messages"])
def test_images(client: httpx.Client, path: str) -> None:
    """A status that clients try again at."""
    red = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{red}"}}
    if path == "/v1/messages":
        source = {"type": "base64", "media_type": "image/png", "data": red}
        image = {"type": "image", "source": source}
    answer = client.post(path, json={"messages": [{"role": "user", "content": [image]}],
                                     "max_tokens": 4})  # fmt: skip
    assert answer.status_code == 500
    assert "image input is not supported" in answer.json()["error"]["message"].lower()


def test_headers_have_capitals(client: httpx.Client) -> None:
    answer = client.get("/metrics")
    names = {name for name, _ in answer.headers.raw}
    assert {b"Process-Start-Time-Unix", b"Content-Type"} <= names


def test_a_grammar_that_begins_with_its_trigger(pair: Pair) -> None:
    body = {
        "prompt": "Hello",
        "n_predict": 12,
        "grammar": 'root ::= " " [a-zA-Z]* "."',
        "grammar_lazy": True,
        "grammar_triggers": [{"type": 1, "value": " "}],
        "preserved_tokens": [" "],
    }
    theirs, ours = pair.ask("POST", "/completion", body)
    assert (ours.status, ours.body["content"]) == (theirs.status, theirs.body["content"])
    told = [one.body["generation_settings"] for one in (theirs, ours)]
    assert told[1]["grammar_lazy"] is told[0]["grammar_lazy"] is True
