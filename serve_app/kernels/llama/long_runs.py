"""Cuts texts with very long runs of characters, which would overflow the stack while they are tokenized.

llama.cpp leaves some pre-tokenizers to `std::regex`. That takes some 300 bytes of the stack for each
character that it matches at once: a run without blanks, or of blanks.
"""

from __future__ import annotations

import functools
import re

LONGEST = 8192
"""Characters of the longest run that stays whole."""
_LOOK_BACK = 256
_PUNCTUATION = re.compile(r"(?<=\w)[^\w\s]")


def split_runs(text: str, whole: re.Pattern[str], longest: int = LONGEST) -> list[str]:
    """The text in pieces without runs longer than that. Nothing that `whole` matches is cut. Cuts are
    before punctuation where there is some, as most pre-tokenizers cut there, too."""
    cuts: list[int] = []
    for run in _runs(longest).finditer(text):
        place = run.start()
        while run.end() - place > longest:
            place = _cut(text, place, place + longest, whole)
            cuts.append(place)
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@functools.cache
def _runs(longest: int) -> re.Pattern[str]:
    return re.compile(rf"\S{{{longest + 1},}}|\s{{{longest + 1},}}")


def _cut(text: str, start: int, latest: int, whole: re.Pattern[str]) -> int:
    earliest = max(start + 1, latest - _LOOK_BACK)
    before = [match.start() for match in _PUNCTUATION.finditer(text, earliest, latest)]
    place = before[-1] if before else latest
    around = whole.finditer(text, max(start, place - _LOOK_BACK), place + _LOOK_BACK)
    inside = next((match for match in around if match.start() < place < match.end()), None)
    if inside is None:
        return place
    return inside.start() if inside.start() > start else inside.end()
