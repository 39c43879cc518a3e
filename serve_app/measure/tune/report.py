"""The tables and the advice of `corral tune`. Pure but for the files' sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from serve_app.measure import benchmark
from serve_app.measure.benchmark import spread
from serve_app.measure.rounds import ratios
from serve_app.measure.tune.quality import TextReading
from serve_app.measure.tune.speed import MeasuredSpeed, TuneLoad
from serve_app.measure.tune.variants import Variant

MIB = 2**20


def formats_table(
    speeds: Mapping[Variant, MeasuredSpeed],
    readings: Mapping[Variant, TextReading],
    load: TuneLoad,
    users: int,
) -> str:
    """A Markdown table with a row for each format; the first is what the others are compared with."""
    original = next(iter(speeds))
    header = ("format", "file, MiB", "perplexity", "same token", *_speed_header(load, users))
    rows = [
        (
            variant.format,
            f"{variant.path.stat().st_size / MIB:.0f}",
            f"{readings[variant].perplexity:.2f}",
            f"{readings[variant].agreement(readings[original]):.0%}",
            *_speed_cells(speed, speeds[original], load, users),
        )
        for variant, speed in speeds.items()
    ]
    return benchmark.table(header, rows)


def ways_table(speeds: Mapping[Variant, MeasuredSpeed], load: TuneLoad, users: int) -> str:
    """A Markdown table with a row for each way to serve a file; the first are Corral's defaults."""
    default = next(iter(speeds))
    rows = [
        (_way(variant), *_speed_cells(speed, speeds[default], load, users))
        for variant, speed in speeds.items()
    ]
    return benchmark.table(("engine", *_speed_header(load, users)), rows)


def advice(best: Variant, *, is_given: bool) -> str:
    """The lines for `serve_config.yaml` that serve the best variant."""
    model: dict[str, Any] = {"id": best.path.stem, "source": {"path": str(best.path)}}
    if best.settings:
        model["engine"] = dict(best.settings)
    lines = yaml.safe_dump({"models": [model]}, sort_keys=False, width=100)
    head = "Your file as it is" if is_given else f"The {best.format} file"
    use = "Put this under `args` of serve_config.yaml"
    return f"{head} is the fastest choice for this load. {use}:\n\n{lines}"


def _speed_header(load: TuneLoad, users: int) -> tuple[str, ...]:
    decode = (f"{n} at once, t/s" for n in load.sequences)
    return ("prompts, t/s", *decode, "memory, MiB", f"time of {users} requests, to the first row")


def _speed_cells(
    speed: MeasuredSpeed, baseline: MeasuredSpeed, load: TuneLoad, users: int
) -> Sequence[str]:
    times = ratios(speed.whole_s[users], baseline.whole_s[users]) or []
    return (
        f"{speed.prefill_tps:.0f}",
        *(f"{speed.decode_tps[n]:.1f}" for n in load.sequences),
        f"{speed.peak_bytes / MIB:.0f}",
        spread(times),
    )


def _way(variant: Variant) -> str:
    return variant.name.partition(", ")[2] or "defaults"
