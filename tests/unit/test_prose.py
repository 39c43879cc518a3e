"""Sentences of the documents and docstrings are short enough to read once."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.documents.blocks import ROOT

PAGES = (
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
)
MOST_WORDS = 45
"""Of a sentence. Half of them should have fewer than twenty."""
SHORT_WORDS_OF_PAGES, MOST_LONG_SENTENCES_OF_PAGES = 30, 2
"""What a sentence of a page should have at most, and how many are longer for now."""

SHORT_WORDS, MOST_LONG_SENTENCES = 25, 0
"""What a sentence of a docstring or a comment should have at most, and how many are longer for now."""
MODULES = sorted((ROOT / "serve_app").rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    found = [*sentences(page.read_text())]
    assert [one for one in found if n_words(one) > MOST_WORDS] == []


def test_few_pages_have_a_sentence_of_more_than_30_words() -> None:
    """Lower the number when you rewrite one."""
    texts = [one for page in PAGES for one in sentences(page.read_text())]
    long = [one for one in texts if n_words(one) > SHORT_WORDS_OF_PAGES]
    assert len(long) <= MOST_LONG_SENTENCES_OF_PAGES


def test_docstrings_are_short() -> None:
    assert [
        one for text in all_docstrings() for one in sentences(text) if n_words(one) > MOST_WORDS
    ] == []


def test_few_docstrings_and_comments_have_a_sentence_of_more_than_25_words() -> None:
    """Lower the number when you rewrite one."""
    texts = [text for module in MODULES for text in comments(module.read_text())]
    long = [
        one
        for text in (*all_docstrings(), *texts)
        for one in sentences(text)
        if n_words(one) > SHORT_WORDS
    ]
    assert len(long) <= MOST_LONG_SENTENCES


def test_docstrings_are_found_where_python_and_pydantic_find_them() -> None:
    source = '"""M."""\nclass C:\n    """What c is.\n\n        indented\n    """\n    x = 1\n    """X."""\n'
    source += 'def f(): "F."\nasync def g():\n    """Who?"""\n    return "no docstring"\n'
    found = [one for text in docstrings(source) for one in sentences(text)]
    assert sorted(found) == ["F.", "M.", "What c is.", "Who?", "X."]


def test_comments_of_neighbouring_lines_are_one_text() -> None:
    source = "x = 1  # One\n# goes on.\n\n#: Two.\ny = '# none'\n"
    assert [*comments(source)] == ["One\ngoes on.", "Two."]


def test_sentences_are_found_in_prose_lists_and_tables() -> None:
    text = "# A title\nOne line\nand `a. B` [more](x. Y). Two?\n\n- item\n  goes on\n- Next.\n"
    text += "```sh\nno prose. None.\n```\n| cell | Other cell |\n"
    found = [*sentences(text)]
    assert found == [
        "One line and ` ` [more].", "Two?", "- item goes on", "- Next.", "cell", "Other cell",
    ]  # fmt: skip
    assert [n_words(one) for one in found[:3]] == [5, 1, 3]


def sentences(text: str) -> Iterator[str]:
    """Code is one word, links are their texts, and what is made from the code is left out."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    text = re.sub(r"<!-- begin (\w+):.*?<!-- end \1 -->", "", text, flags=re.S)
    for paragraph in _paragraphs(re.sub(r"`[^`]+`", "` `", re.sub(r"\]\([^)]*\)", "]", text))):
        yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*\[(]|llama)", paragraph)


def docstrings(source: str) -> Iterator[str]:
    """Of the module, its classes and functions, and below fields. Indented blocks, such as commands and
    drawings, are left out."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(text := node.value.value, str):
            yield re.sub(rf"^ {{{node.col_offset + 1},}}.*", "", text, flags=re.M)


@cache
def all_docstrings() -> list[str]:
    """Of all modules."""
    return [text for module in MODULES for text in docstrings(module.read_text())]


def comments(source: str) -> Iterator[str]:
    """Comments of neighbouring lines are one text."""
    lines: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] > last + 1:
                yield "\n".join(lines)
                lines = []
            last = token.start[0]
            lines.append(token.string.lstrip("#: "))
    yield from ["\n".join(lines)] if lines else []


def n_words(sentence: str) -> int:
    return len(re.findall(r"[\w'.-]*\w|` `", sentence))


def _paragraphs(text: str) -> Iterator[str]:
    """Also items of lists, and cells of tables."""
    lines: list[str] = []
    for line in (one.strip() for one in text.splitlines()):
        if not line or line[0] in "#|" or re.match(r"([-*]|\d+\.) ", line):
            yield from [" ".join(lines)] if lines else []
            lines = []
        if line.startswith("|"):
            yield from (cell.strip() for cell in line.strip("|").split("|"))
        elif line and not line.startswith("#"):
            lines.append(line)
    yield from [" ".join(lines)] if lines else []
