"""Patterns of JSON schemas: what JavaScript means by them is what a grammar holds."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve_app.prompt import json_schemas
from serve_app.prompt.json_schemas import SchemaError, fit

BYTES = LLTokenizer("byte")


def holds(pattern: str, text: str) -> bool:
    schema = fit({"type": "string", "pattern": pattern}, is_strict=True)
    assert schema.loosened == ()
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps(schema.schema), overrides=json_schemas.options()
    )
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    encoded = list(json.dumps(text, ensure_ascii=False).encode())
    return matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        ("^[a&&b]+$", ["a&b"], ["c"]),
        ("^[[a]+$", ["[a"], ["]"]),
        ("^[^[]$", ["a"], ["["]),
        ("^[a~~b]$", ["~"], ["c"]),
        ("^[+--]$", ["+", ",", "-"], ["."]),
        ("^[!--x]$", ['"', "-", "x"], ["."]),
        (r"^[\w.&&-]+$", ["a.&-"], ["/"]),
        ("^[a-z&&[^b]]$", ["a]", "&]"], ["a"]),
        ("^[[:alpha:]]$", ["a]", ":]"], ["b]", "a"]),
        (r"^[a-\d]$", ["a", "-", "5"], ["b"]),
        (r"^[\]\[]$", ["[", "]"], [","]),
        ("^[^]$", ["\n", "x"], [""]),
        (r"^[\b]$", ["\b"], ["b"]),
        ("^(?i:a)b$", ["Ab", "ab"], ["AB"]),
        ("^.$", ["x", "é"], ["\n", "\r", "\u2028"]),
        ("^a{,3}$", ["a{,3}"], ["aa"]),
        ("^{a}]$", ["{a}]"], ["a"]),
        ("^a{2,3}?$", ["aa", "aaa"], ["a"]),
        (r"^\z\A\<\/\e$", ["zA</e"], [""]),
        (r"^\pL$", ["pL"], ["é"]),
        (r"^\p{L}$", ["é"], ["1"]),
        (r"^\cA\0\x41\u0042\u{43}$", ["\x01\0ABC"], [""]),
        (r"^\uD83D\uDE00+$", ["😀😀"], ["😁"]),
        (r"^\$\d+\.\d{2}$", ["$1.20"], ["1.20", "$1,20"]),
        ("^(?P<n>a)(?<m>b)$", ["ab"], ["a"]),
        ("(?:)b", ["abc"], ["ac"]),
    ],
)
def test_a_pattern_means_what_it_does_in_javascript(
    pattern: str, taken: list[str], refused: list[str]
) -> None:
    assert [text for text in taken if not holds(pattern, text)] == []
    assert [text for text in refused if holds(pattern, text)] == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?i)^a$", "no pattern of JavaScript has '(?i)'"),
        ("(?>a)", "unrecognized flag"),
        ("x*+", "no pattern of JavaScript has '*+'"),
        ("*x", "repetition operator missing expression"),
        ("[z-a]", "invalid character class range, the start must be <= the end"),
        ("[a", "unclosed character class"),
        ("a\\", r"no pattern of JavaScript has '\\'"),
    ],
)
def test_what_is_no_pattern_of_javascript(pattern: str, message: str) -> None:
    with pytest.raises(SchemaError) as refused:
        fit({"type": "string", "pattern": pattern}, is_strict=True)
    assert str(refused.value) == f"pattern: {message}"
    loosened = fit({"type": "string", "pattern": pattern}, is_strict=False)
    assert loosened.loosened == ("pattern",)
    assert "pattern" not in loosened.schema


def test_patterns_of_names() -> None:
    schema = {"type": "object", "patternProperties": {"^[a&&b]$": {"type": "integer"}}}
    held = fit(schema, is_strict=True)
    assert held.loosened == ()
    assert [*held.schema["patternProperties"].values()] != []
    wrong = {"type": "object", "patternProperties": {"(?i)a": {"type": "integer"}}}
    assert fit(wrong, is_strict=False).loosened == ("patternProperties.(?i)a",)
