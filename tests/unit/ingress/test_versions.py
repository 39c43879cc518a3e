"""Which version of a model answers: shares, stickiness, and changes of weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from serve_app.errors import InvalidRequestError, ModelNotFoundError
from serve_app.ingress.generation import preparation
from serve_app.ingress.model_registry import ModelInfo, ServedModel, find
from serve_app.ingress.openai.answers import card_of, model_cards
from serve_app.ingress.versions.control import before_rollout, changed, weights_of_ready
from serve_app.ingress.workers.wire import ModelChanges
from serve_app.prompt.conversation import Turn
from serve_app.types import AdapterUse, Version
from tests.unit.ingress.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine

N = 4000
CONVERSATIONS = [f"system You help.\nuser Question {number}?" for number in range(N)]
LEGAL = AdapterUse("legal", 1.0)


def versions(**weights: float) -> dict[str, ModelInfo]:
    tokenizer: Any = ByteTokenizer()
    return {
        f"m@{name}": ModelInfo(
            f"m@{name}", N_CTX_SLOT, tokenizer, ("alias",), version=Version("m", name, weight)
        )
        for name, weight in weights.items()
    }


def served(name: str) -> ServedModel:
    tokenizer: Any = ByteTokenizer()
    return ServedModel(name, N_CTX_SLOT, tokenizer, engine=ScriptedEngine())


def chosen(**weights: float) -> list[str]:
    models = versions(**weights)
    return [find(models, "m", one).id.removeprefix("m@") for one in CONVERSATIONS]


@pytest.mark.parametrize(
    "weights",
    [
        {"old": 99, "new": 1},
        {"old": 90, "new": 10},
        {"old": 50, "new": 50},
        {"old": 0.3, "new": 0.1},
        {"a": 20, "b": 30, "c": 50},
    ],
    ids=str,
)
def test_each_version_gets_its_share_of_the_conversations(weights: dict[str, float]) -> None:
    found, total = chosen(**weights), sum(weights.values())
    for name, weight in weights.items():
        part = weight / total
        spread = 4 * (part * (1 - part) / N) ** 0.5  # four standard deviations
        assert abs(found.count(name) / N - part) < spread


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"old": 100, "new": 0}, {"old": 90, "new": 10}),
        ({"old": 90, "new": 10}, {"old": 75, "new": 25}),
        ({"old": 25, "new": 75}, {"old": 0, "new": 100}),
        ({"old": 50, "other": 50, "new": 0}, {"old": 45, "other": 45, "new": 10}),
    ],
    ids=str,
)
def test_conversations_move_to_the_version_that_gains_and_no_others_move(
    before: dict[str, float], after: dict[str, float]
) -> None:
    moved = {(was, now) for was, now in zip(chosen(**before), chosen(**after), strict=True)}
    assert {now for was, now in moved if was != now} == {"new"}


def test_a_version_without_weight_is_found_by_its_name_alone() -> None:
    models = versions(old=100, new=0)
    assert set(chosen(old=100, new=0)) == {"old"}
    assert find(models, "m@new", "anything").id == "m@new"
    with pytest.raises(ModelNotFoundError):
        find(models, "m@other")


@pytest.mark.parametrize("name", ["m", "alias", None])
def test_without_a_conversation_the_heaviest_is_meant(name: str | None) -> None:
    assert find(versions(a=20, b=50, c=30), name).id == "m@b"


def test_only_versions_that_have_an_adapter_are_asked_for_it() -> None:
    models = versions(old=50, new=50)
    models["m@new"] = replace(models["m@new"], adapters={0: LEGAL})
    found = {find(models, "m:legal", one).id for one in CONVERSATIONS[:50]}
    assert found == {"m@new:legal"}
    assert find(models, "m@new:legal").used == (LEGAL,)
    with pytest.raises(ModelNotFoundError):
        find(models, "m@old:legal")


def test_ollama_s_names_mean_all_versions() -> None:
    models = versions(old=50, new=50)
    for one in CONVERSATIONS[:50]:
        assert find(models, "M:latest", one) is find(models, "m", one)


def chat(*turns: tuple[Any, str]) -> str:
    return preparation.chat_beginning([Turn(role, (text,)) for role, text in turns])


def test_a_conversation_keeps_its_beginning_as_it_goes_on() -> None:
    first = ("system", "Be kind."), ("user", "Hello")
    assert chat(*first) == chat(*first, ("assistant", "Hi"), ("user", "And then?"))
    assert chat(*first) != chat(first[0], ("user", "Good morning"))
    text = "x" * preparation.BEGINNING_CHARS
    assert preparation.text_beginning(text) == preparation.text_beginning(text + " and more")


@pytest.mark.parametrize(
    ("weights", "asked", "expected"),
    [
        ({"old": 100, "new": 0}, {"new": 10}, {"old": 90, "new": 10}),
        ({"old": 3, "new": 1}, {"new": 100}, {"old": 0, "new": 100}),
        ({"old": 0, "new": 100}, {"new": 40}, {"old": 60, "new": 40}),
        ({"a": 30, "b": 10, "c": 60}, {"c": 20}, {"a": 60, "b": 20, "c": 20}),
        ({"a": 1, "b": 1}, {"a": 30, "b": 70}, {"a": 30, "b": 70}),
    ],
    ids=str,
)
def test_changed_weights(
    weights: dict[str, float], asked: dict[str, float], expected: dict[str, float]
) -> None:
    assert changed(weights, asked) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weights", "asked", "message"),
    [
        ({"old": 100, "new": 0}, {"newer": 10}, "no version 'newer'. The versions are: old, new"),
        ({"old": 100, "new": 0}, {"new": 101}, "from 0 to 100"),
        ({"old": 100, "new": 0}, {"new": 60, "old": 60}, "add up to 120"),
        ({"old": 100, "new": 0}, {"new": 30, "old": 60}, "add up to 90"),
        ({"a": 100, "b": 0, "c": 0}, {"a": 50}, "Name the one"),
    ],
    ids=str,
)
def test_weights_that_cannot_be(
    weights: dict[str, float], asked: dict[str, float], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        changed(weights, asked)


@pytest.mark.parametrize(
    ("now", "earlier", "expected"),
    [
        ({"old": 50, "new": 50}, [{"old": 90, "new": 10}, {"old": 100, "new": 0}], "old"),
        ({"old": 0, "new": 100}, [{"old": 0, "new": 100}, {"old": 1, "new": 0}], "old"),
        ({"old": 100, "new": 0}, [{"old": 0, "new": 100}, {"old": 100, "new": 0}], "new"),
        ({"new": 1, "newer": 1}, [{"gone": 100, "new": 0}, {"new": 100, "gone": 0}], "new"),
        ({"old": 50, "new": 50}, [{"old": 90, "new": 10}], None),
        ({"old": 100, "new": 0}, [], None),
    ],
    ids=str,
)
def test_going_back_is_to_the_last_version_that_had_everything(
    now: dict[str, float], earlier: list[dict[str, float]], expected: str | None
) -> None:
    found = before_rollout(now, earlier)
    assert found == (expected and {name: 100.0 * (name == expected) for name in now})


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        ({"old": True, "new": True}, {"old": 90, "new": 10}),
        ({"old": True, "new": False}, {"old": 90, "new": 0}),
        ({"old": False, "new": True}, {"old": 0, "new": 10}),
        ({"old": False, "new": False}, {"old": 90, "new": 10}),
    ],
    ids=str,
)
def test_what_cannot_answer_is_given_nothing(
    ready: dict[str, bool], expected: dict[str, float]
) -> None:
    assert weights_of_ready({"old": 90, "new": 10}, ready) == expected


def test_workers_are_told_what_is_given_now() -> None:
    models = ModelChanges(weights={"m@old": 90, "m@new": 0}).made_in(versions(old=50, new=50))
    assert {find(models, "m", one).id for one in CONVERSATIONS[:50]} == {"m@old"}


def test_cards_name_the_versions_behind_a_name() -> None:
    models = {
        name: replace(served(name), version=Version("m", name[2:], weight, given))
        for name, weight, given in (("m@old", 90.0, 90.0), ("m@new", 10.0, 0.0))
    }
    found = {one.id: one for one in model_cards({"alone": served("alone"), **models})}
    assert list(found) == ["alone", "m", "m@old", "m@new"]
    told = [(one.id, one.weight, one.share) for one in found["m"].versions]
    assert told == [("m@old", 90.0, 1.0), ("m@new", 10.0, 0.0)]
    assert not found["alone"].versions
    assert not found["m@old"].versions
    assert card_of(models, "m") == found["m"]
    assert card_of(models, "m@new") == found["m@new"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_every_route_takes_the_names_that_any_lists(
    client: httpx.AsyncClient, path: str
) -> None:
    tags = (await client.get("/api/tags")).json()["models"]
    cards = (await client.get("/v1/models")).json()["data"]
    names = [tag["name"] for tag in tags] + [card["id"] for card in cards]
    assert {"first", "first:latest", "org/second", "org/second:latest"} <= set(names)
    for name in [*names, "FIRST", "library/first:latest"]:
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": name, "max_tokens": 9, "messages": messages}
        assert (await client.post(path, json=body)).status_code == 200, name
        assert (await client.get(f"/v1/models/{name}")).json()["id"] in ("first", "org/second")
    missing = await client.post(path, json=body | {"model": "first:other"})
    assert missing.status_code == 404
