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
from typing import Literal, NamedTuple, NoReturn

from serve_app.prompt.json_schemas import MAX_LITERAL_CHARS

MOST_REPETITIONS = 2000
"""llama.cpp's bound: a smaller number of repetitions is refused above it, and a larger one is no bound."""
MOST_DEPTH = 64
"""The deepest nesting of groups, and of rules within a lexeme."""
MOST_LEXEME_PARTS = 2000
"""The most parts of a lexeme, repetitions counted: a larger rule stays a rule of smaller lexemes."""
_TOKEN = re.compile(
    r"(?P<blank>[ \t]+|#[^\r\n]*)"
    r"|(?P<line>[\r\n]+)"
    r"|(?P<name>[a-zA-Z0-9_-]+)"
    r'|(?P<literal>"(?:\\.|[^"\\])*")'
    r"|(?P<class>\[(?:\\.|[^\]\\])*\])"
    r"|(?P<token>!?<\[[0-9]+\]>|<[^\s<>\[]+>)"
    r"|(?P<repetition>[*+?]|\{\s*[0-9]+\s*(?:,\s*(?:[0-9]+\s*)?)?\})"
    r"|(?P<sign>::=|[|().])"
    r"|(?P<end>\Z)"
    r"|(?P<rest>.+)",
    re.DOTALL,
)
_CHARACTER = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\?."
_CHARACTERS = re.compile(_CHARACTER, re.DOTALL)
_MEMBERS = re.compile(f"({_CHARACTER})(?:-({_CHARACTER}))?", re.DOTALL)
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]-'}}
_REPETITIONS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_NEXT = "a new line, or a part of a rule"
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


class _Token(NamedTuple):
    kind: str
    """The name of its group, or a sign itself."""
    text: str
    at: int


def _tokens(source: str) -> Iterator[_Token]:
    """The grammar's tokens. A text that is none goes on to the end, which is a token, too. New lines are
    tokens where a rule may end."""
    n_open, before = 0, "line"
    for match in _TOKEN.finditer(source):
        text = match[0]
        kind = text if match.lastgroup == "sign" else str(match.lastgroup)
        goes_on = n_open > 0 or before in ("line", "::=", "|")
        if kind == "blank" or (kind == "line" and goes_on):
            continue
        n_open += (kind == "(") - (kind == ")")
        before = kind
        yield _Token(kind, text, match.start())


