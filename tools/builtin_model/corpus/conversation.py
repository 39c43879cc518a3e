"""Whole conversations: a system prompt or none, tools or none, and as many turns as are wanted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tools.builtin_model.corpus import skills
from tools.builtin_model.corpus.memory import Memory
from tools.builtin_model.corpus.skills import Exchange
from tools.builtin_model.corpus.source import Source
from tools.builtin_model.corpus.stories import story
from tools.builtin_model.corpus.tools import TOOLS, Toolbox, call_message, result_message

Message = dict[str, Any]

NO_TOOL = "I cannot do that: I have no tool for it."


@dataclass(frozen=True, slots=True)
class Style:
    """The effect of a system prompt on every answer."""

    name: str
    prompts: tuple[str, ...]
    shape: Callable[[Exchange], str]
    """The answer in this style."""


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _in_json(exchange: Exchange) -> str:
    value = exchange.short or ""
    shown = int(value) if value.isdigit() else value
    return json.dumps({"answer": shown}, ensure_ascii=False)


PLAIN = Style(
    "plain",
    (
        "You are a helpful assistant.",
        "You are a friendly assistant.",
        "Be helpful and brief.",
        "You are an assistant who answers questions.",
        "Answer the user's questions.",
        "You are a helpful AI assistant.",
    ),
    lambda exchange: exchange.answer,
)
SHORT = Style(
    "one word",
    (
        "Answer in one word.",
        "Answer with one word only.",
        "You are a helpful assistant. Answer in one word.",
        "Use a single word for every answer.",
        "Reply with one word.",
        "Always answer in one word.",
        "Give one-word answers.",
    ),
    lambda exchange: _first_upper(exchange.short or "") + ".",
)
UPPER = Style(
    "upper case",
    (
        "Answer in upper case.",
        "Always answer in upper case.",
        "Write every answer in upper case.",
        "You are a helpful assistant. Answer in upper case letters.",
        "Use only capital letters.",
        "Reply in capital letters.",
    ),
    lambda exchange: exchange.answer.upper(),
)
JSON = Style(
    "json",
    (
        "Always answer in JSON.",
        "Answer in JSON.",
        "Answer with a JSON object.",
        "You are a helpful assistant. Reply in JSON only.",
        'Answer as JSON with the key "answer".',
    ),
    _in_json,
)

_ANY: tuple[tuple[Callable[[Source], Exchange], float], ...] = (
    (skills.fact, 20),
    (skills.arithmetic, 11),
    (skills.comparison, 2),
    (story, 3),
    (skills.listing, 7),
    (skills.sequence, 2),
    (skills.json_record, 9),
    (skills.json_other, 4),
    (skills.repetition, 4),
    (skills.reading, 12),
    (skills.small_talk, 6),
    (skills.unknown, 5),
)
_WITH_A_CORE: tuple[tuple[Callable[[Source], Exchange], float], ...] = (
    (skills.fact, 20),
    (skills.arithmetic, 7),
    (skills.comparison, 2),
    (skills.reading, 8),
)


def _pick(
    source: Source, weighted: tuple[tuple[Callable[[Source], Exchange], float], ...]
) -> Exchange:
    skill = source.random.choices(
        [skill for skill, _ in weighted], [weight for _, weight in weighted]
    )[0]
    return skill(source)


@dataclass(slots=True)
class Conversation:
    """A conversation that grows by `turns()`."""

    source: Source
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)

    def add(self, user: str, assistant: str) -> None:
        self.messages += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
        ]

    def grow(self) -> Iterator[None]:
        """Add one exchange, or a few that belong together, for each `next`; without end."""
        kind = self.source.random.random()
        if kind < 0.22:
            yield from self._with_tools()
        elif kind < 0.42:
            yield from self._styled(self.source.choice((SHORT, UPPER, JSON)))
        elif kind < 0.47:
            yield from self._persona()
        else:
            if kind < 0.65:
                self._system(self.source.choice(PLAIN.prompts))
            yield from self._free()

    def _system(self, text: str) -> None:
        self.messages.append({"role": "system", "content": text})

    def _free(self, memory: Memory | None = None) -> Iterator[None]:
        """Anything goes: what was told is asked about for as long as the conversation lasts."""
        memory = memory or Memory(self.source)
        for turn in range(10_000):
            dice = self.source.random.random()
            if dice < 0.18 - 0.02 * min(5, len(memory.told)):
                exchange = memory.tell(turn)
            elif dice < 0.40 and (memory.told or self.source.chance(0.15)):
                exchange = memory.ask()
            elif dice < 0.42:
                tool = self.source.choice(TOOLS)
                wish = self.source.choice(tool.ask).format_map(tool.draw(self.source))
                exchange = Exchange("no tool", wish, NO_TOOL, None)
            elif dice < 0.45:
                first, exchange = skills.follow_up(self.source)
                self.add(first.user, first.answer)
            else:
                exchange = _pick(self.source, _ANY)
            self.add(exchange.user, exchange.answer)
            yield

    def _styled(self, style: Style) -> Iterator[None]:
        """Every answer follows the system prompt."""
        self._system(self.source.choice(style.prompts))
        memory = Memory(self.source)
        for turn in range(10_000):
            dice = self.source.random.random()
            if dice < 0.12:
                told = memory.tell(turn)
                answer = Exchange("tell", told.user, "OK.", "OK")
                exchange = told if style is UPPER else answer
            elif dice < 0.35 and memory.told:
                exchange = memory.ask([*memory.told][self.source.integer(0, len(memory.told) - 1)])
            elif style is UPPER and dice < 0.45:
                exchange = skills.small_talk(self.source)
            else:
                exchange = _pick(self.source, _WITH_A_CORE)
            self.add(exchange.user, style.shape(exchange))
            yield

    def _persona(self) -> Iterator[None]:
        """The system prompt gives the assistant a name, and may tell about the user."""
        assistant, city, user = self.source.together(
            self.source.name, self.source.city, self.source.name
        )
        text = self.source.choice(
            (
                "You are {}, a helpful assistant.",
                "Your name is {}.",
                "You are an assistant called {}.",
            )
        ).format(assistant)
        memory = Memory(self.source)
        if self.source.chance(0.5):
            text += f" The user is called {user}."
            memory.told["name"] = user
        if self.source.chance(0.3):
            text += f" The user lives in {city}."
            memory.told["city"] = city
        self._system(text)
        turns = self._free(memory)
        while True:
            if self.source.chance(0.25):
                asked = self.source.choice(
                    ("Who are you?", "What is your name?", "What are you called?")
                )
                self.add(asked, f"I am {assistant}. How can I help you?")
            next(turns)
            yield

    def _with_tools(self) -> Iterator[None]:
        """Calls of the tools on offer, their results, and turns that need none."""
        toolbox = Toolbox(self.source, self.source.integer(1, 4))
        self.tools = toolbox.described
        if self.source.chance(0.4):
            self._system(self.source.choice(PLAIN.prompts))
        memory = Memory(self.source)
        for turn in range(10_000):
            dice = self.source.random.random()
            if dice < 0.62:
                self._call(toolbox)
            elif dice < 0.70:
                self.add(toolbox.missing(), NO_TOOL)
            elif dice < 0.76:
                told = memory.tell(turn)
                self.add(told.user, told.answer)
            else:
                exchange = memory.ask() if memory.told and dice < 0.85 else _pick(self.source, _ANY)
                self.add(exchange.user, exchange.answer)
            yield

    def _call(self, toolbox: Toolbox) -> None:
        """One exchange with a call, or with two calls at once."""
        both = toolbox.calls_of_one_tool() if self.source.chance(0.12) else None
        calls = both or (toolbox.call(),)
        self.messages.append({"role": "user", "content": calls[0].user})
        self.messages.append(call_message(calls))
        self.messages += [result_message(call) for call in calls]
        answer = " ".join(call.answer for call in calls)
        self.messages.append({"role": "assistant", "content": answer})
