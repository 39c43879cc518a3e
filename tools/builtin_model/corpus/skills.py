"""The questions of one turn, with the right answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tools.builtin_model.corpus import tables
from tools.builtin_model.corpus.source import Source
from tools.builtin_model.corpus.tables import a


@dataclass(frozen=True, slots=True)
class Exchange:
    """A user's turn and the right answer to it."""

    skill: str
    user: str
    answer: str
    short: str | None
    """The answer's core, where it has one that can stand alone."""


def fact(source: Source) -> Exchange:
    """A question about the facts of `tables`; question and fact are a pair of one side."""
    while True:
        ask, tell, given, answer = source.choice(_FACTS)
        question = source.choice(ask)
        # The first way to ask is always trained on, so that every fact is.
        mine = not source.held_out if question is ask[0] else source.owns(question, given)
        if mine:
            return Exchange(
                "fact",
                _casual(source, question.format(given)),
                _sentence(tell.format(given, answer)),
                answer,
            )


def follow_up(source: Source) -> list[Exchange]:
    """Two questions of one kind, the second one asked in short: "And Italy?"."""
    table, ask, tell = source.choice(_FOLLOW_UPS)
    first, second = source.sample(list(table), 2)
    return [
        Exchange(
            "fact", ask.format(first), _sentence(tell.format(first, table[first])), table[first]
        ),
        Exchange(
            "fact",
            source.choice(("And {}?", "What about {}?", "And what about {}?")).format(second),
            _sentence(tell.format(second, table[second])),
            table[second],
        ),
    ]


def arithmetic(source: Source) -> Exchange:
    """A sum or a difference of numbers up to 20."""
    while True:
        x, y = source.integer(0, 20), source.integer(0, 20)
        if source.owns(f"{min(x, y)} and", f"{max(x, y)}"):
            break
    if source.chance(0.65):
        value, words, sign = x + y, "plus", "+"
    else:
        x, y = max(x, y), min(x, y)
        value, words, sign = x - y, "minus", "-"
    question = source.choice(
        (
            "What is {x} {words} {y}?",
            "What is {x} {sign} {y}?",
            "How much is {x} {words} {y}?",
            "{x} {sign} {y} = ?",
            "{x} {sign} {y}",
            "Can you work out {x} {words} {y}?",
        )
    ).format(x=x, y=y, words=words, sign=sign)
    return Exchange("sum", question, f"{x} {words} {y} is {value}.", str(value))


def comparison(source: Source) -> Exchange:
    """Which of two numbers is the larger or the smaller one."""
    x, y = (int(value) for value in source.together(source.age, source.age))
    word, value = ("larger", max(x, y)) if source.chance(0.6) else ("smaller", min(x, y))
    return Exchange(
        "comparison", f"Which is {word}, {x} or {y}?", f"{value} is {word}.", str(value)
    )


def listing(source: Source) -> Exchange:
    """A list of so many things of a kind, each once, in order: what comes next depends on what came
    last, so nothing comes twice."""
    kind, things = source.choice(_KINDS)
    count = source.integer(2, min(7, len(things)))
    number = source.choice((tables_number(count), str(count)))
    request = source.choice(_LIST_REQUESTS).format(number=number, kind=kind)
    items = _some(source, things, count)
    lines = (f"{index}. {_sentence(item)}" for index, item in enumerate(items, start=1))
    return Exchange("list", _casual(source, request), "\n".join(lines), short=None)


def sequence(source: Source) -> Exchange:
    """Counting, the days of the week, the months of the year."""
    if source.chance(0.3):
        name, values = source.choice(
            (("the days of the week", tables.DAYS), ("the months of the year", tables.MONTHS))
        )
        return Exchange("sequence", f"List {name}.", ", ".join(values) + ".", None)
    start = source.integer(1, 20)
    end = start + source.integer(2, 9)
    request = source.choice(("Count from {} to {}.", "Can you count from {} to {}?"))
    numbers = ", ".join(str(value) for value in range(start, end + 1))
    return Exchange("sequence", request.format(start, end), numbers + ".", None)


