"""Scores the built-in model on held-out questions, through Corral's own engine.

    python -m tools.builtin_model.evaluate [--model FILE] [--cases 200] [--show]

The questions were not in the training text: see `corpus.source`. Earlier turns of a conversation are
the corpus's own. Answers count as right only if they are the right words, or the right JSON. The
exit status is 1 if a score is below what is asked of the model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from serve_app.base.formats import BackendName
from serve_app.engine import (
    Engine,
    EngineOptions,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenStream,
)
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.prompt.tool_calls import ToolCall, detect
from serve_app.store.builtin_model import BUILTIN_MODEL
from tools.builtin_model.corpus import conversation, skills, tables
from tools.builtin_model.corpus.conversation import Conversation, Message, Style
from tools.builtin_model.corpus.memory import Memory
from tools.builtin_model.corpus.source import Source
from tools.builtin_model.corpus.stories import story
from tools.builtin_model.corpus.tools import Toolbox, call_message, result_message
from tools.chat_template import CHAT_TEMPLATE
from tools.messages import from_messages

N_CTX_SLOT = 2048
LONG = 1500
"""Tokens that stand before a question at least, where long conversations are asked for."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The model's answer."""

    text: str
    reason: FinishReason


Check = Callable[[Reply], bool]


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation that ends with a question, and what makes an answer right."""

    messages: list[Message]
    check: Check
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int = 200


@dataclass(frozen=True, slots=True)
class Score:
    """One line of the result: which cases, and the share of right answers that is asked for."""

    name: str
    make: Callable[[Source], Case]
    wanted: float | None = None


def _ask(text: str, check: Check, before: list[Message] | None = None) -> Case:
    return Case([*(before or []), {"role": "user", "content": text}], check)


def _says(text: str) -> Check:
    return lambda reply: reply.text == text


def _fact(source: Source) -> Case:
    exchange = skills.fact(source) if source.chance(0.8) else skills.arithmetic(source)
    return _ask(exchange.user, _says(exchange.answer))


def _sum(source: Source) -> Case:
    exchange = skills.arithmetic(source)
    return _ask(exchange.user, _says(exchange.answer))


def _recall(source: Source, *, turns_between: range | None = None, n_tokens: int = 0) -> Case:
    """Something is told, other turns follow, and it is asked for."""
    told = Conversation(source)
    memory = Memory(source)
    for turn in range(source.integer(1, 2)):
        exchange = memory.tell(turn)
        told.add(exchange.user, exchange.answer)
    kind = source.choice([*memory.told])
    others = (skills.fact, skills.arithmetic, skills.listing, skills.small_talk, skills.json_record,
              skills.reading, skills.repetition, story)  # fmt: skip
    least = source.choice(turns_between or range(3, 4))
    turns = 0
    while turns < least or _size(told) < n_tokens:
        exchange = source.choice(others)(source)
        told.add(exchange.user, exchange.answer)
        turns += 1
    question = memory.ask(kind)
    return _ask(question.user, _says(question.answer), told.messages)


def _long(source: Source) -> Case:
    """A question of any kind with a long conversation before it."""
    if source.chance(0.4):
        return _recall(source, n_tokens=LONG)
    before = Conversation(source)
    while _size(before) < LONG:
        exchange = source.choice((skills.fact, skills.listing, skills.reading, story))(source)
        before.add(exchange.user, exchange.answer)
    exchange = source.choice((skills.fact, skills.fact, skills.json_record, skills.reading))(source)
    return _ask(exchange.user, _says(exchange.answer), before.messages)


def _json_parses(source: Source) -> Case:
    exchange = source.choice((skills.json_record, skills.json_other))(source)
    return _ask(exchange.user, lambda reply: _parsed(reply.text) is not None)


def _json_right(source: Source) -> Case:
    exchange = skills.json_record(source)
    return _ask(exchange.user, lambda reply: _parsed(reply.text) == json.loads(exchange.answer))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _tool_call(source: Source) -> Case:
    toolbox = Toolbox(source, source.integer(1, 4))
    call = toolbox.call()
    expected = [(call.tool["function"]["name"], call.arguments)]

    def right(reply: Reply) -> bool:
        tool_format = detect(CHAT_TEMPLATE)
        assert tool_format is not None
        parser = tool_format.parser()
        parts = parser.feed(reply.text) + parser.finish()
        return expected == [
            (part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)
        ]

    return Case([{"role": "user", "content": call.user}], right, toolbox.described)


def _tool_answer(source: Source) -> Case:
    toolbox = Toolbox(source, source.integer(1, 4))
    call = toolbox.call()
    messages = [{"role": "user", "content": call.user}, call_message((call,)), result_message(call)]
    return Case(messages, _says(call.answer), toolbox.described)


def _tool_not_needed(source: Source) -> Case:
    exchange = skills.fact(source)
    case = _ask(exchange.user, _says(exchange.answer))
    return Case(case.messages, case.check, Toolbox(source, source.integer(1, 4)).described)


def _story(source: Source) -> Case:
    return _ask(story(source).user, lambda reply: reply.reason is FinishReason.STOP)


def _story_about(source: Source) -> Case:
    request = story(source).user
    asked = [word for word in request.rstrip(".?").split() if word in tables.ANIMALS]
    return _ask(request, lambda reply: all(animal in reply.text for animal in asked))


def _list(source: Source) -> Case:
    exchange = skills.listing(source)
    count = len(exchange.answer.splitlines())

    def right(reply: Reply) -> bool:
        lines = reply.text.splitlines()
        items = {line.partition(". ")[2] for line in lines}
        return len(lines) == count and len(items) == count and "" not in items

    return _ask(exchange.user, right)


def _style(source: Source) -> Case:
    style: Style = source.choice((conversation.SHORT, conversation.UPPER, conversation.JSON))
    exchange = source.choice((skills.fact, skills.fact, skills.arithmetic, skills.reading))(source)
    system = [{"role": "system", "content": source.choice(style.prompts)}]
    return _ask(exchange.user, _says(style.shape(exchange)), system)


def _reading(source: Source) -> Case:
    exchange = skills.reading(source)
    return _ask(exchange.user, _says(exchange.answer))


SCORES = (
    Score("facts and sums", _fact, 0.95),
    Score("sums alone", _sum),
    Score("recall, 3 to 8 turns later", lambda s: _recall(s, turns_between=range(3, 9)), 0.90),
    Score(f"recall, {LONG} tokens later", lambda s: _recall(s, n_tokens=LONG)),
    Score(f"any question after {LONG} tokens", _long),
    Score("JSON parses", _json_parses, 0.95),
    Score("JSON with the right values", _json_right),
    Score("right tool, right arguments", _tool_call, 0.85),
    Score("answer from a tool's result", _tool_answer),
    Score("no tool where none is needed", _tool_not_needed),
    Score("stories end within 200 tokens", _story, 0.95),
    Score("stories about what was asked for", _story_about),
    Score("lists: so many, all different", _list),
    Score("system prompt followed", _style),
    Score("questions about a text", _reading),
)


def _size(told: Conversation) -> int:
    """At least how many tokens the conversation has: a fit to this corpus and tokenizer."""
    characters = sum(len(message["content"]) for message in told.messages)
    return int(characters / 4.45 + 8.1 * len(told.messages))


def run(
    engine: Engine, tokenizer: Tokenizer, score: Score, n_cases: int
) -> list[tuple[Case, Reply]]:
    """The replies to `n_cases` held-out cases."""
    cases = [score.make(Source(f"{score.name}/{n}", held_out=True)) for n in range(n_cases)]
    return asyncio.run(_replies(engine, tokenizer, score.name, cases))


async def _replies(
    engine: Engine, tokenizer: Tokenizer, name: str, cases: list[Case]
) -> list[tuple[Case, Reply]]:
    outcomes = engine.submit_many(
        [
            GenerationRequest(
                f"{name}/{n}",
                tokenizer.encode_chat(from_messages(case.messages), case.tools),
                SamplingParams(temperature=0, max_tokens=case.max_tokens),
            )
            for n, case in enumerate(cases)
        ]
    )
    replies = []
    for case, outcome in zip(cases, outcomes, strict=True):
        if not isinstance(outcome, TokenStream):
            raise outcome
        text = ""
        async for delta in outcome:
            text += delta.text
            if delta.end is not None:
                replies.append((case, Reply(text, delta.end.reason)))
    return replies


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Score the built-in model.")
    parser.add_argument("--model", type=Path, default=BUILTIN_MODEL)
    parser.add_argument("--cases", type=int, default=200, help="for each line (default: 200)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", choices=get_args(BackendName), default="llama.cpp")
    parser.add_argument("--show", action="store_true", help="the wrong answers, too")
    arguments = parser.parse_args()
    tokenizer = Tokenizer(arguments.model)
    options = EngineOptions(
        8, N_CTX_SLOT, arguments.threads, max_waiting=arguments.cases, backend=arguments.backend
    )
    engine = Engine.load(arguments.model, options)
    failed = False
    print("| what | right | asked for |\n| --- | --- | --- |")
    for score in SCORES:
        replies = run(engine, tokenizer, score, arguments.cases)
        share = sum(case.check(reply) for case, reply in replies) / len(replies)
        wanted = "" if score.wanted is None else f"{score.wanted:.0%}"
        print(f"| {score.name} | {share:.1%} | {wanted} |", flush=True)
        failed |= score.wanted is not None and share < score.wanted
        for case, reply in replies if arguments.show else []:
            if not case.check(reply):
                print(f"    {case.messages[-1]['content']!r} -> {reply.text!r}")
    engine.close()
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
