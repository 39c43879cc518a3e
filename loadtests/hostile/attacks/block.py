"""Bodies that take long to read, to check, to render or to tokenize."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from loadtests.hostile import bodies
from loadtests.hostile.attack import KEYED, Attack
from loadtests.hostile.bodies import FULL
from loadtests.hostile.scene import Scene, Shot

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "a"}]
SHORT = frozenset({"negative ids", "brackets", "tool arguments", "detokenize"})
_MEGABYTE = 900_000

Make = Callable[[], Sequence[tuple[str, bytes]]]
"""Makes the paths and bodies, when they are needed."""


def _message(**fields: Any) -> list[dict[str, Any]]:
    return [USER[0], {"role": "assistant", **fields}, USER[0]]


def _call(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return _message(content="", tool_calls=[call])


def _in_chat(messages: Any) -> bytes:
    return json.dumps({"messages": messages, "max_tokens": 1}).encode()


def _kwargs(value: Any) -> bytes:
    return json.dumps({"messages": USER, "chat_template_kwargs": value, "max_tokens": 1}).encode()


BODIES: dict[str, tuple[str, Make]] = {
    "negative ids": (
        "900 KB of -1 as prompt.",
        lambda: [(COMPLETIONS, bodies.listed({}, "prompt", "-1", _MEGABYTE))] * 4,
    ),
    "brackets": (
        "8 MiB of `[]`, flat, as messages, and 4,000,000 levels deep.",
        lambda: [
            (CHAT, bodies.listed({}, "messages", "[]")),
            (COMPLETIONS, bodies.listed({}, "prompt", "[]")),
            (CHAT, b"[" * FULL),
            (CHAT, bodies.nested({}, "messages", 100)),
        ],
    ),
    "keys": (
        "8 MiB of keys: all different, all the same, all unknown.",
        lambda: [
            (CHAT, bodies.keyed()),
            (CHAT, bodies.keyed(distinct=False)),
            (CHAT, b'{"logit_bias":' + bodies.keyed(_MEGABYTE * 7) + b"}"),
        ],
    ),
    "numbers": (
        "Numbers of 4,000 and of 8,000,000 digits, and exponents without end.",
        lambda: [
            (COMPLETIONS, bodies.listed({}, "prompt", "9" * 4000)),
            (COMPLETIONS, b'{"max_tokens":' + b"9" * FULL + b"}"),
            (COMPLETIONS, bodies.listed({}, "prompt", "1e999999")),
            (COMPLETIONS, bodies.listed({}, "prompt", "1.0000000000000001")),
        ],
    ),
    "mixed prompt parts": (
        "8 MiB of prompts, each of ids and texts in turn.",
        lambda: [
            (path, bodies.listed({"max_tokens": 1, "n_predict": 1}, "prompt", item))
            for path in ("/completion",)
            for item in ('1,"a"', '["a",1]', '[1,"a"],"a"')
        ],
    ),
    "template arguments": (
        "chat_template_kwargs of 8 MiB, wide and deep, and ones that replace what the template uses.",
        lambda: [
            (CHAT, _kwargs({"a": "a " * (FULL // 2)})),
            (CHAT, _kwargs({"a": bodies.wide_and_deep()})),
            (CHAT, _kwargs({"messages": bodies.turns(200_000)})),
            (CHAT, _kwargs({"tools": bodies.turns(200_000)})),
            (CHAT, _kwargs({"chat_template": "{% for a in range(10**9) %}a{% endfor %}"})),
        ],
    ),
    "tool arguments": (
        "Tool calls' arguments of 7 MiB: one text, many keys, deep, and no JSON.",
        lambda: [
            (CHAT, _in_chat(_call(json.dumps({"q": "a " * (FULL // 2 - 64)})))),
            (CHAT, _in_chat(_call(bodies.keyed(FULL // 2).decode()))),
            (CHAT, _in_chat(_call(json.dumps({"q": bodies.wide_and_deep(FULL // 2)})))),
            (CHAT, _in_chat(_call("[" * (FULL - 512)))),
        ],
    ),
    "reasoning": (
        "reasoning_content of 8 MiB, in one turn and in 18,000.",
        lambda: [
            (CHAT, _in_chat(_message(content="a", reasoning_content="a " * (FULL // 2)))),
            (CHAT, _in_chat(_message(content="a", reasoning_content="a" * 300) * 18_000)),
            (CHAT, _in_chat(_message(content="a", reasoning_content="<think>" * 1_000_000))),
        ],
    ),
    "detokenize": (
        "/detokenize with 4,000,000 ids, and with ids that are none.",
        lambda: [
            ("/detokenize", bodies.listed({}, "tokens", "7")),
            ("/detokenize", bodies.listed({}, "tokens", "-7")),
            ("/detokenize", bodies.listed({}, "tokens", "123456789012")),
        ],
    ),
    "tokenize": (
        "/tokenize with 8 MiB, and the pieces of all of it.",
        lambda: [
            ("/tokenize", bodies.filled({"with_pieces": True}, "content", "The fox. ")),
            ("/tokenize", bodies.filled({"with_pieces": True}, "content", "é中🦊")),
            ("/tokenize", bodies.filled({"parse_special": True}, "content", "<|im_start|>")),
        ],
    ),
    "apply-template": (
        "/apply-template with 100,000 turns, and with one of 8 MiB.",
        lambda: [
            ("/apply-template", json.dumps({"messages": bodies.turns(100_000)}).encode()),
            ("/apply-template", bodies.filled({}, "messages", "a")),
            ("/apply-template", json.dumps({"messages": _call('{"a": 1}') * 20_000}).encode()),
        ],
    ),
    "turns": (
        "Chats of 100,000 turns, and turns of 1,000,000 parts, on each API.",
        lambda: [
            (CHAT, _in_chat(bodies.turns(100_000))),
            ("/v1/messages", _in_chat(bodies.turns(100_000))),
            ("/v1/responses", json.dumps({"input": bodies.turns(100_000)}).encode()),
            (
                CHAT,
                _in_chat([{"role": "user", "content": [{"type": "text", "text": "a"}] * 200_000}]),
            ),
        ],
    ),
    "delimiters": (
        "8 MiB of control tokens that are spelled out, of escapes, and of halves of surrogate pairs.",
        lambda: [
            (CHAT, _in_chat([{"role": "user", "content": "<|im_start|>" * (FULL // 12 - 16)}])),
            (COMPLETIONS, b'{"prompt":"' + b"\\ud83e\\udd8a" * (FULL // 12) + b'"}'),
            (COMPLETIONS, b'{"prompt":"' + b"\\ud83e" * (FULL // 6) + b'"}'),
            (COMPLETIONS, b'{"prompt":"' + b"\\u0000" * (FULL // 6) + b'"}'),
        ],
    ),
    "names": (
        "8 MiB as `model`, as `user`, as `metadata`, as the name of a field, and of blanks.",
        lambda: [
            (COMPLETIONS, bodies.filled({"prompt": "a", "max_tokens": 1}, "model", "a")),
            (COMPLETIONS, bodies.filled({"prompt": "a", "max_tokens": 1}, "user", "a")),
            (COMPLETIONS, json.dumps({"prompt": "a", "a" * FULL: 1}).encode()),
            (COMPLETIONS, b" " * FULL + b"{}"),
        ],
    ),
    "stops and biases": (
        "100,000 entries of logit_bias, 1,000,000 stops, and one stop of 8 MiB.",
        lambda: [
            (
                COMPLETIONS,
                b'{"prompt":"a","max_tokens":8,"logit_bias":' + bodies.keyed(1_200_000) + b"}",
            ),
            (COMPLETIONS, bodies.listed({"prompt": "a", "max_tokens": 64}, "stop", '"abc"')),
            (COMPLETIONS, bodies.filled({"prompt": "a", "max_tokens": 64}, "stop", "ab")),
        ],
    ),
    "embedded texts": (
        "2,048 texts of 4 KB to embed, each too long, and 4,000,000 ids.",
        lambda: [
            ("/v1/embeddings", json.dumps({"input": ["a " * 2000] * 2048}).encode()),
            ("/v1/embeddings", bodies.listed({}, "input", "1")),
            ("/v1/embeddings", bodies.listed({}, "input", "[-1]")),
        ],
    ),
}


def _firing(make: Make) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        scene.fire((Shot(path, body, "mallory") for path, body in make()), at_once=1)

    return act


ATTACKS = tuple(
    Attack(
        name=name,
        family="block",
        what=what,
        expects="The event loop goes on; the answer is a 400 or what was asked for.",
        act=_firing(make),
        server=KEYED,
        seconds=25.0,
        is_short=name in SHORT,
    )
    for name, (what, make) in BODIES.items()
)
