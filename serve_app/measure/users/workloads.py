"""The users of a language model: what they ask, how they read, when they leave. Pure.

A user is a generator: it yields what to send next and is sent the text of the answer. The same kind, seed
and answers give the same requests, in whatever order users are served.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

from serve_app.measure.users.vocabulary import CODE, TOOLS, WORDS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENS_PER_WORD = 2.5
"""More than any tokenizer here needs; keeps prompts inside the context."""
MOST_TURNS = 12


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and how its user behaves. Times are in seconds."""

    path: str
    body: dict[str, Any]
    think_s: float
    """The pause before it is sent."""
    leave_after_s: float | None = None
    """When the user hangs up, if the answer is not complete by then."""
    read_pause_s: float = 0.0
    """How long the user waits before reading each next event."""


User = Generator[Ask, str, None]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of whole numbers, cut off at both ends. `spread` is the standard deviation
    of their logarithm."""

    median: int
    spread: float
    low: int
    high: int

    def draw(self, rng: random.Random, most: int | None = None) -> int:
        """One of them, `most` at most."""
        drawn = round(rng.lognormvariate(log(self.median), self.spread))
        high = self.high if most is None else min(self.high, max(self.low, most))
        return min(max(drawn, self.low), high)


@dataclass(frozen=True, slots=True)
class Setting:
    """The common settings of all users of a run."""

    n_ctx: int
    """Tokens that a prompt and its answer may have together."""
    think_s: float
    """The median pause of somebody who reads and writes, in seconds."""

    def words(self, max_tokens: int) -> int:
        """How long a prompt may be beside an answer of so many tokens."""
        return max(8, int((self.n_ctx - max_tokens - 64) / TOKENS_PER_WORD))


QUESTION = Lengths(30, 0.7, 4, 200)
CHAT_ANSWER = Lengths(100, 0.6, 16, 300)
PASSAGES = Lengths(450, 0.5, 100, 1500)
RAG_ANSWER = Lengths(32, 0.4, 8, 64)
CALL = Lengths(48, 0.3, 24, 96)
DOCUMENT = Lengths(350, 0.6, 80, 1200)
SUMMARY = Lengths(120, 0.3, 48, 240)
TYPED = Lengths(12, 0.5, 3, 40)
HELPFUL = "You are a helpful assistant. Answer briefly, say when you do not know, and stay polite."


def prose(rng: random.Random, n_words: int) -> str:
    """So many words, in sentences."""
    words = rng.choices(WORDS, k=n_words)
    for i in range(9, n_words, 10):
        words[i] += "."
    return " ".join(words)


def chat(rng: random.Random, setting: Setting) -> User:
    """Conversations whose history grows with the answers; the user reads, thinks and goes on."""
    while True:
        history: list[tuple[str, str]] = []
        for _ in range(1 + min(int(rng.expovariate(0.25)), MOST_TURNS)):
            question = prose(rng, QUESTION.draw(rng))
            max_tokens = CHAT_ANSWER.draw(rng)
            _forget(history, setting.words(max_tokens) - len((HELPFUL + question).split()))
            answer = yield _chat(
                HELPFUL, history, question, max_tokens, _pause(rng, setting.think_s)
            )
            history.append((question, answer))


def rag(rng: random.Random, setting: Setting) -> User:
    """Long prompts of passages that nobody else asks about, short answers."""
    while True:
        max_tokens = RAG_ANSWER.draw(rng)
        passages = prose(rng, PASSAGES.draw(rng, setting.words(max_tokens) - 60))
        question = f"{passages}\n\nQuestion: {prose(rng, QUESTION.draw(rng, 30))}"
        system = "Answer from these passages only."
        yield _chat(system, [], question, max_tokens, _pause(rng, setting.think_s))


def agent(rng: random.Random, setting: Setting) -> User:
    """An agent with the same tools in every prompt, JSON answers, and the next step at once."""
    while True:
        steps: list[tuple[str, str]] = []
        for step in range(rng.randint(2, 5)):
            ask = prose(rng, QUESTION.draw(rng, 20))
            pause = 0.05 if step else _pause(rng, setting.think_s)
            max_tokens = CALL.draw(rng)
            _forget(steps, setting.words(max_tokens) - len((TOOLS + ask).split()))
            request = _chat(TOOLS, steps, ask, max_tokens, pause)
            answer = yield with_body(request, response_format={"type": "json_object"})
            steps.append((ask, answer or "{}"))


def code(rng: random.Random, setting: Setting) -> User:
    """Completions of code that is being typed: the next keystroke takes back what was asked."""
    while True:
        text = "\n".join(rng.sample(CODE, k=rng.randint(2, 6))) + "\n"
        line = rng.choice(CODE)
        typed = 0
        for _ in range(8):
            typed += TYPED.draw(rng)
            if typed >= len(line):
                break
            body = _sampled({"prompt": text + line[:typed], "max_tokens": 32})
            yield Ask(COMPLETIONS, body, rng.uniform(0.1, 0.4), rng.lognormvariate(-0.7, 0.5))


def batch(rng: random.Random, setting: Setting) -> User:
    """Summaries of documents, one after the other, without a pause."""
    while True:
        max_tokens = SUMMARY.draw(rng)
        document = prose(rng, DOCUMENT.draw(rng, setting.words(max_tokens) - 20))
        yield _chat("Summarise the document.", [], document, max_tokens, 0.0)


def slow(rng: random.Random, setting: Setting) -> User:
    """Chats of somebody whose connection takes a quarter of a second for each event."""
    yield from _changed(chat(rng, setting), lambda ask: replace(ask, read_pause_s=0.25))


def vanish(rng: random.Random, setting: Setting) -> User:
    """Chats of somebody who hangs up at some moment of the first three seconds."""
    yield from _changed(
        chat(rng, setting), lambda ask: replace(ask, leave_after_s=rng.uniform(0.0, 3.0))
    )


KINDS: Mapping[str, Callable[[random.Random, Setting], User]] = {
    user.__name__: user for user in (chat, rag, agent, code, batch, slow, vanish)
}


def user(kind: str, seed: int, number: int, setting: Setting) -> User:
    """The user of this number."""
    return KINDS[kind](random.Random(f"{seed} {kind} {number}"), setting)


def with_body(ask: Ask, **fields: object) -> Ask:
    """Add these fields to the body of a request."""
    return replace(ask, body=ask.body | fields)


def _forget(history: list[tuple[str, str]], room: int) -> None:
    """Drop the oldest turns until the rest has so few words."""
    while history and sum(len(f"{asked} {answer}".split()) for asked, answer in history) > room:
        del history[0]


def _pause(rng: random.Random, median_s: float) -> float:
    return median_s * min(rng.lognormvariate(0.0, 0.7), 5.0)


def _chat(
    system: str,
    history: Sequence[tuple[str, str]],
    question: str,
    max_tokens: int,
    think_s: float,
) -> Ask:
    messages = [{"role": "system", "content": system}]
    for asked, answered in history:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answered})
    messages.append({"role": "user", "content": question})
    return Ask(CHAT, _sampled({"messages": messages, "max_tokens": max_tokens}), think_s)


def _sampled(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"stream": True, "stream_options": {"include_usage": True}}


def _changed(user: User, change: Callable[[Ask], Ask]) -> User:
    ask = next(user)
    while True:
        ask = user.send((yield change(ask)))
