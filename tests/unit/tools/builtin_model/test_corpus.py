"""The training text: its answers are right, and what is held out is not in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from serve_app.prompt.tool_calls import ToolCall
from tests.unit.prompt.tool_calls.formats import FORMAT
from tools.builtin_model.corpus import skills, tables
from tools.builtin_model.corpus.conversation import Conversation
from tools.builtin_model.corpus.memory import ATTRIBUTES, Memory
from tools.builtin_model.corpus.skills import Exchange
from tools.builtin_model.corpus.source import Source
from tools.builtin_model.corpus.stories import story
from tools.builtin_model.corpus.tools import TOOLS, Toolbox

SEEDS = [str(seed) for seed in range(150)]


def conversations(count: int = 150, turns: int = 12) -> list[Conversation]:
    made = []
    for seed in range(count):
        conversation = Conversation(Source(f"test/{seed}"))
        for _ in islice(conversation.grow(), turns):
            pass
        made.append(conversation)
    return made


def test_a_seed_makes_the_same_conversation() -> None:
    assert [c.messages for c in conversations(20)] == [c.messages for c in conversations(20)]


@pytest.mark.parametrize("held_out", [False, True])
def test_every_pair_is_on_one_side(held_out: bool) -> None:
    source, other = Source("x", held_out=held_out), Source("y", held_out=not held_out)
    for _ in range(200):
        name, city, age = source.together(source.name, source.city, source.age)
        assert source.owns(name, city, age)
        assert source.owns(age, name)
        assert not other.owns(name, city)


@pytest.mark.parametrize(
    "make", [skills.fact, skills.arithmetic, skills.json_record, skills.reading]
)
def test_held_out_questions_are_never_trained_on(make: Callable[[Source], Exchange]) -> None:
    trained = Source("trained")
    seen = {make(trained).user.lower() for _ in range(4000)}
    held_out = Source("held out", held_out=True)
    asked = [make(held_out).user for _ in range(200)]
    # Typed in a hurry, two ways to ask can become one.
    assert [question for question in asked if question.lower() in seen] == []


def test_every_fact_is_trained_on() -> None:
    source = Source("facts")
    answers = {skills.fact(source).answer for _ in range(40_000)}
    for country, city in tables.CAPITALS.items():
        assert f"The capital of {country} is {city}." in answers
    for word, opposite in tables.OPPOSITES.items():
        assert f"The opposite of {word} is {opposite}." in answers
    assert len(answers) > 500


@pytest.mark.parametrize("held_out", [False, True])
def test_sums(held_out: bool) -> None:
    for seed in SEEDS:
        exchange = skills.arithmetic(Source(seed, held_out=held_out))
        x, sign, y, value = exchange.answer.rstrip(".").replace(" is", "").split()
        expected = int(x) + int(y) if sign == "plus" else int(x) - int(y)
        assert int(value) == expected >= 0
        assert exchange.short == value


def test_what_was_told_is_what_is_recalled() -> None:
    for seed in SEEDS:
        memory = Memory(Source(seed))
        told = [memory.tell(turn).user for turn in range(6)]
        for kind, value in memory.told.items():
            question = memory.ask(kind)
            assert question.user in ATTRIBUTES[kind].ask
            assert question.answer == ATTRIBUTES[kind].answer.format(value)
            assert any(value in said for said in told)


def test_what_was_never_told_is_not_made_up() -> None:
    exchange = Memory(Source("0")).ask()
    assert exchange.answer.startswith("You have not told me")


@pytest.mark.parametrize("make", [skills.json_record, skills.json_other])
def test_json_is_json_with_what_the_question_says(make: Callable[[Source], Exchange]) -> None:
    for seed in SEEDS:
        exchange = make(Source(seed))
        answer = json.loads(exchange.answer)
        if make is skills.json_record:
            assert all(str(value) in exchange.user for value in answer.values())


def test_lists_have_so_many_items_each_once() -> None:
    numbers = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7}
    for seed in SEEDS:
        exchange = skills.listing(Source(seed))
        (word,) = re.findall(r"\d|two|three|four|five|six|seven", exchange.user.lower())
        items = [line.partition(". ")[2] for line in exchange.answer.splitlines()]
        assert len(items) == len(set(items)) == (numbers[word] if word in numbers else int(word))


def test_readings_answer_from_their_text() -> None:
    for seed in SEEDS:
        exchange = skills.reading(Source(seed))
        assert exchange.short is not None
        assert exchange.short in exchange.user
        assert exchange.short in exchange.answer


def test_stories_are_finished_and_keep_to_what_was_asked() -> None:
    for seed in SEEDS:
        exchange = story(Source(seed))
        assert "{" not in exchange.answer
        assert exchange.answer.endswith((".", '"'))
        for word in exchange.user.rstrip(".?").split():
            assert word not in tables.ANIMALS or word in exchange.answer


def test_every_tool_is_called_as_it_is_described() -> None:
    used = set()
    for seed in range(300):
        toolbox = Toolbox(Source(f"{seed}"), 3)
        call = toolbox.call()
        function = call.tool["function"]
        schema = function["parameters"]["properties"]
        used.add(function["name"])
        assert call.tool in toolbox.described
        assert set(call.arguments) == set(schema)
        for name, value in call.arguments.items():
            assert isinstance(value, str) is (schema[name]["type"] == "string")
            assert str(value) in call.user
    assert used == {name for tool in TOOLS for name in tool.names}


def test_conversations_alternate_and_hold_no_unfilled_template() -> None:
    for conversation in conversations():
        messages = conversation.messages
        spoken = [m for m in messages if m["role"] in ("user", "assistant")]
        first = messages[0]["role"] == "system"
        assert [m["role"] for m in messages].count("system") == int(first)
        assert spoken[0]["role"] == "user"
        for message in messages:
            assert not re.search(r"\{\w*\}", message["content"]), message
        if not conversation.tools:
            assert [m["role"] for m in spoken] == ["user", "assistant"] * (len(spoken) // 2)


def test_one_word_upper_case_and_json_are_followed() -> None:
    rules: dict[str, Callable[[str], Any]] = {
        "upper case": lambda text: text == text.upper(),
        "capital letters": lambda text: text == text.upper(),
        "JSON": json.loads,
    }
    found = set()
    for conversation in conversations(400):
        system = conversation.messages[0]
        for name, rule in rules.items():
            if system["role"] == "system" and name in system["content"]:
                found.add(name)
                answers = [m["content"] for m in conversation.messages if m["role"] == "assistant"]
                assert all(rule(answer) for answer in answers)
    assert found == set(rules)


def test_training_text_holds_no_call_that_the_server_does_not_understand() -> None:
    from serve_app.prompt.chat_template import ChatTemplate
    from tools.chat_template import CHAT_TEMPLATE

    template = ChatTemplate(CHAT_TEMPLATE, bos="", eos="")
    calls = 0
    for conversation in conversations(60):
        text = template.render(
            conversation.messages, conversation.tools, add_generation_prompt=False
        )
        said = re.findall(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", text, re.S)
        expected = [
            m.get("tool_calls", []) for m in conversation.messages if m["role"] == "assistant"
        ]
        for body, made in zip(said, expected, strict=True):
            parser = FORMAT["hermes"].parser()
            parts = parser.feed(body) + parser.finish()
            found = [p for p in parts if isinstance(p, ToolCall)]
            assert all(isinstance(p, str | ToolCall) for p in parts)
            assert [(c.name, json.loads(c.arguments)) for c in found] == [
                (call["function"]["name"], call["function"]["arguments"]) for call in made
            ]
            calls += len(found)
    assert calls > 20
