"""Functions that the model may call, and conversations in which it calls them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tools.builtin_model.corpus import tables
from tools.builtin_model.corpus.source import Source

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One use of a tool: what the user says, the call, its result, and the answer told from it."""

    tool: Mapping[str, Any]
    """The function as the `tools` of a request describe it."""
    user: str
    arguments: Arguments
    result: Mapping[str, Any]
    answer: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A kind of function; each conversation has its own names for it and its parameters."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: Mapping[str, tuple[str, tuple[str, ...]]]
    """Parameter to its JSON type and the names it goes by."""
    ask: tuple[str, ...]
    draw: Callable[[Source], Arguments]
    result: Callable[[Source, Arguments], tuple[dict[str, Any], str]]
    """The function's result for these arguments, and the assistant's answer to it."""

    def described(self, source: Source) -> tuple[dict[str, Any], dict[str, str]]:
        """A description as an OpenAI tool, and the name of each parameter in it."""
        naming = {key: source.choice(names) for key, (_, names) in self.parameters.items()}
        wordy = source.chance(0.4)
        properties = {}
        for key, (kind, _) in self.parameters.items():
            if kind == "integer" and source.chance(0.25):
                kind = "number"
            properties[naming[key]] = {"type": kind}
            if wordy:
                properties[naming[key]]["description"] = f"The {naming[key].replace('_', ' ')}"
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if source.chance(0.8):
            schema["required"] = [*properties]
        function: dict[str, Any] = {"name": source.choice(self.names)}
        if source.chance(0.9):
            function["description"] = source.choice(self.descriptions)
        function["parameters"] = schema
        return {"type": "function", "function": function}, naming

    def use(self, source: Source, tool: Mapping[str, Any], naming: Mapping[str, str]) -> Call:
        """One use of the function so described."""
        values = self.draw(source)
        result, answer = self.result(source, values)
        return Call(
            tool,
            source.choice(self.ask).format_map(values),
            {naming[key]: value for key, value in values.items()},
            result,
            answer,
        )


def _city(source: Source) -> Arguments:
    city, _ = source.together(source.city, lambda: "city")
    return {"city": city}


