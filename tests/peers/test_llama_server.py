"""The same requests to llama-server and to Corral: the same status, the same fields, the same greedy text.

Where Corral differs on purpose, `ON_PURPOSE` says so; anything else that llama-server tells is told here.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers.answers import Answer, Pair, missing

HI = [{"role": "user", "content": "What is the capital of France?"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *HI]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
GENERATING: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "Hello"}),
    ("/completion", {"prompt": "Hello", "n_predict": 3, "return_tokens": True}),
    ("/completion", {"prompt": "Hello", "n_predict": 3, "n_probs": 2}),
    ("/completion", {"prompt": "Hello", "stop": ["help"]}),
    ("/completion", {"prompt": {"prompt_string": "Hello"}, "n_predict": 2}),
    ("/completion", {"prompt": ["Hello", 3, "there"], "n_predict": 2}),
    ("/completion", {"prompt": "Hello", "logit_bias": [[" How", False]], "n_predict": 4}),
    ("/completion", {"prompt": "Hello", "logit_bias": {" How": -100}, "n_predict": 4}),
    ("/completion", {"prompt": "Hello", "grammar": 'root ::= "a"{3}'}),
    ("/completion", {"prompt": "Hello", "json_schema": {"const": "x"}}),
    ("/completion", {"prompt": "Hello", "n_predict": 2, "cache_prompt": False, "id_slot": 0}),
    ("/completion", {"prompt": "Hello", "n_predict": 2, "temperature": 0, "nobody": "knows"}),
    ("/completions", {"prompt": "Hello", "n_predict": 2}),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": HI}),
    ("/chat/completions", {"messages": SYSTEM, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": HI, "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {"messages": HI, "model": "gpt-4o-mini", "timings_per_token": True}),
    ("/v1/chat/completions", {"messages": [*HI, {"role": "assistant", "content": "The capital"}]}),
    ("/v1/messages", {"messages": HI, "max_tokens": 64}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 64}),
]
SAMPLED = [
    {},
    {"top_k": 5},
    {"samplers": ["temperature", "top_k"], "top_k": 3},
    {"samplers": "kt"},
    {"samplers": []},
    {"samplers": "tk"},
    {"samplers": ["TOP_K", "minp", "nobody"]},
    {"mirostat": 2, "repeat_penalty": 1.5, "dry_multiplier": 2},
    {"temperature": 0, "xtc_probability": 1.0},
    {"temperature": 0, "typical_p": 0.3},
    {"temperature": 0, "dynatemp_range": 1},
    {"temperature": 0, "samplers": ["top_k"]},
    {"dry_multiplier": 1, "dry_base": 0.5, "ignore_eos": True, "n_predict": 120},
    {"min_p": 0.2, "min_keep": 3},
    {"typical_p": 0.6},
    {"top_n_sigma": 1.5},
    {"xtc_probability": 0.7, "xtc_threshold": 0.1},
    {"dynatemp_range": 0.5, "dynatemp_exponent": 1.2},
    {"mirostat": 1},
    {"samplers": ["top_k", "adaptive_p"], "adaptive_target": 0.4, "n_predict": 60},
    {"samplers": "ktai", "adaptive_target": 0.2, "adaptive_decay": 0.5, "ignore_eos": True},
    {"samplers": ["adaptive_p"], "adaptive_target": -1},
    {"samplers": ["infill"]},
    {"mirostat": 2, "mirostat_tau": 3, "mirostat_eta": 0.2},
    {"dry_multiplier": 2, "dry_allowed_length": 1, "ignore_eos": True},
    {"dry_multiplier": 2, "dry_sequence_breakers": ["a"], "ignore_eos": True},
    {"repeat_penalty": 1.5, "presence_penalty": 0.5, "ignore_eos": True},
]
STREAMED = [(path, body) for path, body in GENERATING if not isinstance(body.get("prompt"), list)]
OTHERS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/health", None),
    ("GET", "/props", None),
    ("GET", "/v1/models", None),
    ("GET", "/slots", None),
    ("GET", "/lora-adapters", None),
    ("POST", "/tokenize", {"content": "Hello there"}),
    ("POST", "/tokenize", {"content": "Hello ü", "with_pieces": True, "add_special": True}),
    ("POST", "/detokenize", {"tokens": [870, 1040]}),
    ("POST", "/apply-template", {"messages": SYSTEM}),
    ("POST", "/v1/chat/completions/input_tokens", {"messages": SYSTEM}),
    ("POST", "/v1/messages/count_tokens", {"messages": HI}),
]
EQUAL = {"/tokenize", "/apply-template", "/lora-adapters", "/health"}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {}),
    ("/completion", {"prompt": "word " * 1000}),
    ("/v1/chat/completions", {"messages": []} | {"messages": "text"}),
    ("/v1/chat/completions", {"messages": SYSTEM * 100}),
    ("/v1/chat/completions", {"messages": HI, "grammar": "root ::= ("}),
    ("/v1/chat/completions", {"messages": HI, "response_format": {"type": "sound"}}),
    ("/v1/chat/completions", {"messages": HI, "tools": [TOOL], "tool_choice": "wrong"}),
    (
        "/v1/chat/completions",
        {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
    ),
]
ON_PURPOSE = (
    "models",  # Ollama's list within OpenAI's
    "media_marker",
    "error.code is",  # names, as OpenAI has them, and not the status again
    "0.params",  # of slots: what others asked for is told to operators by /v1/stats
    "0.next_token",
    "0.speculative",
    "0.n_prompt_tokens",
    "0.id_task",
    "choices.0.logprobs",
    "usage is missing",  # of streams: in a chunk of its own, where it is asked for, as OpenAI has it
)


def differences(theirs: Any, ours: Any) -> list[str]:
    found = missing(theirs, ours)
    return [one for one in found if not one.startswith(ON_PURPOSE)]


def test_what_the_model_is(pair: Pair) -> None:
    theirs, ours = pair.ask("GET", "/v1/models", None)
    assert ours.body["data"][0]["meta"] == theirs.body["data"][0]["meta"]
    theirs, ours = pair.ask("GET", "/props", None)
    for name in ("model_ftype", "chat_template_caps", "bos_token", "eos_token"):
        assert ours.body[name] == theirs.body[name]
    # The line end at the file's end is told by one of the two only.
    assert ours.body["chat_template"].rstrip() == theirs.body["chat_template"].rstrip()


def text_of(answer: Answer) -> str:
    """What was generated, whatever the protocol."""
    if not answer.events:
        return _text(answer.body)
    return "".join(_piece(event) for event in answer.events)


def _text(body: Any) -> str:
    if "choices" in body:
        (choice,) = body["choices"]
        return str(choice.get("text", choice.get("message", {}).get("content")))
    if "output" in body:
        return str(body["output"][-1]["content"][0]["text"])
    content = body["content"]
    return content if isinstance(content, str) else str(content[0]["text"])


def _piece(event: Any) -> str:
    if event.get("choices"):
        (choice,) = event["choices"]
        return choice.get("text") or choice.get("delta", {}).get("content") or ""
    if event.get("type") == "content_block_delta":
        return str(event["delta"].get("text", ""))
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    return str(event["content"]) if isinstance(event.get("content"), str) else ""


@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_whole_answers(pair: Pair, path: str, body: dict[str, Any]) -> None:
    theirs, ours = pair.ask("POST", path, body)
    assert (theirs.status, ours.status) == (200, 200), (theirs.body, ours.body)
    assert differences(theirs.body, ours.body) == []
    assert text_of(ours) == text_of(theirs)


@pytest.mark.parametrize(("path", "body"), STREAMED)
def test_streams(pair: Pair, path: str, body: dict[str, Any]) -> None:
    theirs, ours = pair.ask("POST", path, body | {"stream": True})
    assert (theirs.status, ours.status) == (200, 200), ours.body
    assert ours.is_done == theirs.is_done
    assert text_of(ours) == text_of(theirs)
    for place in (0, -1):
        assert differences(theirs.events[place], ours.events[place]) == []
    kinds = [{event.get("type") for event in one.events} for one in (theirs, ours)]
    assert kinds[0] <= kinds[1]


@pytest.mark.parametrize(("method", "path", "body"), OTHERS)
def test_what_else_there_is(
    pair: Pair, method: str, path: str, body: dict[str, Any] | None
) -> None:
    theirs, ours = pair.ask(method, path, body)
    assert (theirs.status, ours.status) == (200, 200), ours.body
    assert differences(theirs.body, ours.body) == []
    if path in EQUAL:
        assert ours.body == theirs.body
    if path == "/detokenize":  # vLLM's name is beside llama-server's
        assert ours.body == {**theirs.body, "prompt": theirs.body["content"]}


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_what_is_refused(pair: Pair, path: str, body: dict[str, Any]) -> None:
    theirs, ours = pair.ask("POST", path, body)
    assert ours.status == theirs.status == 400
    assert differences(theirs.body, ours.body) == []
    assert ours.body["error"]["type"] == theirs.body["error"]["type"]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("sampling", SAMPLED, ids=repr)
def test_samplers_draw_alike(pair: Pair, sampling: dict[str, Any], seed: int) -> None:
    body = {"prompt": "Tell me a story", "temperature": 1.3, "seed": seed, **sampling}
    theirs, ours = pair.ask("POST", "/completion", body)
    assert (theirs.status, ours.status) == (200, 200)
    assert ours.body["content"] == theirs.body["content"]
    told = [one.body["generation_settings"] for one in (theirs, ours)]
    assert told[1]["samplers"] == told[0]["samplers"]


@pytest.mark.parametrize("names", ["ttk", ["temperature", "top_k", "temperature"]], ids=str)
def test_a_sampler_that_is_named_twice_counts_once(pair: Pair, names: object) -> None:
    """llama-server applies it twice: here a request cannot make each token cost as much as it likes."""
    body = {"prompt": "Tell me a story", "temperature": 1.3, "seed": 1}
    twice = pair.ask("POST", "/completion", body | {"samplers": names})
    once = pair.ask("POST", "/completion", body | {"samplers": "tk"})
    assert (twice[0].status, twice[1].status) == (200, 200)
    assert twice[0].body["content"] != once[0].body["content"]
    assert twice[1].body["content"] == once[1].body["content"] == once[0].body["content"]
