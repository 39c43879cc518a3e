"""Hostile clients' results as a Markdown table and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadtests.hostile.verdict import HURT, Result
from serve_app.cli.measure.benchmark import table as markdown_table

COLUMNS = (
    "attack",
    "first token p95, ms",
    "gap p99, ms",
    "longest /health, ms",
    "memory, MiB",
    "result",
)
MOST_ANSWERS, MOST_REASONS = 4, 4


def table(results: Sequence[Result]) -> str:
    """The table as documents have it; figures of honest users are calm's, and then the attack's."""
    return markdown_table(COLUMNS, map(_row, results))


def summary(results: Sequence[Result]) -> str:
    """How many held, and by name what is wrong with the others."""
    hurt = [result for result in results if result.verdict == HURT]
    head = f"{len(results) - len(hurt)} of {len(results)} attacks held."
    return "\n".join([head, *(f"HURT {_name(one)}: {_told(one.reasons)}" for one in hurt)])


def line(one: Result) -> str:
    """One result, as soon as it is there."""
    told = _told(one.reasons) or "held"
    return f"{_name(one)}, {one.seconds:.1f} s: {told} (got {_answers(one.answers)})"


def document(results: Sequence[Result], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for JSON."""
    return {"facts": dict(facts), "attacks": [_entry(result) for result in results]}


def _row(one: Result) -> tuple[object, ...]:
    calm, during = one.calm, one.during
    return (
        _name(one),
        _pair(calm.ttft_p95_s, during.ttft_p95_s),
        _pair(calm.itl_p99_s, during.itl_p99_s),
        _pair(calm.longest_pause_s, during.longest_pause_s),
        f"{one.memory_mib:+.0f}",
        _told(one.reasons) or "held",
    )


def _told(reasons: Sequence[str]) -> str:
    rest = len(reasons) - MOST_REASONS
    return "; ".join([*reasons[:MOST_REASONS], *([f"{rest} more"] if rest > 0 else [])])


def _name(one: Result) -> str:
    return f"{one.attack.family}: {one.attack.name}"


def _pair(calm_s: float | None, during_s: float | None) -> str:
    return f"{_ms(calm_s)} → {_ms(during_s)}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f}"


def _answers(answers: Mapping[str, int]) -> str:
    ordered = sorted(answers.items(), key=lambda one: (-one[1], one[0]))
    shown = [f"{n} x {kind}" for kind, n in ordered[:MOST_ANSWERS]]
    rest = sum(n for _, n in ordered[MOST_ANSWERS:])
    return ", ".join([*shown, *([f"{rest} others"] if rest else [])]) or "nothing"


def _entry(one: Result) -> dict[str, Any]:
    attack = one.attack
    return {
        "name": attack.name,
        "family": attack.family,
        "what": attack.what,
        "expects": attack.expects,
        "verdict": one.verdict,
        "reasons": one.reasons,
        "attempt": one.attempt,
        "seconds": round(one.seconds, 2),
        "calm": _seen(one, calm=True),
        "during": _seen(one, calm=False),
        "answers": dict(one.answers),
        "died": list(one.died),
        "memory_mib": [round(one.memory_before_mib, 1), round(one.memory_most_mib, 1)],
        "recovered_s": one.recovered_s,
    }


def _seen(one: Result, *, calm: bool) -> dict[str, Any]:
    seen = one.calm if calm else one.during
    return {
        "answers": seen.answers,
        "ttft_p95_s": seen.ttft_p95_s,
        "itl_p99_s": seen.itl_p99_s,
        "longest_gap_s": seen.longest_gap_s,
        "longest_pause_s": seen.longest_pause_s,
        "failures": list(seen.failures),
    }
