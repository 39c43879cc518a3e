"""The table and the plot of `loadtests.engine`: medians and ratios of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from loadtests.common import benchmark
from loadtests.common.benchmark import machine_line, percentile
from loadtests.common.plot import Chart, svg
from loadtests.common.rounds import ratios as ratios_of
from loadtests.engine.modes import BATCHED, OPENVINO
from loadtests.engine.run import AnyRun

RATES = ("decode_tps", "whole_tps", "prefill_tps")
MIB = 2**20

Round = Mapping[str, AnyRun]
"""One run of each mode, by its name, with the same prompts."""


def mode_summary(runs: Sequence[AnyRun]) -> dict[str, float | None]:
    """Medians over one mode's runs; latencies over all their tokens, in milliseconds. None where a
    mode cannot tell."""
    ttft = [s for run in runs for s in run.ttft_s]
    itl = [s for run in runs for s in run.itl_s]
    return {
        **{name: _median([getattr(run, name) for run in runs]) for name in RATES},
        "ttft_p50_ms": 1000 * percentile(ttft, 50),
        "itl_p50_ms": 1000 * percentile(itl, 50) if itl else None,
        "itl_p99_ms": 1000 * percentile(itl, 99) if itl else None,
        "peak_mib": max(run.peak_bytes for run in runs) / MIB,
    }


def ratios(rounds: Sequence[Round], mode: str, rate: str) -> dict[str, Any] | None:
    """The engine over another mode, for each round, with median and spread; None if one is missing. The
    engine is the one with llama.cpp, if both of them ran."""
    ran = [name for name in (BATCHED, OPENVINO) if all(name in one for one in rounds)]
    if not ran or mode == ran[0]:
        return None
    engine, other = ([getattr(one[name], rate) for one in rounds] for name in (ran[0], mode))
    values = ratios_of(engine, other)
    if values is None:
        return None
    median = statistics.median(values)
    return {"rounds": values, "median": median, "min": min(values), "max": max(values)}


def summary(sequences: int, rounds: Sequence[Round]) -> dict[str, Any]:
    """Everything about one number of sequences."""
    return {
        "sequences": sequences,
        "modes": {
            mode: mode_summary([one[mode] for one in rounds])
            | {
                "decode_ratio": ratios(rounds, mode, "decode_tps"),
                "whole_ratio": ratios(rounds, mode, "whole_tps"),
            }
            for mode in rounds[0]
        },
        "runs": [
            {"round": i} | asdict(run) | {name: getattr(run, name) for name in _DERIVED}
            for i, one in enumerate(rounds)
            for run in one.values()
        ],
    }


_DERIVED = ("generated_tokens", "wall_s", *RATES)

_HEADER = (
    "sequences",
    "mode",
    "decode t/s",
    "engine / it (min-max)",
    "whole run t/s",
    "engine / it (min-max)",
    "prefill t/s",
    "TTFT p50 ms",
    "ITL p50 ms",
    "ITL p99 ms",
    "peak MiB",
)


def table(facts: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """A line of facts and a Markdown table. "Engine / it" is the ratio to the row's mode."""
    line = (
        machine_line(facts)
        + ", {prompt_tokens} prompt tokens, {max_tokens} generated; medians of {rounds} rounds; "
        "peak: resident memory of the mode's own process".format(**facts)
    )
    rows = []
    for result in results:
        for mode, figures in result["modes"].items():
            cells = (
                _cell(figures["decode_tps"]),
                _ratio(figures["decode_ratio"]),
                _cell(figures["whole_tps"]),
                _ratio(figures["whole_ratio"]),
                _cell(figures["prefill_tps"]),
                *(_cell(figures[f"{name}_ms"]) for name in ("ttft_p50", "itl_p50", "itl_p99")),
                f"{figures['peak_mib']:.0f}",
            )
            rows.append((result["sequences"], mode, *cells))
    return f"{line}\n\n{benchmark.table(_HEADER, rows)}"


def plot(facts: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """An SVG with a chart for each figure, by sequences, and a line for each mode."""
    panels = {
        "tokens/s, whole run": "whole_tps",
        "tokens/s while decoding": "decode_tps",
        "TTFT p50, ms": "ttft_p50_ms",
        "ITL p50, ms": "itl_p50_ms",
        "ITL p99, ms": "itl_p99_ms",
        "peak memory, MiB": "peak_mib",
    }
    charts = [
        Chart(
            title,
            [str(result["sequences"]) for result in results],
            {mode: [r["modes"][mode][name] for r in results] for mode in results[0]["modes"]},
        )
        for title, name in panels.items()
    ]
    return svg(machine_line(facts), "sequences", charts)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ratio(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else "{median:.2f} ({min:.2f}-{max:.2f})".format(**ratio)
