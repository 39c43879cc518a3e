"""Grammars and schemas that take long to compile, to follow or to parse."""

from __future__ import annotations

import json
from typing import Any

from loadtests.hostile import bodies
from loadtests.hostile.attack import Attack
from loadtests.hostile.scene import Scene, Shot

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REGEXES = (
    "(a|a)*" * 50 + "b",
    "((((((a*)*)*)*)*)*)*b",
    "(a{1,1000}){1,1000}",
    "((a{0,100}){0,100}){0,100}",
    "(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)x",
    "(x+x+)+y",
    "[a-z]*" * 2000,
    ".{100000}",
    "(" * 50_000 + ")" * 50_000,
    "|".join(f"{number:x}" for number in range(200_000)),
)
GRAMMARS = (
    'root ::= "a"{1,1000000}',
    'root ::= (("a"{0,1000}){0,1000}){0,1000}',
    "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)), 'r60 ::= "a"']),
    'root ::= root root | root | "a"',
    "root ::= " + " | ".join(f'"{number}"' for number in range(200_000)),
    "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} | r{i + 2}" for i in range(20_000))]),
)
_PATTERN = {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}
_LONG_CALL = {"type": "object", "properties": {"q": {"type": "string", "minLength": 3000}}}


def schemas() -> list[dict[str, Any]]:
    """JSON schemas, each a trap of its own kind."""
    return [
        {"enum": [f"{number:08d}" for number in range(400_000)]},
        {"type": "string", "minLength": 1_000_000, "maxLength": 2_000_000},
        bodies.refs_schema(64),
        bodies.doubling_schema(16),
        {"type": "object", "properties": {f"p{i}": _PATTERN for i in range(20_000)}},
        {"type": "object", "required": [f"p{i}" for i in range(100_000)]},
        {"allOf": [{"type": "object", "properties": {f"p{i}": _PATTERN}} for i in range(5_000)]},
        {"type": "array", "items": _PATTERN, "minItems": 1_000_000},
    ]


def _asking(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 16, **fields}).encode()


def _regexes(scene: Scene) -> None:
    scene.fire((Shot(COMPLETIONS, _asking(regex=one), "mallory") for one in REGEXES), at_once=4)


def _grammars(scene: Scene) -> None:
    scene.fire((Shot(COMPLETIONS, _asking(grammar=one), "mallory") for one in GRAMMARS), at_once=4)


def _json_schemas(scene: Scene) -> None:
    made = (Shot(COMPLETIONS, _asking(json_schema=one), "mallory") for one in schemas())
    scene.fire(made, at_once=4)


def _tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _tools(scene: Scene) -> None:
    small = {"type": "object", "properties": {f"p{i}": _PATTERN for i in range(20)}}
    many = [_tool(f"f{i}", small) for i in range(3_000)]
    deep = [_tool("f", bodies.refs_schema(64)), _tool("g", bodies.doubling_schema(14))]
    user = [{"role": "user", "content": "a"}]
    scene.fire(
        Shot(
            CHAT,
            json.dumps({"messages": user, "max_tokens": 16, "tools": tools} | choice).encode(),
            "mallory",
        )
        for tools in (many, deep)
        for choice in ({"tool_choice": "required"}, {"parallel_tool_calls": False})
    )


def _long_calls(scene: Scene) -> None:
    """Forced calls with arguments of thousands of characters, streamed: each delta is one more to parse."""
    _stream(scene, tools=[_tool("f", _LONG_CALL)], tool_choice="required")


def _long_answers(scene: Scene) -> None:
    """Answers as long, of which nothing is parsed, from their middle on."""
    _stream(scene, "word " * 1500, ignore_eos=True)


def _stream(scene: Scene, text: str = "Call f.", **fields: Any) -> None:
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 3000 - len(text.split()), "stream": True} | fields
    scene.fire([Shot(CHAT, json.dumps(body).encode(), "mallory")] * 4, at_once=4)


_COMPILED = "What takes too long or too much to compile is refused; others do not wait for it."
ATTACKS = (
    *(
        Attack(
            name=name,
            family="grammar",
            what=what,
            expects=_COMPILED,
            act=act,
            seconds=25.0,
            is_short=name == "regular expressions",
        )
        for name, what, act in (
            ("regular expressions", "Alternatives and repeats that multiply.", _regexes),
            (
                "grammars",
                "Repeats of a million, rules that double 60 times, left recursion.",
                _grammars,
            ),
            (
                "JSON schemas",
                "400,000 values, 64 levels of references, 20,000 patterns.",
                _json_schemas,
            ),
            ("many tools", "3,000 functions, and ones whose schemas double.", _tools),
        )
    ),
    Attack(
        name="long tool calls",
        family="grammar",
        what="Four streams whose forced calls have arguments of 3,000 characters.",
        expects="Honest users notice no more than of answers as long without a call.",
        act=_long_calls,
        seconds=20.0,
        beside=_long_answers,
    ),
)
