"""Names and docstrings of the product: a class name stands once, and a docstring names its subject."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ROOT / "serve_app"
MODULES = sorted(PRODUCT.rglob("*.py"))
VAGUE = frozenset({"one", "found", "told", "asked", "wanted", "given"})
LONGEST_VAGUE_LINES = 3
"""The lines from a vague name's first place in a function to its last."""
PARTICIPLE = re.compile(
    r"_?(held|said|told|kept|made|given|taken|chosen|written|found|sent|left|lost|named|joined|"
    r"[a-z]{3,}ed|[a-z]{3,}wn)"
)
NO_PARTICIPLES = frozenset({"embed", "shutdown", "speed"})
"""Verbs and nouns that look like participles."""
SHARED_NAMES = frozenset({"main", "parse_args"})
"""The functions that each program has: where it begins, and what reads its arguments."""
MOST_ARGUMENTS = 7
"""The most arguments of a constructor in the engine and its kernels."""
ENGINE = ("engine", "llama", "openvino")
LEADING = re.compile(
    r"(It|Its|They|Their|Them|Those|These|This|That|He|She|His|Whose|Which|Such|"
    r"Of|The same|See|One|Ones|\.\.\.|And|Or|But|Like `|Also|"
    r"As|At|By|For|From|In|On|With|Without|Among|Between|After|Behind|Since|So|Until|Up to|None for)\b"
    r"|\.\.\."
)
"""The first words of a docstring that lacks its subject."""
PRONOUN = re.compile(
    r"(What|Who|Nobody|Nothing|Neither|Others|There|Where|When|While|If|Within|Only|To|"
    r"None(?! means)|All (that|of|in|from|but|else))\b"
)
MOST_PRONOUNS = 0
"""How many docstrings still begin with a pronoun or a clause, and not with a noun or a verb."""


def part(path: Path) -> str:
    return path.relative_to(PRODUCT).parts[0]


@lru_cache(maxsize=1)
def nodes(source: str) -> tuple[ast.AST, ...]:
    """The parts of a source, its module first. All checks of a source come one after the other."""
    return tuple(ast.walk(ast.parse(source)))


def docstrings(source: str) -> Iterator[ast.Constant]:
    """The docstrings of a module, its classes and functions, and the texts below attributes."""
    for node in nodes(source):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def fragments(source: str) -> list[tuple[int, str]]:
    """The docstrings that begin without a subject, or that go on in the next attribute's."""
    beginnings = ((text, str(text.value).strip()) for text in docstrings(source))
    return [
        (text.lineno, words[:60])
        for text, words in beginnings
        if LEADING.match(words) or words.endswith((",", "...", ";"))
    ]


