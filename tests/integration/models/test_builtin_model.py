"""The built-in model through the engine: what random weights cannot show."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.unit.prompt.tool_calls.formats import FORMAT
from tools.builtin_model.evaluate import SCORES, Score, run
from tools.messages import from_messages

N_SLOTS = 4
N_CASES = 40
FACTS = {
    "What is the capital of France?": "Paris",
    "What is the opposite of hot?": "cold",
    "What colour is grass?": "green",
    "How many legs does a spider have?": "eight",
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(BUILTIN_MODEL)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine.load(
        BUILTIN_MODEL,
        EngineOptions(N_SLOTS, 2048, threads=1, max_waiting=N_CASES, profile_limit_s=0),
    )
    yield made
    made.close()


class Chat:
    """A conversation that keeps its history, with the model's own answers in it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str) -> None:
        self._engine, self._tokenizer, self._name = engine, tokenizer, name
        self._messages: list[dict[str, Any]] = []
        self.cached_tokens = 0
        """Of the last prompt."""

    async def say(self, text: str) -> str:
        self._messages.append({"role": "user", "content": text})
        request = GenerationRequest(
            f"{self._name}/{len(self._messages)}",
            self._tokenizer.encode_chat(from_messages(self._messages)),
            SamplingParams(temperature=0, max_tokens=200),
        )
        answer = ""
        async for delta in self._engine.submit(request):
            answer += delta.text
            if delta.end is not None:
                assert delta.end.reason == "stop"
                self.cached_tokens = delta.end.usage.cached_tokens
        self._messages.append({"role": "assistant", "content": answer})
        return answer


async def test_each_remembers_its_own_after_others_had_the_slots(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    """Three times as many conversations as slots, turn by turn: every slot changes hands."""
    names = ["Ana", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack",
             "Kate", "Leo"]  # fmt: skip
    chats = {name: Chat(engine, tokenizer, name) for name in names}
    assert len(names) == 3 * N_SLOTS
    for said in ("My name is {}.", "What colour is the sky?", "List three fruits.", "Hello!"):
        await asyncio.gather(*(chats[name].say(said.format(name)) for name in names))
    answers = await asyncio.gather(*(chats[name].say("What is my name?") for name in names))
    assert answers == [f"Your name is {name}." for name in names]


async def test_recall_from_a_slot_that_kept_its_conversation(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    chat = Chat(engine, tokenizer, "kept")
    for said in (
        "I live in Lisbon.",
        "What is the capital of Japan?",
        "Tell me a story about a fox.",
    ):
        await chat.say(said)
    assert await chat.say("Where do I live?") == "You live in Lisbon."
    assert chat.cached_tokens > 100  # the story, at least, was not computed again


async def test_sixteen_ask_the_same_fact_at_once(engine: Engine, tokenizer: Tokenizer) -> None:
    for question, answer in FACTS.items():
        chats = [Chat(engine, tokenizer, f"{question}/{n}") for n in range(16)]
        answers = await asyncio.gather(*(chat.say(question) for chat in chats))
        assert [answer in text for text in answers] == [True] * 16, answers


@pytest.mark.parametrize("score", [s for s in SCORES if s.wanted], ids=lambda score: score.name)
def test_held_out_scores(engine: Engine, tokenizer: Tokenizer, score: Score) -> None:
    """The model card has the scores of many more cases: these are a sample, hence the slack."""
    replies = run(engine, tokenizer, score, N_CASES)
    wrong = [(case.messages[-1], reply) for case, reply in replies if not case.check(reply)]
    assert score.wanted is not None
    assert 1 - len(wrong) / len(replies) >= score.wanted - 0.1, wrong


def test_the_file_is_small_and_says_what_it_is(tokenizer: Tokenizer) -> None:
    assert BUILTIN_MODEL.stat().st_size <= 8_000_000
    assert tokenizer.tool_format.name == FORMAT["hermes"].name
