"""The table and the plot of `loadtests.engine`: medians and ratios of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from loadtests.common.plot import Chart, svg
from loadtests.engine.modes import BATCHED, OPENVINO
from loadtests.engine.run import AnyRun
from serve_app.cli.measure import bench, benchmark
from serve_app.cli.measure.benchmark import machine_line
from serve_app.cli.measure.benchmark import ratios as ratios_of

Round = Mapping[str, AnyRun]
"""One run of each mode, by its name, with the same prompts."""


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
            mode: bench.summary([one[mode] for one in rounds])
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


_DERIVED = ("generated_tokens", "wall_s", *bench.RATES)

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
                bench.cell(figures["decode_tps"]),
                _ratio(figures["decode_ratio"]),
                bench.cell(figures["whole_tps"]),
                _ratio(figures["whole_ratio"]),
                bench.cell(figures["prefill_tps"]),
                *(bench.cell(figures[f"{name}_ms"]) for name in ("ttft_p50", "itl_p50", "itl_p99")),
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


def _ratio(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else "{median:.2f} ({min:.2f}-{max:.2f})".format(**ratio)