def vague_names(source: str) -> list[tuple[int, str]]:
    """The variables that a vague word names for longer than a few lines."""
    findings = []
    for function in nodes(source):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = [*function.args.args, *function.args.kwonlyargs, *function.args.posonlyargs]
        findings += [(arg.lineno, arg.arg) for arg in arguments if arg.arg in VAGUE]
        lines = defaultdict[str, list[int]](list)
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in VAGUE:
                lines[node.id].append(node.lineno)
        for name, numbers in lines.items():
            runs = _runs(sorted(numbers))
            findings += [
                (first, name) for first, last in runs if last - first >= LONGEST_VAGUE_LINES
            ]
    return sorted(set(findings))


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """The stretches of lines in which each mention follows the last within a few lines."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number - last > LONGEST_VAGUE_LINES:
            yield first, last
            first = number
        last = number
    yield first, last


def bare_participles(source: str) -> list[tuple[int, str]]:
    """The functions that are named by a participle alone, which tells neither a deed nor a thing."""
    return [
        (node.lineno, node.name)
        for node in nodes(source)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and PARTICIPLE.fullmatch(node.name)
        and node.name.lstrip("_") not in NO_PARTICIPLES
    ]


def module_functions(source: str) -> list[str]:
    """The names of a module's own functions."""
    module = nodes(source)[0]
    assert isinstance(module, ast.Module)
    return [
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def long_constructors(source: str) -> list[tuple[int, int]]:
    """The constructors that take too many arguments besides `self`."""
    findings = []
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            n_arguments = len(node.args.args) + len(node.args.kwonlyargs) - 1
            if n_arguments > MOST_ARGUMENTS:
                findings.append((node.lineno, n_arguments))
    return findings


def pronouns(source: str) -> list[tuple[int, str]]:
    """The docstrings that begin with a pronoun or a clause."""
    return [
        (text.lineno, str(text.value)[:60])
        for text in docstrings(source)
        if PRONOUN.match(str(text.value).strip())
    ]


@dataclass(frozen=True)
class Reading:
    """What the checks find in a module, and its names."""

    fragments: list[tuple[int, str]]
    vague_names: list[tuple[int, str]]
    participles: list[tuple[int, str]]
    pronouns: list[tuple[int, str]]
    long_constructors: list[tuple[int, int]]
    functions: list[str]
    classes: list[str]


@cache
def readings() -> dict[Path, Reading]:
    """Of each module, which is read once for all tests."""
    return {
        path: Reading(
            fragments(source),
            vague_names(source),
            bare_participles(source),
            pronouns(source),
            long_constructors(source),
            module_functions(source),
            [node.name for node in nodes(source) if isinstance(node, ast.ClassDef)],
        )
        for path in MODULES
        for source in [path.read_text()]
    }


@cache
def report() -> dict[str, list[str]]:
    """The findings of each part of the product."""
    places = defaultdict[str, list[str]](list)
    for path, reading in readings().items():
        where = path.relative_to(ROOT)
        for line, words in reading.fragments:
            places[part(path)].append(f"{where}:{line}: docstring {words!r}")
        for line, name in reading.vague_names:
            places[part(path)].append(f"{where}:{line}: variable {name}")
        if part(path) in ENGINE:
            for line, n_arguments in reading.long_constructors:
                places[part(path)].append(f"{where}:{line}: {n_arguments} arguments")
    for name, paths in class_places().items():
        for path in paths if len(paths) > 1 else []:
            others = ", ".join(str(other.relative_to(ROOT)) for other in paths if other != path)
            places[part(path)].append(f"{path.relative_to(ROOT)}: class {name} is also in {others}")
    return places


def class_places() -> dict[str, list[Path]]:
    places = defaultdict[str, list[Path]](list)
    for path, reading in readings().items():
        for name in reading.classes:
            places[name].append(path)
    return places


@pytest.mark.parametrize("name", sorted({part(path) for path in MODULES}))
def test_names_and_docstrings_say_what_they_mean(name: str) -> None:
    assert report()[name] == []


def test_functions_are_named_by_verbs_or_nouns() -> None:
    found = {
        (path.name, name) for path, reading in readings().items() for _, name in reading.participles
    }
    # What the keyword `required` of JSON Schemas becomes; the table of keywords names its functions so.
    assert found == {("json_schemas.py", "_required")}


def test_no_function_has_the_name_of_two_others() -> None:
    """Methods do not count: a class, a protocol or a base class says what they are of."""
    places = defaultdict[str, set[str]](set)
    for path, reading in readings().items():
        for name in reading.functions:
            places[name].add(str(path.relative_to(ROOT)))
    shared = {name: sorted(paths) for name, paths in places.items() if len(paths) > 2}
    assert shared.keys() == SHARED_NAMES, shared


def test_generation_names_one_thing() -> None:
    """The class of prepared bodies, and the fields and variables that have one."""
    functions = {name for reading in readings().values() for name in reading.functions}
    assert "generation" not in functions | {path.stem for path in MODULES}
    assert [path.parent.name for path in class_places()["Generation"]] == ["answering"]


def test_bare_participles_are_found() -> None:
    source = "def held(): ...\nclass C:\n    def _joined(self): ...\n    def embed(self): ...\n"
    assert bare_participles(source) == [(1, "held"), (3, "_joined")]


def test_docstrings_without_a_subject_are_found() -> None:
    source = '"""Of a row."""\nx = 1\n"""Whether it ends, ..."""\ndef f(): "Return the item."\n'
    assert fragments(source) == [(1, "Of a row."), (3, "Whether it ends, ...")]


def test_few_docstrings_begin_with_a_pronoun() -> None:
    """Lower the number when you rewrite one."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {words!r}"
        for path, reading in readings().items()
        for line, words in reading.pronouns
    ]
    assert len(found) <= MOST_PRONOUNS, found


def test_vague_names_that_live_long_are_found() -> None:
    short = "def f():\n    found = 1\n    return found\n"
    long = "def f():\n    found = 1\n    x = found\n    y = 2\n    return found\n"
    assert vague_names(short) == []
    assert vague_names(long) == [(2, "found")]
    assert vague_names("def f(one): return one\n") == [(1, "one")]


def test_constructors_with_many_arguments_are_found() -> None:
    assert long_constructors("class C:\n    def __init__(self, a, b, c, d, e, f, g, h): ...") == [
        (2, 8)
    ]


if __name__ == "__main__":
    import sys

    for name in sys.argv[1:] or sorted(report()):
        print(*report().get(name, []), sep="\n")
    print({name: len(findings) for name, findings in sorted(report().items())})
