"""Translates GBNF, llama.cpp's grammars, into llguidance's Lark.

llguidance's lexer takes all characters that a lexeme can have. So parts of rules are lexemes only where
nothing that follows them could go on with them, and all others stay rules of single characters. Only
literals of two alternatives that begin alike may exclude a text that llama.cpp takes.

Source: llama.cpp, `src/llama-grammar.cpp`, and the syntax chapter of llguidance's documentation.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from serve_app.prompt.json_schemas import MAX_LITERAL_CHARS

MOST_REPETITIONS = 2000
"""llama.cpp's bound: a smaller number of repetitions is refused above it, and a larger one is no bound."""
MOST_DEPTH = 64
"""The deepest nesting of groups, and of rules within a lexeme."""
MOST_LEXEME_PARTS = 2000
"""The most parts of a lexeme, repetitions counted: a larger rule stays a rule of smaller lexemes."""
_NAME, _INTEGER = re.compile(r"[a-zA-Z0-9_-]+"), re.compile(r"[0-9]+")
_BLANKS, _LINES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]-'}}
_TOKEN = re.compile(r"(!?)<\[([0-9]+)\]>|<[^\s<>\[]+>")
_REPETITIONS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_LAST_CHARACTER = 0x10FFFF
_EVERY_CHARACTER = ((0, _LAST_CHARACTER),)


@dataclass(frozen=True, slots=True)
class _Expression:
    kind: Literal["literal", "class", "token", "rule", "sequence", "choice", "repeat"]
    text: str = ""
    """The literal, the token in Lark, or the name of the rule."""
    ranges: tuple[tuple[int, int], ...] = ()
    """The characters of a class, by the first and the last one of each range."""
    parts: tuple[_Expression, ...] = ()
    least: int = 1
    most: int | None = 1


class _Alphabet:
    """Sets of characters as bits: each stands for characters that the grammar does not tell apart."""

    def __init__(self, bodies: Iterable[_Expression]) -> None:
        starts = {0}
        nodes = list(bodies)
        while nodes:
            node = nodes.pop()
            nodes += node.parts
            for first, last in node.ranges:
                starts |= {first, last + 1}
            if node.kind == "literal":
                starts |= {place for char in node.text for place in (ord(char), ord(char) + 1)}
        self._starts = sorted(starts)

    def of(self, first: int, last: int) -> int:
        """The set of the characters from one to another."""
        low = bisect_left(self._starts, first)
        return (1 << bisect_left(self._starts, last + 1)) - (1 << low)


