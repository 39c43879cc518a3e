"""Infill over the API and a real engine, with a model that has the tokens for it.

The expected prompts are those of llama-server (tools/server/server-common.cpp, `format_prompt_infill`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.engine import Engine, EngineOptions
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tools.local_client import LocalClient
from tools.random_models.model import SHAPES, write_random_gguf

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
ENDS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
N_CTX_SLOT = 256
BODY = {"input_prefix": "def one():\n", "input_suffix": "\n# end\n", "n_predict": 6}


def served(path: Path) -> tuple[Engine, ServedModel]:
    options = EngineOptions(n_slots=2, n_ctx_slot=N_CTX_SLOT, threads=1, profile_limit_s=0)
    engine = Engine.load(path, options)
    return engine, ServedModel("m", N_CTX_SLOT, Tokenizer(path), engine=LocalClient(engine))


@pytest.fixture(scope="module", params=[ENDS, ()], ids=["repository", "file"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    path = tmp_path_factory.mktemp("model") / "infill.gguf"
    write_random_gguf(path, SHAPES["tiny"], "f16", more_control=(*MARKS, *request.param))
    engine, made = served(path)
    yield made
    engine.close(0)


@pytest.fixture
async def client(model: ServedModel) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_api({"m": model}))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


def has_repositories(model: ServedModel) -> bool:
    return len(model.tokenizer.tokenize(ENDS[1], False, True)) == 1


async def fill(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/infill", json=BODY | {"temperature": 0} | fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_the_middle_is_asked_for(client: httpx.AsyncClient, model: ServedModel) -> None:
    answer = await fill(client, prompt="    return")
    core = "<|fim_prefix|>def one():\n    return<|fim_suffix|>\n# end\n<|fim_middle|>"
    before = "<|repo_name|>myproject\n<|file_sep|>filename\n" if has_repositories(model) else ""
    assert answer["prompt"] == before + core
    assert answer["tokens_predicted"] == 6
    assert answer["stop_type"] == "limit"


async def test_other_files_come_first(client: httpx.AsyncClient, model: ServedModel) -> None:
    files = [{"filename": "a.py", "text": "A = 1\n"}, {"text": "B = 2\n"}]
    answer = await fill(client, input_extra=files)
    core = "<|fim_prefix|>def one():\n<|fim_suffix|>\n# end\n<|fim_middle|>"
    if has_repositories(model):
        names = "<|file_sep|>a.py\nA = 1\n<|file_sep|>tmp\nB = 2\n<|file_sep|>filename\n"
        assert answer["prompt"] == f"<|repo_name|>myproject\n{names}{core}"
    else:
        snippet = "\n\n--- snippet ---\n\n"
        assert answer["prompt"] == f"{snippet}A = 1\n{snippet}B = 2\n{core}"


async def test_of_too_many_files_the_end_is_kept(client: httpx.AsyncClient) -> None:
    files = [{"text": "".join(f"line {i}\n" for i in range(100))}]
    answer = await fill(client, input_extra=files)
    assert answer["tokens_evaluated"] == N_CTX_SLOT * 3 // 4
    assert "line 99\n" in answer["prompt"]
    assert "line 0\n" not in answer["prompt"]


async def test_marks_that_users_write_are_text(
    client: httpx.AsyncClient, model: ServedModel
) -> None:
    answer = await fill(client, input_prefix="a<|fim_middle|>", input_suffix="<|fim_suffix|>b")
    middle = model.tokenizer.tokenize("<|fim_middle|>", False, True)
    assert len(middle) == 1
    written = len(model.tokenizer.tokenize("<|fim_middle|>", False, False))
    assert written > 1
    assert answer["prompt"].endswith(
        "<|fim_prefix|>a<|fim_middle|><|fim_suffix|><|fim_suffix|>b<|fim_middle|>"
    )
    assert answer["tokens_evaluated"] > 2 * written


@pytest.mark.parametrize("model", [ENDS], ids=["repository"], indirect=True)
async def test_what_ends_infill_ends_the_answer(
    client: httpx.AsyncClient, model: ServedModel
) -> None:
    """llama.cpp counts the tokens for padding, repositories and files among those that end a text."""
    for mark in ENDS:
        (token,) = model.tokenizer.tokenize(mark, False, True)
        answer = await fill(client, logit_bias=[[token, 1000]])
        assert (answer["content"], answer["stop_type"]) == ("", "eos")
        assert answer["tokens_predicted"] == 1


async def test_openais_suffix(client: httpx.AsyncClient) -> None:
    fields = {"max_tokens": 6, "temperature": 0, "logprobs": 0}
    body = {"prompt": "def one():\n", "suffix": "\n# end\n"} | fields
    filled = (await client.post("/v1/completions", json=body)).json()
    text = "<|fim_prefix|>def one():\n<|fim_suffix|>\n# end\n<|fim_middle|>"
    tokens = (await client.post("/tokenize", json={"content": text})).json()["tokens"]
    plain = (await client.post("/v1/completions", json={"prompt": tokens} | fields)).json()
    assert filled["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] == len(tokens)
    assert filled["choices"][0]["text"] == plain["choices"][0]["text"] != ""
    assert filled["choices"][0]["finish_reason"] == "length"
