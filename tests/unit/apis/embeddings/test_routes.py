"""Embeddings, rankings and classes over a scripted engine."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest

from serve_app.apis.embeddings import preparation
from serve_app.base.errors import InvalidRequestError, QueueFullError
from serve_app.config.defaults import ModelDefaults
from serve_app.server.answering import vectors
from serve_app.server.model_registry import ModelInfo
from tests.doubles.api import prepared
from tests.unit.server.harness import N_CTX_SLOT, ByteModelFile, ByteTokenizer, ScriptedEngine

LABELS = ("joy", "anger", "fear")


async def ask(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refused(
    client: httpx.AsyncClient, path: str, status: int = 400, /, **body: Any
) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def unit(*numbers: float) -> Any:
    return pytest.approx([n / np.linalg.norm(numbers) for n in numbers], abs=1e-6)


async def test_one_text(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    answer = await ask(client, input="abc", model="first", user="someone")
    assert engine.texts == [((97, 98, 99),)]
    assert engine.clients == ["someone"]
    (data,) = answer.pop("data")
    assert data == {"object": "embedding", "index": 0, "embedding": unit(99, 3, 0)}
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    assert answer == {"object": "list", "model": "first", "usage": usage}


@pytest.mark.parametrize(
    ("given", "texts"),
    [(["ab", "c"], ((97, 98), (99,))), ([5, 6], ((5, 6),)), ([[5, 6], [7]], ((5, 6), (7,)))],
    ids=repr,
)
async def test_every_form_of_input(
    client: httpx.AsyncClient, engine: ScriptedEngine, given: Any, texts: Any
) -> None:
    answer = await ask(client, input=given)
    assert engine.texts == [texts]
    assert [one["index"] for one in answer["data"]] == list(range(len(texts)))
    expected = [unit(text[-1], len(text), 0) for text in texts]
    assert [one["embedding"] for one in answer["data"]] == expected
    assert answer["usage"]["total_tokens"] == sum(map(len, texts))


async def test_2048_texts_are_taken_and_no_more(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    assert len((await ask(client, input=["some text"] * 2048))["data"]) == 2048
    await refused(client, "/v1/embeddings", input=["a"] * 2049)
    assert len(engine.texts) == 1


async def test_dimensions_cut_and_have_length_1_again(client: httpx.AsyncClient) -> None:
    (data,) = (await ask(client, input="abc", dimensions=2))["data"]
    assert data["embedding"] == unit(99, 3)
    (data,) = (await ask(client, input="abc", dimensions=1))["data"]
    assert data["embedding"] == [1]


async def test_base64_holds_the_same_floats(client: httpx.AsyncClient) -> None:
    (plain,) = (await ask(client, input="abc", encoding_format="float"))["data"]
    (packed,) = (await ask(client, input="abc", encoding_format="base64"))["data"]
    floats = np.frombuffer(base64.b64decode(packed["embedding"]), "<f4")
    assert floats.tolist() == np.array(plain["embedding"], np.float32).tolist()


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": ""}, "input", "Input content cannot be empty"),
        ({"input": []}, "input", "none may be empty"),
        ({"input": ["a", ""]}, "input", "Input content cannot be empty"),
        ({"input": [[1], []]}, "input", "none may be empty"),
        ({"input": [1, 257]}, "input", "token ids of this model are below 257"),
        ({"input": [-1]}, "input", "must be a text, a list of token ids"),
        ({}, "input", "required"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "dimensions": 4}, "dimensions", "embeddings have 3"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
    ],
    ids=repr,
)
async def test_what_cannot_work_is_refused_by_name(
    client: httpx.AsyncClient, engine: ScriptedEngine, body: Any, param: str, message: str
) -> None:
    error = await refused(client, "/v1/embeddings", **body)
    assert message in error["message"]
    assert error["param"] == param
    assert engine.texts == []


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/embeddings", "input"), ("/embedding", "input"), ("/rerank", "documents")],
)
async def test_too_long_a_text_is_refused_before_the_engine(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    field: str,
) -> None:
    monkeypatch.setattr(ByteTokenizer, "reranks", path == "/rerank")
    query = {"query": "q"} if path == "/rerank" else {}
    n_fitting = N_CTX_SLOT - {"/rerank": 2}.get(path, 0)  # "q|"
    error = await refused(client, path, **query, **{field: ["ok", "x" * (n_fitting + 1)]})
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == field
    assert f"{N_CTX_SLOT + 1} tokens; this model takes {N_CTX_SLOT}" in error["message"]
    assert engine.texts == []
    body = {**query, field: ["x" * n_fitting]}
    assert (await client.post(path, json=body)).status_code == 200


async def test_the_engines_refusal_is_passed_on(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.refusal = QueueFullError("Too many texts wait.", 1)
    response = await client.post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 429
    assert response.headers["Retry-After"] == "1"


# -- llama-server's -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
async def test_llama_servers_shape(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={"content": ["ab", [7, 8, "c"]]})
    assert response.json() == [
        {"index": 0, "embedding": [unit(98, 2, 0)]},
        {"index": 1, "embedding": [unit(99, 3, 0)]},
    ]
    one = await client.post(path, json={"input": "ab"})  # as its README says of /embeddings
    assert one.json() == response.json()[:1]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (-1, [98, 3, 0]),
        (0, [32760, 32760 * 3 / 98, 0]),
        (1, [98 / 101, 3 / 101, 0]),
        (2, [98 / 9613**0.5, 3 / 9613**0.5, 0]),
        (3, [98 / (98**3 + 27) ** (1 / 3), 3 / (98**3 + 27) ** (1 / 3), 0]),
    ],
)
async def test_llama_servers_norms(
    client: httpx.AsyncClient, kind: int, expected: list[float]
) -> None:
    body = {"content": "aab", "embd_normalize": kind}
    (answer,) = (await client.post("/embedding", json=body)).json()
    assert answer["embedding"] == [pytest.approx(expected, rel=1e-6)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"content": []}, "input"),
        ({"content": ["a"] * 2049}, "input"),
        ({"content": [300]}, "input"),
        ({"content": "a", "embd_normalize": -2}, "embd_normalize"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_llama_servers_route_refuses(
    client: httpx.AsyncClient, body: Any, param: str
) -> None:
    assert (await refused(client, "/embedding", **body))["param"] == param


# -- rankings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/reranking", "/rerank", "/reranking"])
async def test_documents_come_by_score(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(ByteTokenizer, "reranks", True)
    body = {"query": "q", "documents": ["b", "d", "a", "d"]}
    response = await client.post(path, json=body)
    assert engine.texts == [tuple(tuple(f"q|{one}".encode()) for one in "bdad")]
    assert response.json() == {
        "model": "first",
        "object": "list",
        "usage": {"prompt_tokens": 12, "total_tokens": 12},
        "results": [
            {"index": 1, "relevance_score": 100},
            {"index": 3, "relevance_score": 100},
            {"index": 0, "relevance_score": 98},
            {"index": 2, "relevance_score": 97},
        ],
    }
    best = (await client.post(path, json={**body, "top_n": 1})).json()["results"]
    assert best == [{"index": 1, "relevance_score": 100}]


async def test_rankings_repeat_documents_that_are_asked_for(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "reranks", True)
    body = {"query": "q", "documents": [{"text": "b"}, "d"], "return_documents": True}
    results = (await client.post("/v1/rerank", json=body)).json()["results"]
    assert [one["document"] for one in results] == [{"text": "d"}, {"text": "b"}]
    of_tei = {"query": "q", "texts": ["b", "d"], "return_text": True, "raw_scores": True}
    assert (await client.post("/rerank", json=of_tei)).json() == [
        {"index": 1, "score": 100, "text": "d"},
        {"index": 0, "score": 98, "text": "b"},
    ]


@pytest.mark.parametrize(
    ("path", "fields", "is_logistic"),
    [
        ("/rerank", {"texts": ["b", "d"]}, True),
        ("/rerank", {"texts": ["b", "d"], "raw_scores": False}, True),
        ("/rerank", {"texts": ["b", "d"], "raw_scores": True}, False),
        ("/v1/rerank", {"documents": ["b", "d"]}, False),
        ("/v1/rerank", {"documents": ["b", "d"], "raw_scores": False}, True),
        ("/v2/rerank", {"documents": ["b", "d"]}, True),
    ],
)
async def test_scores_between_0_and_1(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    is_logistic: bool,
) -> None:
    monkeypatch.setattr(ByteTokenizer, "reranks", True)
    engine.vectors = np.array([[-np.log(3)], [np.log(4)]], np.float32)
    answer = (await client.post(path, json={"query": "q", **fields})).json()
    results = answer if isinstance(answer, list) else answer["results"]
    scores = [one.get("score", one.get("relevance_score")) for one in results]
    expected = [0.8, 0.25] if is_logistic else [np.log(4), -np.log(3)]
    assert scores == pytest.approx(expected)


async def test_rankings_as_sglangs_routers_read_them(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vllm-router 0.1.17 and sglang-router 0.3.2 send to a server, and take from it."""
    monkeypatch.setattr(ByteTokenizer, "reranks", True)
    body: dict[str, Any] = {"query": "q", "documents": ["b", "d"], "model": "first"}
    body |= {"top_k": None, "return_documents": True, "rid": None, "user": None}
    response = await client.post("/v1/rerank", json=body)
    assert "x-corral-ignored" not in response.headers
    assert response.json() == [
        {"index": 1, "score": 100, "document": "d"},
        {"index": 0, "score": 98, "document": "b"},
    ]
    best = (await client.post("/v1/rerank", json=body | {"top_k": 1})).json()
    assert [one["index"] for one in best] == [1]


