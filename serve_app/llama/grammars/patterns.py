"""Regular expressions of clients, over a text that arrives in pieces, in time linear in the text.

Source: Ken Thompson's construction, with the priorities of Pike's machine; Python's own parser of
expressions.
"""

from __future__ import annotations

import functools
import re
import re._constants as ops  # type: ignore[import-not-found]  # the standard library's, without types
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MOST_STEPS = 500
"""The most steps of the expressions that one text is searched for, together. Each repetition that must be
there counts as a step, and so does each member of a class."""
_MOST_CHARS_PER_STEP = 10  # "\\U0001F600" is one character
_TOO_LONG = f"it is too long: all patterns together may have {MOST_STEPS} steps"
_LINE_ENDS = "\n\r\u2028\u2029"
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    ops.CATEGORY_DIGIT: lambda char: "0" <= char <= "9",
    ops.CATEGORY_NOT_DIGIT: lambda char: not "0" <= char <= "9",
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    ops.CATEGORY_WORD: lambda char: char == "_" or (char.isascii() and char.isalnum()),
    ops.CATEGORY_NOT_WORD: lambda char: not (char == "_" or (char.isascii() and char.isalnum())),
}


@dataclass(slots=True)
class _Step:
    """A step of a pattern: a character, a fork, or an end of a group, of the text or of the expression."""

    kind: str
    next: Sequence[int] = ()
    """The steps that follow, the preferred way first."""
    takes: Callable[[str], bool] | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class _Thread:
    """A way to match: where it is, where it began, and the first group that it found text for."""

    step: int
    start: int
    open: tuple[int, int] | None = None
    group: tuple[int, int] | None = None
    """The group's number, and where it began."""


class Pattern:
    """An expression as llama-server's triggers have it. Raises ValueError for an expression that is not
    valid, has more than `most_steps`, or looks around."""

    def __init__(self, source: str, most_steps: int = MOST_STEPS) -> None:
        self.steps: list[_Step] = []
        self.n_steps = 0
        """The steps by which its time is bounded: to compile it, and to take a character."""
        self._most_steps = most_steps
        if len(source) > _MOST_CHARS_PER_STEP * most_steps:
            raise ValueError(_TOO_LONG)
        try:
            self._all(parser.parse(source))
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from error
        self._add(_Step("match"))

    def _count(self, n: int) -> None:
        self.n_steps += n
        if self.n_steps > self._most_steps:
            raise ValueError(_TOO_LONG)

    def _add(self, step: _Step) -> int:
        self._count(1)
        self.steps.append(step)
        return len(self.steps) - 1

    def _all(self, nodes: Any) -> None:
        for kind, what in nodes:
            self._one(kind, what)

    def _one(self, kind: Any, what: Any) -> None:
        if kind is ops.IN:
            self._count(len(what) - 1)
        takes = _predicate(kind, what)
        if takes is not None:
            self._follow(_Step("char", takes=takes))
        elif kind is ops.SUBPATTERN:
            group, _, _, inner = what
            if group is not None:
                self._follow(_Step("open", group=group))
            self._all(inner)
            if group is not None:
                self._follow(_Step("close", group=group))
        elif kind is ops.BRANCH:
            self._branches(what[1])
        elif kind in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            self._repeat(*what, lazy=kind is ops.MIN_REPEAT)
        elif kind is ops.AT and what in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
            self._follow(_Step("begin"))
        elif kind is ops.AT and what in (ops.AT_END, ops.AT_END_STRING):
            self._follow(_Step("end"))
        else:
            raise ValueError(f"{str(kind).lower()} is not supported")

    def _follow(self, step: _Step) -> int:
        """Add one that goes on with the next."""
        place = self._add(step)
        step.next = (place + 1,)
        return place

    def _branches(self, branches: Sequence[Any]) -> None:
        ends = []
        for i, branch in enumerate(branches):
            fork = self._add(_Step("fork")) if i < len(branches) - 1 else None
            self._all(branch)
            if fork is not None:
                ends.append(self._add(_Step("fork")))
                self.steps[fork].next = (fork + 1, len(self.steps))
        for end in ends:
            self.steps[end].next = (len(self.steps),)

    def _repeat(self, least: int, most: Any, inner: Any, *, lazy: bool) -> None:
        for _ in range(least):
            self._count(1)  # also where nothing is repeated
            self._all(inner)
        forks = []
        for _ in range(1 if most is ops.MAXREPEAT else most - least):
            forks.append(self._add(_Step("fork")))
            self._all(inner)
        if most is ops.MAXREPEAT:
            self._add(_Step("fork", (forks[0],)))
        for fork in forks:
            ways = (fork + 1, len(self.steps))
            self.steps[fork].next = ways[::-1] if lazy else ways


