"""The sums and the table of `loadtests.compare`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from loadtests.common.bursts import FIGURES, Burst
from loadtests.compare.sides import LLAMA_SERVER
from serve_app.cli.measure import benchmark
from serve_app.cli.measure.benchmark import ratios

Round = Mapping[str, Burst]
"""One burst of each side, by its name, with the same prompts."""

_HEADER = (
    *("users", "side", "tokens/s", "TTFT p50, s", "TTFT p95, s", "ITL p50, ms", "ITL p99, ms"),
    *("beside, ms", "tokens"),
)
_FORMATS = dict(zip(FIGURES, (".1f", ".2f", ".2f", ".1f", ".1f"), strict=True))


def table(results: Mapping[int, Sequence[Round]]) -> str:
    """A Markdown table of one workload's rounds, by the number of users."""
    rows = [
        [
            *(users, side, *(cell(rounds, side, figure) for figure in FIGURES)),
            *(beside(rounds, side), answered(rounds, side)),
        ]
        for users, rounds in results.items()
        for side in rounds[0]
    ]
    return benchmark.table(_HEADER, rows)


def baseline(sides: Iterable[str]) -> str:
    """The side that the others are compared with: llama-server, or else the first."""
    named = list(sides)
    return LLAMA_SERVER if LLAMA_SERVER in named else named[0]


def cell(rounds: Sequence[Round], side: str, figure: str) -> str:
    """A side's median, and its ratios to the baseline's in the same rounds, if there are any."""
    values = of_side(rounds, side, figure)
    text = f"{statistics.median(values):{_FORMATS[figure]}}"
    other = baseline(rounds[0])
    found = None if side == other else ratios(values, of_side(rounds, other, figure))
    if found is None:
        return text
    return f"{text}, {statistics.median(found):.2f}x ({min(found):.2f}-{max(found):.2f})"


def beside(rounds: Sequence[Round], side: str) -> str:
    """The median CPU time for each token beside computing, its range, or a dash if it is unknown."""
    values = [one[side].beside_ms for one in rounds]
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.median(known):.2f} ({min(known):.2f}-{max(known):.2f})"


def of_side(rounds: Sequence[Round], side: str, figure: str) -> list[float]:
    """A side's figure in each round."""
    return [one[side].figures()[figure] for one in rounds]


def answered(rounds: Sequence[Round], side: str) -> str:
    """Tokens of one round: all the same, or the least and the most."""
    counts = [one[side].tokens for one in rounds]
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)}-{max(counts)}"


def warnings(one: Round, wanted: Sequence[tuple[int, int]]) -> Iterator[str]:
    """The reasons why this round is no fair comparison; `wanted` are each user's prompt and answer
    tokens."""
    for side, burst in one.items():
        asked = sum(answer for _, answer in wanted)
        if burst.tokens < asked:
            yield f"{side} answered {burst.tokens} tokens of {asked}"
        for error in sorted({answer.error for answer in burst.answers if answer.error}):
            yield f"{side}: {error}"
        told = [a.prompt_tokens for a in burst.answers if a.prompt_tokens is not None]
        if told and told != [prompt for prompt, _ in wanted]:
            yield f"{side} counts other prompts: {told}"
