"""The users of a language model: what they ask, how they read, when they leave. Pure.

A user is a generator: it yields what to send next and is sent the text of the answer. The same kind, seed
and answers give the same requests, in whatever order users are served.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

_WORDS = """
a the of and to in is you that it he was for on are as with his they at be this have from or one had by
word but not what all were we when your can said there use each which she do how their if will up other
about out many then them these so some her would make like him into time has look two more write go see
number no way could people my than first water been call who oil its now find long down day did get come
made may part house river book table green small large city road letter music story friend morning night
winter summer garden window bread paper stone light mountain king fox bird apple question answer plan
"""
WORDS = tuple(_WORDS.split())

CODE = (
    "def mean(values: list[float]) -> float:",
    "    return sum(values) / len(values)",
    "for name, value in sorted(table.items()):",
    "    print(f'{name}: {value:.2f}')",
    "class Queue:",
    "    def __init__(self, size: int) -> None:",
    "        self._items: list[str] = []",
    "with open(path, encoding='utf-8') as file:",
    "    lines = [line.strip() for line in file]",
    "if not lines or lines[0].startswith('#'):",
    "    raise ValueError('no header in the first line')",
    "while low < high and items[low] <= pivot:",
    "result = {key: len(group) for key, group in groups.items()}",
    "assert response.status_code == 200, response.text",
)

TOOLS = """You are an agent. Answer with one JSON object: {"tool": NAME, "arguments": {...}}. Your tools:
search(query, limit): looks for pages that hold the words of the query, the best of them first.
read(address, first_line, last_line): gives the lines of a page, or of a file in the project.
write(path, text): puts the text into a file of the project, in the place of what was there.
run(command, timeout_s): runs a command in the project and gives what it prints and its exit status.
ask(question): asks the person who gave the task, and waits for what they say.
done(summary): ends the task, and says in a few words what was found, what was made and what is left.
Use one tool at a time. Read before you write. Never run what removes files. When a command fails, read
what it printed and try another way, three times at most; then ask. Say done when nothing is left to do."""


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENS_PER_WORD = 2.5
"""A bound above what any tokenizer here needs; keeps prompts inside the context."""
MOST_TURNS = 12


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and how its user behaves. Times are in seconds."""

    path: str
    body: dict[str, Any]
    think_s: float
    leave_after_s: float | None = None
    """The time when the user hangs up, if the answer is not complete by then."""
    read_pause_s: float = 0.0
    """How long the user waits before reading each next event."""