class _GbnfRules:
    """The rules of a grammar, with what can begin and follow each."""

    def __init__(self, bodies: dict[str, _Expression]) -> None:
        self._bodies = bodies
        self._alphabet = _Alphabet(bodies.values())
        self._numbers = {name: i for i, name in enumerate(bodies)}
        self._sizes: dict[str, int | None] = {}
        self._first = dict.fromkeys(bodies, 0)
        self._nullable = dict.fromkeys(bodies, False)
        self._follow = dict.fromkeys(bodies, 0)
        self._lexemes: dict[str, str] = {}
        """The names of lexemes, by what they are."""
        self._fill()

    def lark(self) -> str:
        rules = [
            f"rule_{self._numbers[name]}: {self._as_rule(body, self._follow[name])}"
            for name, body in self._bodies.items()
        ]
        lexemes = [f"{name}: {body}" for body, name in self._lexemes.items()]
        start = f"start: rule_{self._numbers['root']}"
        return "\n".join(["%llguidance {}", start, *rules, *lexemes, ""])

    # -- sets of characters --------------------------------------------------------------------------

    def _fill(self) -> None:
        """Go over the rules until nothing changes."""
        before: object = None
        while before != (now := (dict(self._first), dict(self._nullable))):
            before = now
            for name, body in self._bodies.items():
                self._nullable[name] = self._is_nullable(body)
                self._first[name] = self._firsts(body)
        changed = True
        while changed:
            changed = False
            for name, body in self._bodies.items():
                changed |= self._pass_on(body, self._follow[name])

    def _pass_on(self, node: _Expression, follow: int) -> bool:
        """Tell the rules in this node what follows them: whether any of them did not know it."""
        if node.kind == "rule":
            known = self._follow[node.text]
            self._follow[node.text] |= follow
            return known != known | follow
        changed = False
        for part, behind in self._with_follow(node, follow):
            changed |= self._pass_on(part, behind)
        return changed

    def _with_follow(self, node: _Expression, follow: int) -> Sequence[tuple[_Expression, int]]:
        """The parts of the node, each with the characters that can follow it."""
        if node.kind == "repeat" and node.most != 1:
            return [(node.parts[0], follow | self._firsts(node.parts[0]))]
        if node.kind != "sequence":
            return [(part, follow) for part in node.parts]
        parts = []
        for part in reversed(node.parts):
            parts.append((part, follow))
            follow = self._firsts(part) | (follow if self._is_nullable(part) else 0)
        return parts[::-1]

    def _is_nullable(self, node: _Expression) -> bool:
        if node.kind == "rule":
            return self._nullable[node.text]
        if node.kind == "choice":
            return any(map(self._is_nullable, node.parts))
        if node.kind == "literal":
            return not node.text
        within = node.kind in ("sequence", "repeat")
        return node.least == 0 or (within and all(map(self._is_nullable, node.parts)))

    def _firsts(self, node: _Expression) -> int:
        if node.kind == "rule":
            return self._first[node.text]
        if node.kind == "literal":
            return self._alphabet.of(ord(node.text[0]), ord(node.text[0])) if node.text else 0
        if node.kind == "class":
            return _union(self._alphabet.of(*chars) for chars in node.ranges)
        firsts = 0
        for part in node.parts:
            firsts |= self._firsts(part)
            if node.kind == "sequence" and not self._is_nullable(part):
                break
        return firsts

    def _extensions(self, node: _Expression) -> int:
        """The characters that can go on with a text that is one of the node's already. The node is regular.
        There may be some too many."""
        if node.kind == "rule":
            return self._extensions(self._bodies[node.text])
        if node.kind == "choice":
            return self._extensions_of_choice(node)
        if node.kind not in ("sequence", "repeat"):
            return 0
        extensions = 0
        for part in reversed(node.parts):
            extensions |= self._extensions(part)
            if node.kind == "repeat" or self._is_nullable(part):
                extensions |= self._firsts(part)
            if not self._is_nullable(part):
                break
        return extensions

    def _extensions_of_choice(self, node: _Expression) -> int:
        extensions, firsts = _union(map(self._extensions, node.parts)), 0
        for part in node.parts:
            own = self._firsts(part)
            if own & firsts:  # a text of one may begin a text of another
                return _union(map(self._characters, node.parts))
            firsts |= own
        return extensions

    def _characters(self, node: _Expression) -> int:
        if node.kind == "rule":
            return self._characters(self._bodies[node.text])
        if node.kind == "literal":
            return _union(self._alphabet.of(ord(char), ord(char)) for char in node.text)
        return (
            self._firsts(node)
            if node.kind == "class"
            else _union(map(self._characters, node.parts))
        )

    # -- lexemes -----------------------------------------------------------------------------------

    def _size(self, node: _Expression, within: tuple[str, ...] = ()) -> int | None:
        """The parts of the node as one lexeme; None if it can be none."""
        if node.kind == "token":
            return None
        if node.kind == "rule":
            if node.text not in self._sizes:
                if node.text in within or len(within) >= MOST_DEPTH:
                    return None
                body, deeper = self._bodies[node.text], (*within, node.text)
                self._sizes[node.text] = self._size(body, deeper)
            return self._sizes[node.text]
        total = 1
        for part in node.parts:
            size = self._size(part, within)
            if size is None:
                return None
            total += size
        total *= max(1, node.least, node.most or 1)
        return total if total <= MOST_LEXEME_PARTS else None

    def _is_lexeme(self, node: _Expression, follow: int) -> bool:
        """Whether a lexer that takes all it can never takes what follows the node."""
        if self._size(node) is None:
            return False
        taken = self._extensions(node)
        taken |= self._firsts(node) if self._is_nullable(node) else 0
        return not taken & follow

    def _as_rule(self, node: _Expression, follow: int) -> str:
        if node.kind == "token":
            return node.text
        if (node.parts or node.kind == "rule") and self._is_lexeme(node, follow):
            return self._lexeme(self._as_lexeme(node))
        if node.kind == "rule":
            return f"rule_{self._numbers[node.text]}"
        if not node.parts:
            return self._as_lexeme(node)
        parts = [self._as_rule(part, behind) for part, behind in self._with_follow(node, follow)]
        return _lark_of(node, parts)

    def _lexeme(self, body: str) -> str:
        if body.startswith("LEXEME_"):
            return body
        return self._lexemes.setdefault(body, f"LEXEME_{len(self._lexemes)}")

    def _as_lexeme(self, node: _Expression) -> str:
        if node.kind == "rule":
            return self._lexeme(self._as_lexeme(self._bodies[node.text]))
        if node.kind == "literal":
            return json.dumps(node.text)
        if node.kind == "class":
            ranges = "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in node.ranges)
            return f"/[{ranges}]/"
        return _lark_of(node, [self._as_lexeme(part) for part in node.parts])