def json_record(source: Source) -> Exchange:
    """A sentence about a person as the JSON object that was asked for."""
    name, city, age, job = source.together(
        source.name, source.city, source.age, source.of(tables.JOBS)
    )
    values = {
        "name": (name, "name"),
        "age": (int(age), "age"),
        "city": (city, source.choice(("city", "city", "town", "home"))),
        "job": (job, source.choice(("job", "job", "profession", "work"))),
    }
    told = ["name", *source.sample(["age", "city", "job"], source.integer(1, 3))]
    phrases = {
        "age": f"is {age} years old",
        "city": f"lives in {city}",
        "job": f"works as {a(job)}",
    }
    text = f"{name} {_join([phrases[key] for key in told[1:]])}."
    asked = source.sample(told, source.integer(max(1, len(told) - 1), len(told)))
    keys = [values[key][1] for key in asked]
    request = source.choice(_JSON_REQUESTS).format(keys=_join(keys), text=text)
    answer = {values[key][1]: values[key][0] for key in asked}
    return Exchange("json", request, json.dumps(answer, ensure_ascii=False), None)


def json_other(source: Source) -> Exchange:
    """A fact or a list as JSON."""
    style = source.integer(0, 3)
    if style == 0:
        count = source.integer(2, 5)
        kind, things = source.choice(_KINDS)
        request = source.choice(
            ("Give me a JSON list of {} {}.", "Write {} {} as a JSON array.", "JSON array of {} {}")
        ).format(source.choice((tables_number(count), str(count))), kind)
        return Exchange("json", request, json.dumps(_some(source, things, count)), None)
    if style == 1:
        country = source.choice(list(tables.CAPITALS))
        request = source.choice(
            (
                "Give me the capital of {} as JSON.",
                "Answer in JSON: what is the capital of {}?",
                "Write a JSON object with the country and the capital of {}.",
            )
        ).format(country)
        answer = {"country": country.removeprefix("the "), "capital": tables.CAPITALS[country]}
        return Exchange("json", request, json.dumps(answer), None)
    key, value = source.choice(("colour", "animal", "fruit", "name", "city", "number")), ""
    draws: Mapping[str, Callable[[], str]] = {
        "colour": source.of(tables.COLOURS),
        "animal": source.of(tables.ANIMALS),
        "fruit": source.of(tables.FRUITS),
        "name": source.name,
        "city": source.city,
        "number": source.code,
    }
    value, other = source.together(draws[key], source.code)
    shown = int(value) if key == "number" else value
    if style == 2:
        request = f"Write a JSON object with the {key} {value}."
        return Exchange("json", request, json.dumps({key: shown}), None)
    request = f"Write a JSON object with the {key} {value} and the count {other}."
    return Exchange("json", request, json.dumps({key: shown, "count": int(other)}), None)


def repetition(source: Source) -> Exchange:
    """Words to say again."""
    pool = (*tables.ANIMALS, *tables.OBJECTS, *tables.COLOURS, *tables.FRUITS)
    words = [
        source.made_up() if source.chance(0.4) else source.choice(pool)
        for _ in range(source.integer(1, 6))
    ]
    text = " ".join(words)
    request = source.choice(("Repeat after me: {}", "Say this again: {}", 'Repeat: "{}"', "Say {}"))
    return Exchange("repetition", request.format(text), text, None)