User = Generator[Ask, str, None]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of whole numbers, cut off at both ends; `spread` is of the logarithms."""

    median: int
    spread: float
    low: int
    high: int

    def draw(self, rng: random.Random, most: int | None = None) -> int:
        """A length drawn at random, `most` at most."""
        drawn = round(rng.lognormvariate(log(self.median), self.spread))
        high = self.high if most is None else min(self.high, max(self.low, most))
        return min(max(drawn, self.low), high)


@dataclass(frozen=True, slots=True)
class Setting:
    n_ctx: int
    """Tokens that a prompt and its answer may have together."""
    think_s: float

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
    """A text of so many words, in sentences."""
    words = rng.choices(WORDS, k=n_words)
    for i in range(9, n_words, 10):
        words[i] += "."
    return " ".join(words)


def chat_user(rng: random.Random, setting: Setting) -> User:
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


def rag_user(rng: random.Random, setting: Setting) -> User:
    """Long prompts of passages that nobody else asks about, short answers."""
    while True:
        max_tokens = RAG_ANSWER.draw(rng)
        passages = prose(rng, PASSAGES.draw(rng, setting.words(max_tokens) - 60))
        question = f"{passages}\n\nQuestion: {prose(rng, QUESTION.draw(rng, 30))}"
        system = "Answer from these passages only."
        yield _chat(system, [], question, max_tokens, _pause(rng, setting.think_s))


def agent_user(rng: random.Random, setting: Setting) -> User:
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


def code_user(rng: random.Random, setting: Setting) -> User:
    """Completions of code that is being typed: the next keystroke takes back what was asked."""
    while True:
        text = "\n".join(rng.sample(CODE, k=rng.randint(2, 6))) + "\n"
        line = rng.choice(CODE)
        typed = 0
        for _ in range(8):
            typed += TYPED.draw(rng)
            if typed >= len(line):
                break
            body = _as_stream({"prompt": text + line[:typed], "max_tokens": 32})
            yield Ask(COMPLETIONS, body, rng.uniform(0.1, 0.4), rng.lognormvariate(-0.7, 0.5))


def batch_user(rng: random.Random, setting: Setting) -> User:
    """Summaries of documents, one after the other, without a pause."""
    while True:
        max_tokens = SUMMARY.draw(rng)
        document = prose(rng, DOCUMENT.draw(rng, setting.words(max_tokens) - 20))
        yield _chat("Summarise the document.", [], document, max_tokens, 0.0)


def slow_user(rng: random.Random, setting: Setting) -> User:
    """Chats of somebody whose connection takes a quarter of a second for each event."""
    yield from _change(chat_user(rng, setting), lambda ask: replace(ask, read_pause_s=0.25))


def vanish_user(rng: random.Random, setting: Setting) -> User:
    """Chats of somebody who hangs up at some moment of the first three seconds."""
    yield from _change(
        chat_user(rng, setting), lambda ask: replace(ask, leave_after_s=rng.uniform(0.0, 3.0))
    )


KINDS: Mapping[str, Callable[[random.Random, Setting], User]] = {
    user.__name__.removesuffix("_user"): user
    for user in (chat_user, rag_user, agent_user, code_user, batch_user, slow_user, vanish_user)
}


def user(kind: str, seed: int, number: int, setting: Setting) -> User:
    return KINDS[kind](random.Random(f"{seed} {kind} {number}"), setting)


def with_body(ask: Ask, **fields: object) -> Ask:
    return replace(ask, body=ask.body | fields)


def _forget(history: list[tuple[str, str]], room: int) -> None:
    while history and sum(len(f"{asked} {answer}".split()) for asked, answer in history) > room:
        del history[0]


def _pause(rng: random.Random, median_s: float) -> float:
    return median_s * min(rng.lognormvariate(0.0, 0.7), 5.0)


def _chat(
    system: str, history: Sequence[tuple[str, str]], question: str, max_tokens: int, think_s: float
) -> Ask:
    messages = [{"role": "system", "content": system}]
    for asked, answered in history:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answered})
    messages.append({"role": "user", "content": question})
    return Ask(CHAT, _as_stream({"messages": messages, "max_tokens": max_tokens}), think_s)


def _as_stream(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"stream": True, "stream_options": {"include_usage": True}}


def _change(user: User, change: Callable[[Ask], Ask]) -> User:
    ask = next(user)
    while True:
        ask = user.send((yield change(ask)))


def parse_mix(text: str) -> dict[str, int]:
    """`chat=3,rag=1`: whole weights by kind. Raises ArgumentTypeError."""
    mix: dict[str, int] = {}
    for part in text.split(","):
        kind, _, weight = part.partition("=")
        if kind not in KINDS or kind in mix or not weight.isdecimal() or not int(weight):
            raise argparse.ArgumentTypeError(
                f"{part!r}: expected KIND=WEIGHT, kinds {', '.join(KINDS)}, each once."
            )
        mix[kind] = int(weight)
    return mix


def kind_of(number: int, mix: Mapping[str, int]) -> str:
    """The kind of the user of this number: every so many users hold the mix exactly, spread evenly."""
    turn = number % sum(mix.values())
    places = [((i + 0.5) / weight, kind) for kind, weight in mix.items() for i in range(weight)]
    return sorted(places)[turn][1]