def _weather(source: Source, values: Arguments) -> tuple[dict[str, Any], str]:
    degrees = source.integer(-9, 39)
    sky = source.choice(("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "stormy", "clear"))
    result = {"temperature": degrees, "condition": sky}
    if source.chance(0.5):
        result = {"city": values["city"], **result}
    return result, f"It is {sky} in {values['city']}, at {degrees} degrees."


def _time(source: Source, values: Arguments) -> tuple[dict[str, Any], str]:
    clock = f"{source.integer(0, 23):02d}:{source.integer(0, 59):02d}"
    return {"time": clock}, f"It is {clock} in {values['city']}."


def _two_numbers(source: Source) -> Arguments:
    a, b = source.together(source.code, source.age)
    return {"a": int(a), "b": int(b)}


def _sum(source: Source, values: Arguments) -> tuple[dict[str, Any], str]:
    total = values["a"] + values["b"]
    return {"result": total}, f"{values['a']} plus {values['b']} is {total}."


def _product(source: Source, values: Arguments) -> tuple[dict[str, Any], str]:
    product = values["a"] * values["b"]
    return {"result": product}, f"{values['a']} times {values['b']} is {product}."


def _minutes(source: Source) -> Arguments:
    minutes, _ = source.together(source.age, lambda: "minutes")
    return {"minutes": int(minutes)}


def _timer(source: Source, values: Arguments) -> tuple[dict[str, Any], str]:
    return {"status": "ok"}, f"The timer is set for {values['minutes']} minutes."


_TEXTS = (
    "see you at noon", "I am late", "happy birthday", "the train is late", "dinner is ready",
    "call me back",
    "the meeting is over", "I am at home", "good luck", "where are you", "I found the key", "thank you",
    "the door is open", "it is raining", "we won the game", "please bring bread", "I will come tomorrow",
)  # fmt: skip


def _message(source: Source) -> Arguments:
    name, text = source.together(source.name, source.of(_TEXTS))
    return {"to": name, "text": text}


def _sent(source: Source, values: Arguments) -> tuple[dict[str, Any], str]:
    return {"status": "sent"}, f"I sent your message to {values['to']}."


def _query(source: Source) -> Arguments:
    colour, thing = source.together(source.of(tables.COLOURS), source.of(tables.OBJECTS))
    return {"query": f"{colour} {tables.plural(thing)}" if source.chance(0.6) else thing}


def _found(source: Source, values: Arguments) -> tuple[dict[str, Any], str]:
    count = source.integer(2, 99)
    return {"count": count}, f"I found {count} results for {values['query']}."


def _item(source: Source) -> Arguments:
    item, _ = source.together(
        source.of((*tables.OBJECTS, *tables.INSTRUMENTS, *tables.FRUITS)), lambda: "item"
    )
    return {"item": item}


def _price(source: Source, values: Arguments) -> tuple[dict[str, Any], str]:
    price = source.integer(1, 400)
    return {"price": price}, f"The {values['item']} costs {price} dollars."


def _table(source: Source) -> Arguments:
    name, people, hour = source.together(
        source.name, lambda: str(source.integer(2, 12)), lambda: f"{source.integer(11, 22)}:00"
    )
    return {"name": name, "people": int(people), "time": hour}


def _booked(source: Source, values: Arguments) -> tuple[dict[str, Any], str]:
    answer = f"The table for {values['people']} at {values['time']} is booked for {values['name']}."
    return {"status": "booked"}, answer


def _light(source: Source) -> Arguments:
    room, state = source.together(source.of(tables.ROOMS), source.of(("on", "off", "on ", "off ")))
    return {"room": room, "state": state.strip()}


def _lit(source: Source, values: Arguments) -> tuple[dict[str, Any], str]:
    return {"status": "ok"}, f"The light in the {values['room']} is {values['state']}."


def _person(source: Source) -> Arguments:
    name, _ = source.together(source.name, lambda: "person")
    return {"name": name}


def _phone(source: Source, values: Arguments) -> tuple[dict[str, Any], str]:
    number = source.code() + source.code()
    return {"phone": number}, f"The phone number of {values['name']} is {number}."


_PLACE = ("string", ("city", "city", "location", "place"))
_FIRST = ("integer", ("a", "a", "x", "first"))
_SECOND = ("integer", ("b", "b", "y", "second"))

TOOLS: tuple[Tool, ...] = (
    Tool(
        ("get_weather", "get_weather", "weather", "get_current_weather"),
        ("Get the weather of a city", "Get the current weather", "Weather in a given place"),
        {"city": _PLACE},
        ("What is the weather in {city}?", "How is the weather in {city}?", "Is it warm in {city}?",
         "What's the weather like in {city}?", "Tell me the weather in {city}.", "weather in {city}",
         "What is the weather like in {city} today?"),
        _city,
        _weather,
    ),
    Tool(
        ("get_time", "get_time", "current_time", "get_current_time"),
        ("Get the time in a city", "Current time in a place"),
        {"city": _PLACE},
        ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"),
        _city,
        _time,
    ),
    Tool(
        ("add", "add_numbers", "sum"),
        ("Add two numbers", "The sum of two integers"),
        {"a": _FIRST, "b": _SECOND},
        ("What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?", "Work out {a} plus {b}."),
        _two_numbers,
        _sum,
    ),
    Tool(
        ("multiply", "multiply_numbers", "product"),
        ("Multiply two numbers", "The product of two integers"),
        {"a": _FIRST, "b": _SECOND},
        ("What is {a} times {b}?", "Multiply {a} by {b}.", "How much is {a} * {b}?"),
        _two_numbers,
        _product,
    ),
    Tool(
        ("set_timer", "start_timer", "timer"),
        ("Set a timer", "Start a timer for some minutes"),
        {"minutes": ("integer", ("minutes", "minutes", "duration"))},
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
         "Wake me in {minutes} minutes.", "timer {minutes} minutes"),
        _minutes,
        _timer,
    ),
    Tool(
        ("send_message", "send_text", "message"),
        ("Send a message to somebody", "Send a text message"),
        {"to": ("string", ("to", "recipient", "name")), "text": ("string", ("text", "message", "body"))},
        ("Send {to} the message: {text}", 'Tell {to} "{text}".', "Write to {to}: {text}",
         'Send a message to {to} that says "{text}".'),
        _message,
        _sent,
    ),
    Tool(
        ("search", "web_search", "search_web"),
        ("Search the web", "Look something up"),
        {"query": ("string", ("query", "query", "text"))},
        ("Search for {query}.", "Look up {query}.", "Search the web for {query}.",
         "Find {query} on the web."),
        _query,
        _found,
    ),
    Tool(
        ("get_price", "price", "find_price"),
        ("Get the price of a thing", "What something costs"),
        {"item": ("string", ("item", "item", "product"))},
        ("How much is the {item}?", "What does the {item} cost?", "Tell me the price of the {item}.",
         "What is the price of the {item}?"),
        _item,
        _price,
    ),
    Tool(
        ("book_table", "reserve_table", "book"),
        ("Book a table in a restaurant", "Reserve a table"),
        {
            "name": ("string", ("name", "guest")),
            "people": ("integer", ("people", "guests", "seats")),
            "time": ("string", ("time", "time", "hour")),
        },
        ("Book a table for {people} at {time} in the name of {name}.",
         "I need a table at {time} for {people} people, the name is {name}.",
         "Reserve a table for {name}, {people} people, {time}."),
        _table,
        _booked,
    ),
    Tool(
        ("set_light", "switch_light", "light"),
        ("Turn a light on or off", "Switch the light of a room"),
        {"room": ("string", ("room", "room", "place")), "state": ("string", ("state", "state", "value"))},
        ("Turn {state} the light in the {room}.", "Switch the {room} light {state}.",
         "Please turn the light in the {room} {state}."),
        _light,
        _lit,
    ),
    Tool(
        ("get_phone_number", "find_contact", "phone_number"),
        ("Get the phone number of a person", "Look up a contact"),
        {"name": ("string", ("name", "person"))},
        ("What is the phone number of {name}?", "Find the phone number of {name}.",
         "I need the number of {name}."),
        _person,
        _phone,
    ),
)  # fmt: skip


class Toolbox:
    """The tools that one conversation offers."""

    def __init__(self, source: Source, count: int) -> None:
        self._source = source
        self._offered: list[tuple[Tool, dict[str, Any], dict[str, str]]] = []
        for tool in source.sample(TOOLS, count):
            described, naming = tool.described(source)
            self._offered.append((tool, described, naming))

    @property
    def described(self) -> list[dict[str, Any]]:
        return [described for _, described, _ in self._offered]

    def call(self) -> Call:
        """One use of one of the tools."""
        tool, described, naming = self._source.choice(self._offered)
        return tool.use(self._source, described, naming)

    def calls_of_one_tool(self) -> tuple[Call, Call] | None:
        """Two uses of a tool that takes one place or name, to be asked for in one turn; None if
        there is no such tool."""
        fitting = [entry for entry in self._offered if entry[0].draw in (_city, _person)]
        if not fitting:
            return None
        tool, described, naming = self._source.choice(fitting)
        first, second = (tool.use(self._source, described, naming) for _ in range(2))
        (value,), (other,) = first.arguments.values(), second.arguments.values()
        if value == other:
            return None
        key = next(iter(tool.parameters))
        asked = self._source.choice(tool.ask).format_map({key: f"{value} and {other}"})
        return Call(described, asked, first.arguments, first.result, first.answer), second

    def missing(self) -> str:
        """A wish that none of the tools can grant."""
        used = [tool for tool, _, _ in self._offered]
        tool = self._source.choice([tool for tool in TOOLS if tool not in used])
        return self._source.choice(tool.ask).format_map(tool.draw(self._source))


def call_message(calls: tuple[Call, ...]) -> dict[str, Any]:
    """The assistant's turn that makes these calls, as chat templates read it."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": call.tool["function"]["name"], "arguments": call.arguments},
            }
            for call in calls
        ],
    }


def result_message(call: Call) -> dict[str, Any]:
    """The tool's turn with the call's result."""
    return {"role": "tool", "content": json.dumps(call.result)}
