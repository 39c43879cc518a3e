"""Facts that users tell about themselves, and ask about later in the conversation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tools.builtin_model.corpus import tables
from tools.builtin_model.corpus.skills import Exchange
from tools.builtin_model.corpus.source import Source


@dataclass(frozen=True, slots=True)
class Attribute:
    """One thing that a user can tell: the ways to tell, to answer, to ask, and the answer."""

    draw: Callable[[Source], str]
    tell: tuple[str, ...]
    acknowledge: tuple[str, ...]
    ask: tuple[str, ...]
    answer: str
    missing: str
    """The answer if the fact was never told."""


def _of(values: tuple[str, ...]) -> Callable[[Source], str]:
    return lambda source: source.choice(values)


ATTRIBUTES: dict[str, Attribute] = {
    "name": Attribute(
        Source.name,
        ("My name is {}.", "I am {}.", "I'm {}.", "Call me {}.", "Hi, I am {}.", "Hello, my name is {}!",
         "my name is {}", "You can call me {}."),
        ("Nice to meet you, {}!", "Hello {}! How can I help you?"),
        ("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?",
         "Do you know what I am called?", "what is my name", "Tell me my name."),
        "Your name is {}.",
        "You have not told me your name.",
    ),
    "city": Attribute(
        Source.city,
        ("I live in {}.", "I am from {}.", "My home is in {}.", "I come from {}.",
         "I live in {}, by the way."),
        ("{} is a nice place.", "I have heard of {}."),
        ("Where do I live?", "Which city do I live in?", "In which city is my home?",
         "Do you remember where I live?", "Where am I from?"),
        "You live in {}.",
        "You have not told me where you live.",
    ),
    "age": Attribute(
        Source.age,
        ("I am {} years old.", "I'm {} years old.", "My age is {}.", "I turned {} this year."),
        ("{} is a good age.", "{} years, that is nice."),
        ("How old am I?", "What is my age?", "Do you remember how old I am?"),
        "You are {} years old.",
        "You have not told me your age.",
    ),
    "job": Attribute(
        _of(tables.JOBS),
        ("I work as a {}.", "I am a {} by profession.", "My job is {}.", "My profession is {}."),
        ("To be a {} is a fine job.",),
        ("What is my job?", "What do I work as?", "What is my profession?"),
        "You work as a {}.",
        "You have not told me your job.",
    ),
    "colour": Attribute(
        _of(tables.COLOURS),
        ("My favourite colour is {}.", "I like the colour {} best.", "My favorite color is {}."),
        ("{} is a beautiful colour.",),
        ("What is my favourite colour?", "Which colour do I like best?", "What's my favorite color?"),
        "Your favourite colour is {}.",
        "You have not told me your favourite colour.",
    ),
    "food": Attribute(
        _of(tables.FOODS),
        ("My favourite food is {}.", "I love to eat {}.", "I like {} more than any other food."),
        ("{}? That sounds tasty.",),
        ("What is my favourite food?", "What do I love to eat?", "Which food do I like best?"),
        "Your favourite food is {}.",
        "You have not told me your favourite food.",
    ),
    "hobby": Attribute(
        _of(tables.HOBBIES),
        ("My hobby is {}.", "In my free time I like {}.", "I enjoy {} a lot."),
        ("{} is a nice hobby.",),
        ("What is my hobby?", "What do I like to do in my free time?", "What do I enjoy?"),
        "Your hobby is {}.",
        "You have not told me your hobby.",
    ),
    "friend": Attribute(
        Source.name,
        ("My best friend is {}.", "My best friend is called {}.", "{} is my best friend."),
        ("It is good to have a friend like {}.",),
        ("Who is my best friend?", "What is the name of my best friend?", "What is my best friend called?"),
        "Your best friend is {}.",
        "You have not told me who your best friend is.",
    ),
    "sister": Attribute(
        Source.name,
        ("My sister is called {}.", "I have a sister named {}.", "{} is my sister."),
        ("{} is a nice name.",),
        ("What is my sister called?", "What is the name of my sister?", "Who is my sister?"),
        "Your sister is called {}.",
        "You have not told me about a sister.",
    ),
    "brother": Attribute(
        Source.name,
        ("My brother is called {}.", "I have a brother named {}.", "{} is my brother."),
        ("{} is a nice name.",),
        ("What is my brother called?", "What is the name of my brother?", "Who is my brother?"),
        "Your brother is called {}.",
        "You have not told me about a brother.",
    ),
    "dog": Attribute(
        Source.name,
        ("I have a dog named {}.", "My dog is called {}.", "{} is my dog."),
        ("{} must be a good dog.",),
        ("What is my dog called?", "What is the name of my dog?", "Do you remember the name of my dog?"),
        "Your dog is called {}.",
        "You have not told me about a dog.",
    ),
    "cat": Attribute(
        Source.name,
        ("I have a cat named {}.", "My cat is called {}.", "{} is my cat."),
        ("{} must be a lovely cat.",),
        ("What is my cat called?", "What is the name of my cat?", "Do you remember the name of my cat?"),
        "Your cat is called {}.",
        "You have not told me about a cat.",
    ),
    "code": Attribute(
        Source.code,
        ("My code is {}.", "Remember the code {}.", "The code is {}, please remember it.",
         "My secret number is {}.", "Please remember the number {}."),
        ("I will remember {}.",),
        ("What is my code?", "Which code did I tell you?", "What was the code?",
         "What is the secret number?",
         "Which number should you remember?"),
        "The code is {}.",
        "You have not told me a code.",
    ),
}  # fmt: skip


@dataclass(slots=True)
class Memory:
    """The facts that the user of one conversation has told so far."""

    source: Source
    told: dict[str, str] = field(default_factory=dict)
    said_at: dict[str, int] = field(default_factory=dict)
    """The turn, counted from 0, in which each attribute was told last."""

    def _new_value(self, kind: str) -> str | None:
        """A value of this side for the attribute, that may stand beside what was told first; None
        if a number of draws finds none."""
        first = next((old for key, old in self.told.items() if key != kind), None)
        for _ in range(60):
            value = ATTRIBUTES[kind].draw(self.source)
            fits = first is None or self.source.owns(first, value)
            if fits and value not in self.told.values() and self.source.owns(kind, value):
                return value
        return None

    def _learn(self, kind: str, turn: int) -> str | None:
        value = self._new_value(kind)
        if value is not None:
            self.told[kind], self.said_at[kind] = value, turn
        return value

    def tell(self, turn: int) -> Exchange:
        """The user tells something, now and then two things or something that has changed."""
        new = [kind for kind in ATTRIBUTES if kind not in self.told]
        kind = "name" if "name" in new and self.source.chance(0.4) else ""
        kind = kind or self.source.choice(
            new if new and self.source.chance(0.93) else [*ATTRIBUTES]
        )
        value = self._learn(kind, turn)
        if value is None:
            return self.tell(turn)
        said = self.source.choice(ATTRIBUTES[kind].tell).format(value)
        reply = _upper_first(self.source.choice(ATTRIBUTES[kind].acknowledge).format(value))
        others = [other for other in new if other != kind]
        if others and self.source.chance(0.25):
            second = self.source.choice(others)
            other = self._learn(second, turn)
            if other is not None:
                said = f"{said} {self.source.choice(ATTRIBUTES[second].tell).format(other)}"
        return Exchange("tell", said, reply, None)

    def ask(self, kind: str | None = None) -> Exchange:
        """A question about something that was told, or (seldom, and only of its own choosing) about
        something that was not."""
        if kind is None:
            untold = [kind for kind in ATTRIBUTES if kind not in self.told]
            if untold and (not self.told or self.source.chance(0.12)):
                attribute = ATTRIBUTES[self.source.choice(untold)]
                return Exchange(
                    "untold", self.source.choice(attribute.ask), attribute.missing, None
                )
            kind = self.source.choice([*self.told])
        attribute = ATTRIBUTES[kind]
        value = self.told[kind]
        return Exchange(
            "recall", self.source.choice(attribute.ask), attribute.answer.format(value), value
        )


def _upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]