def reading(source: Source) -> Exchange:
    """A short text about some people, and a question about one of them."""
    attribute = source.choice(
        (
            ("{0} lives in {1}.", "Where does {0} live?", "{0} lives in {1}.", source.city),
            ("{0} is {1} years old.", "How old is {0}?", "{0} is {1} years old.", source.age),
            ("{0} likes {1}.", "What does {0} like?", "{0} likes {1}.", source.of(tables.FOODS)),
            ("{0} works as a {1}.", "What is the job of {0}?", "{0} works as a {1}.",
             source.of(tables.JOBS)),
            ("The {1} belongs to {0}.", "What belongs to {0}?", "The {1} belongs to {0}.",
             source.of(tables.OBJECTS)),
            ("The code of {0} is {1}.", "What is the code of {0}?", "The code of {0} is {1}.",
             source.code),
        )
    )  # fmt: skip
    stated, question, answer, draw = attribute
    people: dict[str, str] = {}
    for _ in range(source.integer(2, 4)):
        name, value = source.together(source.name, draw)
        if value not in people.values():
            people[name] = value
    if source.chance(0.3):  # the other way round: from the value to the person
        way_back = {"Where": "Who lives in {1}?", "How": "Who is {1} years old?"}
        back = way_back.get(question.split()[0])
    else:
        back = None
    name = source.choice(list(people))
    text = " ".join(stated.format(who, what) for who, what in people.items())
    asked = (back or question).format(name, people[name])
    order = source.choice(("{text} {asked}", "Text: {text}\nQuestion: {asked}", "{text}\n{asked}"))
    return Exchange(
        "reading",
        order.format(text=text, asked=asked),
        answer.format(name, people[name]),
        name if back else people[name],
    )


def small_talk(source: Source) -> Exchange:
    asks, answers = source.choice(_SMALL_TALK)
    return Exchange("talk", _casual(source, source.choice(asks)), source.choice(answers), None)


def unknown(source: Source) -> Exchange:
    """A question that a model of this size cannot answer, and the honest answer."""
    word = source.made_up()
    if source.chance(0.3):
        question, answer = source.choice(
            (
                ("What is the capital of {}?", "I do not know the capital of {}."),
                ("What language do people speak in {}?", "I do not know the language of {}."),
                ("On which continent is {}?", "I do not know where {} is."),
            )
        )
        return Exchange(
            "unknown", question.format(word.capitalize()), answer.format(word.capitalize()), None
        )
    topic = source.choice((*_TOPICS, *tables.OBJECTS, *tables.INSTRUMENTS, word))
    question = source.choice(_UNKNOWN).format(topic)
    return Exchange("unknown", _casual(source, question), source.choice(_HONEST), None)


def _some(source: Source, things: tuple[str, ...], count: int) -> list[str]:
    """So many of the things: by the calendar, or by the alphabet."""
    chosen = source.sample(things, count)
    ordered = things in (tables.DAYS, tables.MONTHS)
    return sorted(chosen, key=things.index if ordered else str.lower)


def tables_number(value: int) -> str:
    """A number from two to seven in words."""
    return ("two", "three", "four", "five", "six", "seven")[value - 2]


