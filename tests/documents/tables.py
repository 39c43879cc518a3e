"""Markdown tables, and where a page has those that a command makes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown; a `|` within a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def replaced(page: str, name: str, content: str) -> str:
    """The page with this content between the marks of `name`. Raises ValueError if they are not there."""
    begin, end = f"<!-- begin {name}: made by `make reference` -->\n", f"<!-- end {name} -->"
    pattern = re.escape(begin) + r".*?" + re.escape(end)
    found, n = re.subn(pattern, lambda _: f"{begin}\n{content}\n{end}", page, flags=re.S)
    if n != 1:
        raise ValueError(f"The marks of {name} are there {n} times, and should be once.")
    return found
