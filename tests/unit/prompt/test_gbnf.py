"""GBNF in llguidance's Lark: all that llama-server takes, with its meaning."""

from __future__ import annotations

import re

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve_app.prompt import gbnf

BYTES = LLTokenizer("byte")
# Source: llama.cpp, `grammars/json.gbnf` and `grammars/arithmetic.gbnf`.
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


def takes(source: str, text: str) -> bool:
    grammar = LLMatcher.grammar_from_lark(gbnf.lark(source))
    assert LLMatcher.validate_grammar(grammar) == ""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    encoded = list(text.encode())
    return matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("source", "text", "taken"),
    [
        ('root ::= ([0-9]+)? "x"', "12x", True),
        ('root ::= ([0-9]+)? "x"', "x", True),
        ('root ::= ("ab"+)*', "ababab", True),
        ('root ::= ("ab"+)*', "aba", False),
        ('root ::= ("a"{2}){2} "b"', "aaaab", True),
        ('root ::= ("a"{2}){2} "b"', "aaab", False),
        ('root ::= "a"{0} "b"', "b", True),
        ('root ::= "a"{0} "b"', "ab", False),
        ('root ::= "a"{0,0} "b"{1,}', "bb", True),
        ('root ::= "a"{ 1 , 2 }', "aa", True),
        ('root ::= "a"*?+', "aaa", True),
        ('root ::= "ab"+ | "x"', "abab", True),
        ('root ::= "a" ("b" | "bc") "cd"', "abcd", True),
        ('root ::= "a" ("b" | "bc") "cd"', "abccd", True),
        ('root ::= "" | "x"', "", True),
        ('root ::= | "x"', "", True),
        ('root ::= . [^\\n] "\\n"', "\nx\n", True),
        ('root ::= "\\u00e9" [\\U0001F600-\\U0001F64F]', "é😀", True),
        ("root ::= [\\x61-\\x63]+", "abc", True),
        ("root ::= [^a-c]", "b", False),
        ("root ::= [a-]+", "-a", True),
        ("root ::= [\\-a]+", "-a", True),
        ('root ::= "\\[\\]\\"\\\\" ["/\\\\]', '[]"\\/', True),
        ('root ::= "a"\r\n# a comment\r\n', "a", True),
        ('root ::=\n  "a" # a comment\nb ::= "b"', "a", True),
        ('root ::= ("a" |\n  "b"\n) "c"', "bc", True),
        ('root ::= foo Foo\nfoo ::= "a" | "(" foo ")"\nFoo ::= "b" | "<" Foo ">"', "(a)<<b>>", True),
        ('root ::= a-b "c"\na-b ::= "x" a-b? "y"', "xxyyc", True),
        ('root ::= start\nstart ::= "a" | start "b"', "abb", True),
        ('root ::= root1\nroot1 ::= "a" root2*\nroot2 ::= "," root1', "a,a,a", True),
        ('root ::= ws "\\n" | "(" root ")"\nws ::= [ \\n]*', "((\n\n))", True),
        ('root ::= word " "? word | "(" root ")"\nword ::= [a-z]+', "(ab cd)", True),
        (JSON, '{"a": [1, -2.5e3, "\\u00e9\\n", {}, null], "b": {"c": true}}', True),
        (JSON, '{"a": 01}', False),
        (ARITHMETIC, "(x1 +2)*y =3\n", True),
        (ARITHMETIC, "x +\n", False),
    ],
)  # fmt: skip
def test_what_llama_server_takes(source: str, text: str, taken: bool) -> None:
    assert takes(source, text) is taken


def test_a_token_is_llguidances() -> None:
    assert "rule_0: (<[7]> <[^8]> <think>)" in gbnf.lark("root ::= <[7]> !<[8]> <think>")


def test_a_large_rule_is_made_of_smaller_lexemes() -> None:
    source = 'root ::= item{500}\nitem ::= "a" "b" "c" [0-9]'
    assert "rule_0: (LEXEME_0){500,500}" in gbnf.lark(source)
    assert takes(source, "abc1" * 500)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('root ::= "a" )', "line 1, column 14: expected a new line, or a part of a rule"),
        ('root ::= ("a"', "line 1, column 14: expected ')'"),
        ('x ::= "a"', "there is no rule 'root', which a grammar begins with"),
        ("", "there is no rule 'root', which a grammar begins with"),
        ('x ::= "a"\nroot ::= x y', "line 2, column 12: there is no rule 'y'"),
        ('root ::= "a', "line 1, column 10: the grammar ends within a text or a class of characters"),
        ("root ::= *", "line 1, column 10: expected something before '*'"),
        ('root ::= "\\q"', "line 1, column 10: unknown escape '\\q'"),
        ('root ::= "\\u12"', "line 1, column 10: unknown escape '\\u'"),
        ('root ::= "\\uD800"', "line 1, column 10: there is no character D800"),
        ('root ::= "a"{3,1}', "line 1, column 13: a part cannot be repeated 3 to 1 times"),
        ('root ::= "a"{2001}', "line 1, column 13: a part cannot be repeated 2001 to 2001 times"),
        ("root ::= [z-a]", "line 1, column 10: the range of characters ends before it begins"),
        ('root = "a"', "line 1, column 6: expected '::='"),
        ("root ::= " + "(" * 65, "line 1, column 74: groups are nested deeper than 64 levels"),
        ('root ::= "a"' + "?" * 65, "line 1, column 77: a part is repeated more than 64 times over"),
    ],
)  # fmt: skip
def test_errors_say_where(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        gbnf.lark(source)