def _lark_of(node: _Expression, parts: Sequence[str]) -> str:
    if node.kind == "choice":
        return f"({' | '.join(parts)})"
    if node.kind == "sequence":
        return f"({' '.join(parts)})" if parts else '""'
    if node.most == 0:
        return '""'
    # In brackets, as Lark has no repetition of a repetition.
    return f"({parts[0]}){{{node.least},{'' if node.most is None else node.most}}}"


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def lark(source: str) -> str:
    """The grammar in Lark. Raises ValueError that says what is wrong, and where."""
    return _GbnfRules(_GbnfParser(source).rules()).lark()


class _GbnfParser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._n_open = 0
        self._references: dict[str, int] = {}
        """The rules that are named in others, and the first place of each."""

    def rules(self) -> dict[str, _Expression]:
        """The rules by their names. Raises ValueError."""
        bodies: dict[str, _Expression] = {}
        self._skip(_LINES)
        while self._at < len(self._source):
            name = self._read(_NAME, "the name of a rule")
            self._skip(_BLANKS)
            self._expect("::=")
            self._skip(_LINES)
            bodies[name] = self._choice()
            if self._at < len(self._source) and self._source[self._at] not in "\r\n":
                self._fail("expected a new line, or a part of a rule")
            self._skip(_LINES)
        for name, place in self._references.items():
            if name not in bodies:
                self._at = place
                self._fail(f"there is no rule {name!r}")
        if "root" not in bodies:
            raise ValueError("there is no rule 'root', which a grammar begins with")
        return bodies

    def _fail(self, message: str) -> NoReturn:
        before = self._source[: self._at]
        line, column = before.count("\n") + 1, self._at - before.rfind("\n")
        raise ValueError(f"line {line}, column {column}: {message}")

    def _skip(self, blanks: re.Pattern[str]) -> None:
        match = blanks.match(self._source, self._at)
        self._at = match.end() if match else self._at

    def _skip_blanks(self) -> None:
        """Skip blanks, and within brackets the ends of lines."""
        self._skip(_LINES if self._n_open else _BLANKS)

    def _read(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self._source, self._at)
        if match is None:
            self._fail(f"expected {what}")
        self._at = match.end()
        return match[0]

    def _takes(self, text: str) -> bool:
        taken = self._source.startswith(text, self._at)
        self._at += len(text) if taken else 0
        return taken

    def _expect(self, text: str) -> None:
        if not self._takes(text):
            self._fail(f"expected {text!r}")

    def _choice(self) -> _Expression:
        ways = [self._sequence()]
        while self._takes("|"):
            self._skip(_LINES)
            ways.append(self._sequence())
        return ways[0] if len(ways) == 1 else _Expression("choice", parts=tuple(ways))

    def _sequence(self) -> _Expression:
        parts: list[_Expression] = []
        while (part := self._part()) is not None:
            self._skip_blanks()
            n_repetitions = 0
            while (bounds := self._repetitions()) is not None:
                least, most = bounds
                part = _Expression("repeat", parts=(part,), least=least, most=most)
                n_repetitions += 1
                if n_repetitions > MOST_DEPTH:
                    self._fail(f"a part is repeated more than {MOST_DEPTH} times over")
            parts.append(part)
        return parts[0] if len(parts) == 1 else _Expression("sequence", parts=tuple(parts))

    def _part(self) -> _Expression | None:
        char = self._source[self._at : self._at + 1]
        if char == '"':
            return self._literal()
        if char == "[":
            return self._character_class()
        if char == "(":
            return self._group()
        if char == ".":
            self._at += 1
            return _Expression("class", ranges=_EVERY_CHARACTER)
        if char and char in "*+?{":
            self._fail(f"expected something before {char!r}")
        if char and char in "<!":
            token = self._read(_TOKEN, "a token, such as <[1234]>")
            is_negated = token.startswith("!")
            return _Expression("token", token[1:].replace("<[", "<[^") if is_negated else token)
        match = _NAME.match(self._source, self._at)
        if match is None:
            return None
        self._references.setdefault(match[0], self._at)
        self._at = match.end()
        return _Expression("rule", match[0])

    def _group(self) -> _Expression:
        if self._n_open >= MOST_DEPTH:
            self._fail(f"groups are nested deeper than {MOST_DEPTH} levels")
        self._at += 1
        self._n_open += 1
        self._skip_blanks()
        inner = self._choice()
        self._expect(")")
        self._n_open -= 1
        return inner

    def _repetitions(self) -> tuple[int, int | None] | None:
        char = self._source[self._at : self._at + 1]
        if char in _REPETITIONS:
            self._at += 1
            self._skip_blanks()
            return _REPETITIONS[char]
        if not self._takes("{"):
            return None
        self._skip_blanks()
        least = int(self._read(_INTEGER, "a number"))
        most: int | None = least
        self._skip_blanks()
        if self._takes(","):
            self._skip_blanks()
            match = _INTEGER.match(self._source, self._at)
            most = int(self._read(_INTEGER, "a number")) if match else None
            self._skip_blanks()
        if least > MOST_REPETITIONS or (most is not None and most < least):
            self._fail(f"a part cannot be repeated {least} to {most} times")
        self._expect("}")
        self._skip_blanks()
        return least, None if most is None or most > MOST_REPETITIONS else most

    def _literal(self) -> _Expression:
        self._at += 1
        chars: list[str] = []
        while not self._takes('"'):
            chars.append(self._character())
            if len(chars) > MAX_LITERAL_CHARS:
                self._fail(f"a text has more than {MAX_LITERAL_CHARS} characters")
        return _Expression("literal", "".join(chars))

    def _character_class(self) -> _Expression:
        self._at += 1
        is_negated = self._takes("^")
        ranges: list[tuple[int, int]] = []
        while not self._takes("]"):
            first = last = self._character()
            if (
                self._source.startswith("-", self._at)
                and self._source[self._at + 1 : self._at + 2] != "]"
            ):
                self._at += 1
                last = self._character()
            if last < first:
                self._fail("the range of characters ends before it begins")
            ranges.append((ord(first), ord(last)))
        if is_negated:
            ranges = list(_others(ranges))
        return _Expression("class", ranges=tuple(ranges)) if ranges else _Expression("literal")

    def _character(self) -> str:
        char = self._source[self._at : self._at + 1]
        if not char:
            self._fail("the grammar ends within a text or a class of characters")
        if char != "\\":
            self._at += 1
            return char
        kind = self._source[self._at + 1 : self._at + 2]
        if kind in _ESCAPES:
            self._at += 2
            return _ESCAPES[kind]
        digits = self._source[self._at + 2 : self._at + 2 + _HEX.get(kind, 0)]
        if kind not in _HEX or not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[kind]}}}", digits):
            self._fail(f"unknown escape '\\{kind}'")
        code = int(digits, 16)
        if code > _LAST_CHARACTER or 0xD800 <= code < 0xE000:
            self._fail(f"there is no character {digits}")
        self._at += 2 + len(digits)
        return chr(code)


def _others(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begin = 0
    for first, last in sorted(ranges):
        if first > begin:
            yield begin, first - 1
        begin = max(begin, last + 1)
    if begin <= _LAST_CHARACTER:
        yield begin, _LAST_CHARACTER
