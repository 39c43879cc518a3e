"""Adapters as model names, and llama-server's `lora`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from serve_app.apis.openai.preparation import CompletionRequest
from serve_app.base.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from serve_app.base.values.adapters import Adapters, AdapterUse
from serve_app.config import schema
from serve_app.server.answering import preparation
from serve_app.server.model_registry import ModelInfo, find
from tests.unit.server.harness import ByteTokenizer

LEGAL, POLITE = AdapterUse("legal", 1.0), AdapterUse("polite", 0.5)
BASE = ModelInfo("qwen", 64, ByteTokenizer(), aliases=("q",), adapters={0: POLITE, 1: LEGAL})  # type: ignore[arg-type]
MODELS = {"qwen": BASE}


@pytest.mark.parametrize(
    ("name", "model_id", "used"),
    [
        (None, "qwen", ()),
        ("qwen", "qwen", ()),
        ("qwen:legal", "qwen:legal", (LEGAL,)),
        ("q:legal", "qwen:legal", (LEGAL,)),
        ("qwen:polite", "qwen:polite", (POLITE,)),
    ],
)
def test_a_name_finds_model_and_adapter(name: str | None, model_id: str, used: Adapters) -> None:
    found = find(MODELS, name)
    assert (found.id, found.used) == (model_id, used)
    assert find(MODELS, found.id).used == used


@pytest.mark.parametrize("name", ["qwen:other", "legal", "qwen:legal:polite", "qwen:"])
def test_other_names_are_no_models(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        find(MODELS, name)


def test_a_star_takes_what_is_no_adapter() -> None:
    models = {"qwen": replace(BASE, aliases=("*",))}
    assert find(models, "qwen:other").used == ()
    assert find(models, "qwen:legal").used == (LEGAL,)


def adapters(model_name: str, **fields: Any) -> Adapters:
    asked = CompletionRequest.model_validate({"prompt": "x", **fields})
    model = find(MODELS, model_name)
    sampling = preparation.sampling(model, asked)
    return preparation.make_generation(model, asked, [(1,)], 1, sampling, "prompt").request.adapters


@dataclass
class Case:
    model: str
    lora: list[dict[str, Any]] | None
    expected: Adapters


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen", None, ()),
        Case("qwen:legal", None, (LEGAL,)),
        Case("qwen:legal", [], ()),
        Case("qwen:legal", [{"id": 0, "scale": 0.25}], (AdapterUse("polite", 0.25),)),
        Case("qwen", [{"id": 1, "scale": 1}, {"id": 0, "scale": 0.5}], (LEGAL, POLITE)),
        Case("qwen", [{"id": 0, "scale": 0}, {"id": 1}], ()),
    ],
    ids=str,
)
def test_a_request_s_lora_counts_before_the_name(case: Case) -> None:
    fields = {} if case.lora is None else {"lora": case.lora}
    assert adapters(case.model, **fields) == case.expected


@pytest.mark.parametrize("number", [2, -1])
def test_an_unknown_number_is_refused(number: int) -> None:
    with pytest.raises(InvalidRequestError, match="This model has 2"):
        adapters("qwen", lora=[{"id": number, "scale": 1}])


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"id": "a:b", "source": {"path": "/x"}}, "id"),
        ({"id": "a", "source": {"builtin": True}}, "is a model"),
        ({"id": "a", "source": {"path": "/x"}, "scale": 1000}, "scale"),
        ({"id": "a"}, "source"),
    ],
)
def test_what_cannot_be_configured(adapter: dict[str, Any], message: str) -> None:
    model = {"id": "m", "source": {"builtin": True}, "adapters": [adapter]}
    with pytest.raises(ConfigError, match=message):
        schema.parse({"models": [model]})


def test_names_are_distinct() -> None:
    one = {"id": "a", "source": {"path": "/x"}}
    model = {"id": "m", "source": {"builtin": True}, "adapters": [one, one]}
    with pytest.raises(ConfigError, match="same name"):
        schema.parse({"models": [model]})