def _facts() -> list[tuple[tuple[str, ...], str, str, str]]:
    """Every fact: the ways to ask, the sentence that answers, what is given, and the answer."""
    facts: list[tuple[tuple[str, ...], str, str, str]] = []

    def add(table: Mapping[str, str], ask: tuple[str, ...], tell: str) -> None:
        facts.extend((ask, tell, given, answer) for given, answer in table.items())

    add(
        tables.CAPITALS,
        (
            "What is the capital of {}?",
            "Which city is the capital of {}?",
            "What's the capital of {}?",
            "Tell me the capital of {}.",
            "Do you know the capital of {}?",
            "Name the capital of {}.",
            "capital of {}",
        ),
        "the capital of {} is {}.",
    )
    add(
        {city: country for country, city in tables.CAPITALS.items()},
        (
            "Which country has the capital {}?",
            "{} is the capital of which country?",
            "Of which country is {} the capital?",
        ),
        "{} is the capital of {}.",
    )
    add(
        tables.CONTINENTS,
        ("On which continent is {}?", "Which continent is {} in?", "What continent is {} on?"),
        "{} is in {}.",
    )
    add(
        tables.LANGUAGES,
        (
            "What language do people speak in {}?",
            "Which language is spoken in {}?",
            "What is the language of {}?",
        ),
        "people in {} speak {}.",
    )
    opposites = {
        **{after: before for before, after in tables.OPPOSITES.items()},
        **tables.OPPOSITES,
    }
    add(
        opposites,
        (
            "What is the opposite of {}?",
            "What's the opposite of {}?",
            "Tell me the opposite of {}.",
            "Which word is the opposite of {}?",
            "opposite of {}",
        ),
        "the opposite of {} is {}.",
    )
    add(
        tables.COLOURS_OF,
        (
            "What colour is {}?",
            "What color is {}?",
            "Tell me the colour of {}.",
            "Which colour is {}?",
        ),
        "{} is {}.",
    )
    add(
        {a(animal): sound for animal, sound in tables.SOUNDS.items()},
        ("What sound does {} make?", "How does {} sound?", "What does {} do to make a sound?"),
        "{} {}.",
    )
    add(
        {a(animal): a(young) for animal, young in tables.YOUNG.items()},
        (
            "What is the young of {} called?",
            "What do you call the young of {}?",
            "What is the baby of {}?",
        ),
        "the young of {} is called {}.",
    )
    add(
        {a(animal): home for animal, home in tables.HOMES.items()},
        ("Where does {} live?", "What is the home of {}?", "In what does {} live?"),
        "{} lives in {}.",
    )
    add(
        {a(animal): legs for animal, legs in tables.LEGS.items()},
        ("How many legs does {} have?", "How many legs has {}?", "Tell me how many legs {} has."),
        "{} has {} legs.",
    )
    add(
        tables.MAKERS,
        ("Who makes {}?", "Who or what makes {}?", "Tell me who makes {}."),
        "{} is made by {}.",
    )
    add(
        tables.USES,
        ("What is {} used for?", "What do you use {} for?", "What is {} for?"),
        "{} is for {}.",
    )
    add(tables.QUESTIONS, ("{}", "Tell me: {}", "I have a question. {}"), "{1}.")
    for order, unit in ((tables.DAYS, "day"), (tables.MONTHS, "month")):
        after = {value: order[(index + 1) % len(order)] for index, value in enumerate(order)}
        add(
            after,
            (f"Which {unit} comes after {{}}?", f"What {unit} comes after {{}}?",
             f"What {unit} follows {{}}?"),
            "{1} comes after {0}.",
        )  # fmt: skip
        add(
            {value: before for before, value in after.items()},
            (f"Which {unit} comes before {{}}?", f"What {unit} comes before {{}}?"),
            "{1} comes before {0}.",
        )
    return facts


_FACTS = _facts()

_FOLLOW_UPS = (
    (tables.CAPITALS, "What is the capital of {}?", "the capital of {} is {}."),
    (tables.LANGUAGES, "What language do people speak in {}?", "people in {} speak {}."),
    (tables.OPPOSITES, "What is the opposite of {}?", "the opposite of {} is {}."),
    (tables.COLOURS_OF, "What colour is {}?", "{} is {}."),
)

_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("animals", tables.ANIMALS),
    ("colours", tables.COLOURS),
    ("colors", tables.COLOURS),
    ("fruits", tables.FRUITS),
    ("vegetables", tables.VEGETABLES),
    ("jobs", tables.JOBS),
    ("foods", tables.FOODS),
    ("hobbies", tables.HOBBIES),
    ("cities", tables.CITIES),
    ("names", tables.NAMES),
    ("countries", tuple(country.removeprefix("the ") for country in tables.CAPITALS)),
    ("musical instruments", tables.INSTRUMENTS),
    ("instruments", tables.INSTRUMENTS),
    ("pets", tables.PETS),
    ("rooms", tables.ROOMS),
    ("months", tables.MONTHS),
    ("days", tables.DAYS),
)

_LIST_REQUESTS = (
    "List {number} {kind}.",
    "Give me a list of {number} {kind}.",
    "Name {number} {kind}.",
    "Can you list {number} {kind}?",
    "Tell me {number} {kind}.",
    "I need {number} {kind}.",
    "Write a list of {number} {kind}, please.",
    "Give me {number} {kind}.",
)

_JSON_REQUESTS = (
    "{text} Give me JSON with {keys}.",
    "{text} Write this as JSON with {keys}.",
    "Write a JSON object with {keys}: {text}",
    "Give me JSON with {keys}: {text}",
    "Give me a JSON object with the keys {keys}: {text}",
    "Make JSON with {keys} from this text: {text}",
    "Extract {keys} as JSON: {text}",
    "{text}\nReturn {keys} as a JSON object.",
    "Answer with JSON only. {text} I need {keys}.",
)

_SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "Hello!",
            "Hi!",
            "Hello",
            "Hi there!",
            "Hey!",
            "Good morning!",
            "Good evening!",
            "hello there",
        ),
        ("Hello! How can I help you?", "Hi! What can I do for you?"),
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "How is it going?"),
        ("I am fine, thank you. How can I help you?",),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "Are you human?",
        ),
        ("I am Corral's demo model, a very small language model.",),
    ),
    (
        (
            "What can you do?",
            "How can you help me?",
            "Help",
            "What do you know?",
            "What should I ask you?",
        ),
        (
            "I can answer simple questions, tell short stories, write lists and JSON, remember what "
            "you tell me, and call tools.",
        ),
    ),
    (
        ("Thank you!", "Thanks!", "Thanks a lot.", "Thank you very much.", "thx"),
        ("You are welcome!",),
    ),
    (("Goodbye!", "Bye!", "See you later.", "Good night!"), ("Goodbye! Have a nice day.",)),
    (
        ("Great!", "Very good.", "Well done!", "You are clever.", "Nice!"),
        ("Thank you! I am glad.",),
    ),
    (("OK", "Okay.", "I see.", "Alright."), ("What else can I do for you?",)),
    (("Sorry.", "I am sorry."), ("No problem!",)),
    (("Where do you live?", "Where are you?"), ("I live in this computer.",)),
    (("How old are you?", "When were you made?"), ("I am a program, so I have no age.",)),
    (("Who made you?", "Who trained you?"), ("The people who make Corral trained me.",)),
    (
        ("Do you like music?", "Do you like me?", "Are you happy?", "Do you have feelings?"),
        ("I am a program, so I have no feelings.",),
    ),
    (("I am sad.", "I feel lonely.", "I had a bad day."), ("I am sorry to hear that.",)),
    (("I am happy.", "I had a good day.", "I feel great."), ("I am glad to hear that!",)),
    (
        ("What is Corral?", "Tell me about Corral."),
        ("Corral is a server for language models that runs on CPU machines.",),
    ),
    (
        (
            "What is the weather like?",
            "What time is it?",
            "What day is it today?",
            "What's the news?",
        ),
        ("I cannot look that up: I have no tool for it.",),
    ),
)

_TOPICS = (
    "quantum physics", "politics", "the stock market", "love", "life", "Python", "the Roman Empire",
    "history", "mathematics", "black holes", "the economy", "philosophy", "football", "machine learning",
    "the internet", "cancer", "taxes", "the law", "art", "evolution", "money", "computers", "gravity",
    "a good film", "a new car", "my homework", "the French Revolution", "chemistry", "religion", "time",
)  # fmt: skip
_UNKNOWN = (
    "Explain {} to me.", "What do you think about {}?", "Why is {} important?", "Who invented {}?",
    "How does {} work?", "Can you help me with {}?", "What is the meaning of {}?", "Write a poem about {}.",
    "Write an essay about {}.", "What is the history of {}?", "Tell me everything about {}.",
    "What is the best book about {}?", "How do I learn more about {}?", "How much does {} cost?",
    "When did {} begin?", "Translate {} into French.", "What is {}?", "Write code for {}.",
    "Where can I find {}?", "Do you understand {}?", "Give me advice about {}.",
)  # fmt: skip
_HONEST = (
    "I am sorry, I do not know that. I am a very small model.",
    "I do not know that. I am a very small model.",
)


def _casual(source: Source, text: str) -> str:
    """The text as people also type it: in a hurry, or politely."""
    style = source.random.random()
    if style < 0.08:
        return text.lower()
    if style < 0.16:
        return text.rstrip("?.!")
    if style < 0.20:
        return text.lower().rstrip("?.!")
    if style < 0.26 and text.endswith("?"):
        return text[:-1] + ", please?"
    return text


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _join(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