class Search:
    """The way of a pattern through a text. Not thread-safe."""

    def __init__(self, pattern: Pattern) -> None:
        self._steps = pattern.steps
        self._threads: list[_Thread] = []
        self._n_chars = 0
        self._found: _Thread | None = None

    def feed(self, text: str) -> int | None:
        """Go on by this text: where, in all of the text, the leftmost match begins that is there now, or
        its first group with a text in it; None if there is no match."""
        for char in text:
            self._take(char)
        match = self._found
        passed = set[int]()
        for thread in [*self._threads, _Thread(0, self._n_chars)]:
            closure = self._closure(thread, passed, at_end=True, only_match=True)
            ended = next(closure, None)
            if ended is not None:
                match = ended if match is None or ended.start <= match.start else match
                break
        if match is None:
            return None
        return match.start if match.group is None else match.group[1]

    def _take(self, char: str) -> None:
        reached: list[_Thread] = []
        passed, seen = set[int](), set[int]()
        own = [] if self._found else [_Thread(0, self._n_chars)]
        threads = [*self._threads, *own]
        waiting = [one for thread in threads for one in self._closure(thread, passed)]
        for thread in waiting:
            step = self._steps[thread.step]
            if step.kind == "match":
                self._found = thread
                break  # what comes after it is less wanted
            if step.takes is not None and step.takes(char) and step.next[0] not in seen:
                seen.add(step.next[0])
                reached.append(_Thread(step.next[0], thread.start, thread.open, thread.group))
        self._threads = reached
        self._n_chars += 1

    def _closure(
        self, thread: _Thread, passed: set[int], *, at_end: bool = False, only_match: bool = False
    ) -> Iterator[_Thread]:
        """Where the thread gets without a character: at characters, or at the end of the expression. It
        does not go through steps that it, or a thread before it, has `passed`: those are more wanted, and a
        character so takes no more time than the expression has steps."""
        stack = [thread]
        while stack:
            thread = stack.pop()
            if thread.step in passed:
                continue
            passed.add(thread.step)
            step = self._steps[thread.step]
            if step.kind == "match" or (step.kind == "char" and not only_match):
                yield thread
            elif step.kind == "fork":
                stack += [
                    _Thread(way, thread.start, thread.open, thread.group)
                    for way in reversed(step.next)
                ]
            elif self._passes(step, at_end):
                stack.append(self._through(thread, step))

    def _passes(self, step: _Step, at_end: bool) -> bool:
        if step.kind == "begin":
            return self._n_chars == 0
        return at_end if step.kind == "end" else step.kind in ("open", "close")

    def _through(self, thread: _Thread, step: _Step) -> _Thread:
        opened, group = thread.open, thread.group
        is_wanted = group is None or group[0] == step.group  # what a group matched last counts
        if step.kind == "open" and opened is None and is_wanted:
            opened = step.group, self._n_chars
        elif step.kind == "close" and opened is not None and opened[0] == step.group:
            group = opened if self._n_chars > opened[1] else group
            opened = None
        return _Thread(step.next[0], thread.start, opened, group)


def _predicate(kind: Any, what: Any) -> Callable[[str], bool] | None:
    """The test of a node that stands for one character; None for all others."""
    if kind is ops.LITERAL:
        return chr(what).__eq__
    if kind is ops.NOT_LITERAL:
        return lambda char: ord(char) != what
    if kind is ops.ANY:
        return lambda char: char not in _LINE_ENDS
    if kind is ops.CATEGORY:
        return _CATEGORIES[what]
    if kind is ops.RANGE:
        return lambda char: what[0] <= ord(char) <= what[1]
    if kind is not ops.IN:
        return None
    is_negated = what[0][0] is ops.NEGATE
    chars = frozenset(chr(value) for member, value in what if member is ops.LITERAL)
    others = [_predicate(*member) for member in what if member[0] in (ops.RANGE, ops.CATEGORY)]
    predicates = [chars.__contains__, *(takes for takes in others if takes)]
    return lambda char: any(takes(char) for takes in predicates) is not is_negated


@functools.lru_cache(64)
def compiled(sources: tuple[str, ...]) -> tuple[Pattern, ...]:
    """Compile expressions, each of them once. Raises ValueError as Pattern does, and if they have more than
    MOST_STEPS together. Any thread."""
    patterns: list[Pattern] = []
    for source in dict.fromkeys(sources):
        n_steps = sum(pattern.n_steps for pattern in patterns)
        patterns.append(Pattern(source, MOST_STEPS - n_steps))
    return tuple(patterns)