async def test_cohere_s_rankings(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is too long is cut, and each document to its own bound."""
    monkeypatch.setattr(ByteTokenizer, "reranks", True)
    body = {"query": "q", "documents": ["x" * 99, "abcdef", ""], "max_tokens_per_doc": 70}
    answer = (await client.post("/v2/rerank", json=body)).json()
    assert [len(text) for text in engine.texts[0]] == [N_CTX_SLOT, 8, 2]
    meta = answer.pop("meta")
    assert len(answer.pop("id")) == 36
    n_tokens = N_CTX_SLOT + 10
    assert meta == {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1, "input_tokens": n_tokens},
    }
    assert sorted(answer) == ["model", "object", "results", "usage"]
    await client.post("/v2/rerank", json=body | {"max_tokens_per_doc": 4})
    assert [len(text) for text in engine.texts[1]] == [6, 6, 2]


@pytest.mark.parametrize(
    ("query", "document", "fields", "pair"),
    [
        ("query", "x" * 80, {"truncate": True}, "query|" + "x" * (N_CTX_SLOT - 6)),
        ("y" * 80, "text", {"truncate": True}, "y" * (N_CTX_SLOT - 5) + "|text"),
        ("y" * 80, "x" * 80, {"truncate": True}, "y" * 31 + "|" + "x" * 32),
        ("query", "abcdef", {"truncate_prompt_tokens": 9}, "quer|abcd"),
        ("query", "abcdef", {"truncate_prompt_tokens": -1}, "query|abcdef"),
        ("query", "abcdef", {"truncate_prompt_tokens": 9, "truncation_side": "left"}, "uery|cdef"),
        ("query", "", {}, "query|"),
    ],
)
async def test_the_longer_text_of_a_pair_is_cut(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    query: str,
    document: str,
    fields: dict[str, Any],
    pair: str,
) -> None:
    """As text-embeddings-inference cuts the longer one first; the query stays whole if it can."""
    monkeypatch.setattr(ByteTokenizer, "reranks", True)
    ranked = {"query": query, "documents": ["d", document], **fields}
    assert (await client.post("/v1/rerank", json=ranked)).status_code == 200
    scored = {"queries": query, "documents": ["d", document], **fields}
    assert (await client.post("/v1/score", json=scored)).status_code == 200
    assert [texts[1] for texts in engine.texts] == [tuple(pair.encode())] * 2


async def test_a_pair_that_cannot_be_cut_so_far_is_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "reranks", True)
    for n_most in 0, 1:
        body = {"query": "q", "documents": ["d"], "truncate_prompt_tokens": n_most}
        error = await refused(client, "/v1/rerank", **body)
        assert error["code"] == "context_length_exceeded"
    assert engine.texts == []


async def test_scores_of_pairs(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "reranks", True)
    engine.vectors = np.array([[0.0], [2.0]], np.float32)
    body: dict[str, Any] = {"text_1": "q", "text_2": ["b", "d"]}
    answer = (await client.post("/v1/score", json=body)).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx([0.5, 0.8808], abs=1e-4)
    body = {"queries": ["q", "r"], "documents": ["b", "d"], "use_activation": False}
    answer = (await client.post("/score", json=body)).json()
    assert [one["score"] for one in answer["data"]] == [0.0, 2.0]
    assert engine.texts == [(tuple(b"q|b"), tuple(b"q|d")), (tuple(b"q|b"), tuple(b"r|d"))]
    error = await refused(client, "/v1/score", queries=["q", "r"], documents="b")
    assert error["message"] == "2 queries are given for 1 documents."


async def test_vectors_as_text_embeddings_inference_gives_them(client: httpx.AsyncClient) -> None:
    asked = {"inputs": "ab", "normalize": False}
    answers = [(await client.post(path, json=asked)).json() for path in ("/", "/embed")]
    assert answers == [[[98, 2, 0]]] * 2
    body: dict[str, Any] = {"inputs": ["ab", "c"], "dimensions": 2}
    plain = await client.post("/embed", json=body | {"normalize": False})
    assert plain.json() == [[98, 2], [99, 1]]
    vectors = (await client.post("/embed", json=body)).json()
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1])
    assert [len(one) for one in vectors] == [2, 2]
    too_many = await client.post("/embed", json=body | {"dimensions": 4})
    assert too_many.status_code == 400
    assert "this model's embeddings have 3" in too_many.text


@pytest.mark.parametrize(
    ("prepare", "body", "text"),
    [
        (preparation.embeddings, {"input": "a", "prompt_name": "query"}, b"q: a"),
        (preparation.embeddings, {"input": "a", "input_type": "query"}, b"q: a"),
        (preparation.embeddings, {"input": "a", "input_type": "search_query"}, b"a"),
        (preparation.embeddings, {"input": "a"}, b"a"),
        (preparation.embeddings, {"input": [97], "prompt_name": "query"}, b"a"),
        (preparation.tei_embed, {"inputs": "a", "prompt_name": "query"}, b"q: a"),
        (preparation.tei_embed, {"inputs": "a", "prompt_name": "other"}, None),
        (preparation.embeddings, {"input": "a", "prompt_name": "other"}, None),
    ],
)
def test_the_models_instructions_stand_before_texts(
    prepare: Any, body: dict[str, Any], text: bytes | None
) -> None:
    tokenizer: Any = ByteTokenizer()
    defaults = ModelDefaults(prompts={"query": "q: "})
    models: Any = {"m": ModelInfo("m", N_CTX_SLOT, tokenizer, defaults=defaults)}
    if text is None:
        with pytest.raises(InvalidRequestError, match=r"no prompt 'other'\. It has: query"):
            prepared(prepare, models, json.dumps(body).encode())
    else:
        assert prepared(prepare, models, json.dumps(body).encode()).texts == (tuple(text),)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x" * 99}),
        ("/embed", {"inputs": ["x" * 99]}),
        ("/v1/rerank", {"query": "q", "documents": ["x" * 99]}),
        ("/v1/score", {"queries": "q", "documents": "x" * 99}),
    ],
)
async def test_texts_that_are_too_long_are_cut_where_the_request_says_so(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    monkeypatch.setattr(ByteTokenizer, "reranks", path in ("/v1/rerank", "/v1/score"))
    assert (await client.post(path, json=body)).status_code == 400
    assert (await client.post(path, json=body | {"truncate": True})).status_code == 200
    assert [len(text) for text in engine.texts[0]] == [N_CTX_SLOT]


@pytest.mark.parametrize(
    ("path", "body", "kept"),
    [
        ("/v1/embeddings", {"input": "abcdef", "truncate_prompt_tokens": 2}, b"ab"),
        (
            "/v1/embeddings",
            {"input": "abcdef", "truncate_prompt_tokens": 2, "truncation_side": "left"},
            b"ef",
        ),
        (
            "/embed",
            {"inputs": "z" * 9 + "a" * 60, "truncate": True, "truncation_direction": "Left"},
            b"z" * 4 + b"a" * 60,
        ),
        ("/v2/embed", {"texts": ["abcdef"], "max_tokens": 3}, b"abc"),
        ("/v2/embed", {"texts": ["abcdef"], "max_tokens": 3, "truncate": "START"}, b"def"),
        ("/v2/embed", {"texts": ["z" * 9 + "a" * 60]}, b"z" * 9 + b"a" * 55),
        ("/api/embed", {"input": "z" * 9 + "a" * 60}, b"z" * 9 + b"a" * 55),
        ("/v2/embed", {"texts": ["a" * 69], "truncate": "NONE"}, None),
        ("/api/embed", {"input": "a" * 69, "truncate": False}, None),
    ],
)
async def test_how_texts_are_cut(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    path: str,
    body: dict[str, Any],
    kept: bytes | None,
) -> None:
    response = await client.post(path, json={"model": "first", **body})
    assert response.status_code == (400 if kept is None else 200), response.text
    assert engine.texts == ([] if kept is None else [(tuple(kept),)])


async def test_cohere_s_vectors(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.vectors = np.array([[3, -4, 0], [0, 0, -2]], np.float32)
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = {"model": "first", "texts": ["ab", "c"], "embedding_types": types}
    body |= {"input_type": "search_query"}
    answer = (await client.post("/v2/embed", json=body)).json()
    assert len(answer.pop("id")) == 36
    packed = [np.frombuffer(base64.b64decode(one), "<f4") for one in answer["embeddings"]["base64"]]
    assert np.array(packed) == pytest.approx(np.array([[0.6, -0.8, 0], [0, 0, -1]]))
    del answer["embeddings"]["base64"]
    assert answer == {
        "embeddings": {
            "float": [[pytest.approx(0.6), pytest.approx(-0.8), 0], [0, 0, -1]],
            "int8": [[76, -102, 0], [0, 0, -127]],
            "uint8": [[203, 25, 127], [127, 127, 0]],
            "binary": [[0], [-128]],
            "ubinary": [[128], [0]],
        },
        "texts": ["ab", "c"],
        "response_type": "embeddings_by_type",
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 3}},
    }
    inputs = [{"content": [{"type": "text", "text": "ab"}]}]
    short = {"inputs": inputs, "output_dimension": 2}
    engine.vectors = np.array([[3, -4, 12]], np.float32)
    assert (await client.post("/v2/embed", json=short)).json()["embeddings"] == {
        "float": [pytest.approx([0.6, -0.8])]
    }
    assert engine.texts[-1] == ((97, 98),)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"texts": []},
        {"texts": [""]},
        {"inputs": [{"text": "a"}]},
        {"texts": ["a"], "embedding_types": ["int4"]},
        {"texts": ["a"], "truncate": "MIDDLE"},
        {"texts": ["a"] * 2049},
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_cohere_s_route_refuses(client: httpx.AsyncClient, body: Any) -> None:
    await refused(client, "/v2/embed", **body)


async def test_models_as_text_embeddings_inference_describes_its_own(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = (await client.get("/info", params={"model": "first"})).json()
    assert described["model_id"] == "first"
    assert described["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (described["max_input_length"], described["max_client_batch_size"]) == (N_CTX_SLOT, 2048)
    assert (await client.get("/health")).status_code == 200
    monkeypatch.setattr(ByteTokenizer, "reranks", True)
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    assert (await client.get("/info")).json()["model_type"] == {"reranker": labels}
    monkeypatch.setattr(ByteTokenizer, "reranks", False)
    monkeypatch.setattr(ByteTokenizer, "labels", LABELS)
    kind = (await client.get("/info")).json()["model_type"]["classifier"]
    assert kind["id2label"] == {"0": "joy", "1": "anger", "2": "fear"}


async def test_a_model_does_one_or_the_other(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = await refused(client, "/v1/rerank", 501, query="q", documents=["a"])
    assert "'first' cannot rank. Its file does not name the pooling type 'rank'" in error["message"]
    error = await refused(client, "/v1/classify", 501, input="a")
    assert "'first' cannot classify. Its file does not name the pooling" in error["message"]
    assert error["type"] == "not_supported_error"
    for labels, use in ((), "a reranking model. Use /v1/rerank"), (LABELS, "Use /v1/classify"):
        monkeypatch.setattr(ByteTokenizer, "reranks", not labels)
        monkeypatch.setattr(ByteTokenizer, "labels", labels)
        for path, field in (("/v1/embeddings", "input"), ("/embedding", "content")):
            assert use in (await refused(client, path, 501, **{field: "a"}))["message"]
    pairs = {"query": "q", "queries": "q", "documents": ["a"]}
    for path in ("/v1/rerank", "/v1/score"):
        error = await refused(client, path, 501, **pairs)
        assert "3 outputs, and none of them says how relevant" in error["message"]
        assert "joy, anger, fear" in error["message"]
    assert engine.texts == []


# -- classes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
async def test_classes_as_vllm_gives_them(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(ByteTokenizer, "labels", LABELS)
    engine.vectors = np.array([[0, np.log(3), 0], [np.log(8), 0, 0]], np.float32)
    body = {"input": ["ab", [7, 8, 9]], "user": "someone"}
    answer = (await client.post(path, json=body)).json()
    assert (engine.texts, engine.clients) == ([((97, 98), (7, 8, 9))], ["someone"])
    assert answer.pop("id").startswith("classify-")
    assert answer.pop("created") > 1_700_000_000
    shares = [pytest.approx([0.2, 0.6, 0.2]), pytest.approx([0.8, 0.1, 0.1])]
    assert answer == {
        "object": "list",
        "model": "first",
        "data": [
            {"index": 0, "label": "anger", "probs": shares[0], "num_classes": 3},
            {"index": 1, "label": "joy", "probs": shares[1], "num_classes": 3},
        ],
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    plain = (await client.post(path, json=body | {"use_activation": False})).json()["data"]
    assert [one["probs"] for one in plain] == engine.vectors.tolist()


async def test_the_class_of_a_single_output(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "reranks", True)
    engine.vectors = np.array([[-np.log(3)]], np.float32)
    (one,) = (await client.post("/v1/classify", json={"input": "a"})).json()["data"]
    expected = pytest.approx([0.25])
    assert one == {"index": 0, "label": "LABEL_0", "probs": expected, "num_classes": 1}


async def test_outputs_that_are_probabilities_stay_so(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's graph of Qwen3's rerankers ends with the softmax of "yes" and "no"."""
    monkeypatch.setattr(ByteTokenizer, "reranks", True)
    monkeypatch.setattr(ByteTokenizer, "labels", ("yes", "no"))
    monkeypatch.setattr(ByteModelFile, "has_softmax", True)
    engine.vectors = np.array([[0.25, 0.75]], np.float32)
    (one,) = (await client.post("/v1/classify", json={"input": "a"})).json()["data"]
    assert (one["label"], one["probs"]) == ("no", [0.25, 0.75])
    scored = (await client.post("/v1/score", json={"queries": "q", "documents": "a"})).json()
    assert scored["data"][0]["score"] == 0.25


@pytest.mark.parametrize(
    ("fields", "n_tokens"),
    [
        ({"truncate_prompt_tokens": 7}, 7),
        ({"truncate_prompt_tokens": -1}, N_CTX_SLOT),
        ({"truncate": True}, N_CTX_SLOT),
        ({"messages": [{"role": "user", "content": "x" * 99}], "truncate_prompt_tokens": 7}, 7),
        ({}, "context_length_exceeded"),
        ({"truncate_prompt_tokens": 0}, None),
        ({"truncate_prompt_tokens": -2}, None),
        ({"input": []}, None),
    ],
    ids=repr,
)
async def test_texts_to_classify_are_cut_or_refused(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    n_tokens: int | str | None,
) -> None:
    monkeypatch.setattr(ByteTokenizer, "labels", LABELS)
    body = {"input": "x" * 99} | fields
    if isinstance(n_tokens, int):
        assert (await client.post("/v1/classify", json=body)).status_code == 200
        assert [len(text) for text in engine.texts[0]] == [n_tokens]
    else:
        error = await refused(client, "/v1/classify", **body)
        assert error["code"] == n_tokens
        assert engine.texts == []


async def test_vectors_of_all_tokens(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "pooling", "none")
    engine.vectors = np.arange(15, dtype=np.float32).reshape(5, 3)
    answer = await client.post("/embeddings", json={"input": ["aab", "cc"]})
    assert engine.texts == [(tuple(b"aab"), tuple(b"cc"))]
    assert answer.json() == [
        {"index": 0, "embedding": [[0, 1, 2], [3, 4, 5], [6, 7, 8]]},
        {"index": 1, "embedding": [[9, 10, 11], [12, 13, 14]]},
    ]
    for path in ("/v1/embeddings", "/api/embed"):
        body = {"input": "ab", "model": "first"}
        error = (await client.post(path, json=body)).json()["error"]
        assert "Pooling type 'none' is not OAI compatible" in str(error)
    monkeypatch.setattr(vectors, "MAX_NUMBERS", 8)
    error = await refused(client, "/embedding", content="abc")
    assert error["message"] == "input: 3 vectors, and an answer has at most 2 of this model."


async def test_more_vectors_than_an_answer_has_are_refused_before_they_are_computed(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "MAX_NUMBERS", 8)
    for path, field in ("/v1/embeddings", "input"), ("/embed", "inputs"), ("/api/embed", "input"):
        answer = await client.post(path, json={"model": "first", field: ["a", "b", "c"]})
        assert answer.status_code == 400
        assert f"{field}: 3 vectors, and an answer has at most 2" in answer.text
    assert engine.texts == []
    monkeypatch.setattr(ByteTokenizer, "labels", LABELS)
    answer = await client.post("/v1/classify", json={"input": ["a", "b", "c"]})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": ["a", 1]}, "documents.1"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
    ],
    ids=repr,
)
async def test_what_rankings_refuse(client: httpx.AsyncClient, body: Any, param: str) -> None:
    assert (await refused(client, "/rerank", **body))["param"] == param