class _GbnfParser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._left = list(_tokens(source))[::-1]
        """The tokens that are left, the next one last."""
        self._references: dict[str, _Token] = {}
        """The rules that are named in others, and the first place of each."""

    def rules(self) -> dict[str, _Expression]:
        """The rules by their names. Raises ValueError."""
        bodies: dict[str, _Expression] = {}
        while self._left[-1].kind != "end":
            head = self._expect("name", "the name of a rule")
            self._expect("::=", "'::='")
            bodies[head.text] = self._choice()
            if self._left[-1].kind != "end":
                self._expect("line", _NEXT)
        for name, token in self._references.items():
            if name not in bodies:
                self._fail(f"there is no rule {name!r}", token)
        if "root" not in bodies:
            raise ValueError("there is no rule 'root', which a grammar begins with")
        return bodies

    def _fail(self, message: str, token: _Token) -> NoReturn:
        before = self._source[: token.at]
        line, column = before.count("\n") + 1, token.at - before.rfind("\n")
        raise ValueError(f"line {line}, column {column}: {message}")

    def _take(self, kind: str) -> _Token | None:
        """The next token, if it is of this kind."""
        return self._left.pop() if self._left[-1].kind == kind else None

    def _expect(self, kind: str, what: str) -> _Token:
        return self._take(kind) or self._fail(f"expected {what}", self._left[-1])

    def _choice(self, depth: int = 0) -> _Expression:
        ways = [self._sequence(depth)]
        while self._take("|"):
            ways.append(self._sequence(depth))
        return ways[0] if len(ways) == 1 else _Expression("choice", parts=tuple(ways))

    def _sequence(self, depth: int) -> _Expression:
        parts: list[_Expression] = []
        while (part := self._part(depth)) is not None:
            n_repetitions = 0
            while token := self._take("repetition"):
                n_repetitions += 1
                if n_repetitions > MOST_DEPTH:
                    self._fail(f"a part is repeated more than {MOST_DEPTH} times over", token)
                least, most = self._repetitions(token)
                part = _Expression("repeat", parts=(part,), least=least, most=most)
            parts.append(part)
        return parts[0] if len(parts) == 1 else _Expression("sequence", parts=tuple(parts))

    def _part(self, depth: int) -> _Expression | None:
        token = self._left[-1]
        if token.kind in ("line", "|", ")", "end"):
            return None
        self._left.pop()
        match token.kind:
            case "name":
                self._references.setdefault(token.text, token)
                return _Expression("rule", token.text)
            case "literal":
                return self._literal(token)
            case "class":
                return self._character_class(token)
            case ".":
                return _Expression("class", ranges=_EVERY_CHARACTER)
            case "token":
                return _Expression("token", re.sub(r"^!<\[", "<[^", token.text))
            case "(":
                if depth == MOST_DEPTH:
                    self._fail(f"groups are nested deeper than {MOST_DEPTH} levels", token)
                inner = self._choice(depth + 1)
                self._expect(")", "')'")
                return inner
            case "repetition":
                self._fail(f"expected something before {token.text!r}", token)
            case "rest" if token.text[0] in '"[':
                self._fail("the grammar ends within a text or a class of characters", token)
            case "rest" if token.text[0] in "<!":
                self._fail("expected a token, such as <[1234]>", token)
        return self._fail(f"expected {_NEXT}", token)

    def _repetitions(self, token: _Token) -> tuple[int, int | None]:
        if token.text in _REPETITIONS:
            return _REPETITIONS[token.text]
        low, comma, high = token.text.strip("{}").partition(",")
        least = int(low)
        most = int(high) if high.strip() else None if comma else least
        if least > MOST_REPETITIONS or (most is not None and most < least):
            self._fail(f"a part cannot be repeated {least} to {most} times", token)
        return least, None if most is None or most > MOST_REPETITIONS else most

    def _literal(self, token: _Token) -> _Expression:
        characters = _CHARACTERS.findall(token.text[1:-1])
        if len(characters) > MAX_LITERAL_CHARS:
            self._fail(f"a text has more than {MAX_LITERAL_CHARS} characters", token)
        return _Expression("literal", "".join(self._read(one, token) for one in characters))

    def _character_class(self, token: _Token) -> _Expression:
        inner, ranges = token.text[1:-1], list[tuple[int, int]]()
        for low, high in _MEMBERS.findall(inner.removeprefix("^")):
            first, last = (ord(self._read(one, token)) for one in (low, high or low))
            if last < first:
                self._fail("the range of characters ends before it begins", token)
            ranges.append((first, last))
        if inner.startswith("^"):
            ranges = list(_others(ranges))
        return _Expression("class", ranges=tuple(ranges)) if ranges else _Expression("literal")

    def _read(self, character: str, token: _Token) -> str:
        """The character that is written so in a literal or a class."""
        kind, digits = character[1:2], character[2:]
        if not kind or kind in _ESCAPES:
            return _ESCAPES.get(kind, character)
        if not digits:
            self._fail(f"unknown escape '\\{kind}'", token)
        code = int(digits, 16)
        if code > _LAST_CHARACTER or 0xD800 <= code < 0xE000:
            self._fail(f"there is no character {digits}", token)
        return chr(code)


def _others(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begin = 0
    for first, last in sorted(ranges):
        if first > begin:
            yield begin, first - 1
        begin = max(begin, last + 1)
    if begin <= _LAST_CHARACTER:
        yield begin, _LAST_CHARACTER
