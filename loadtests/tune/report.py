"""The tables, the plot and the advice of `loadtests.tune`. Pure but for the files' sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from loadtests.common import benchmark
from loadtests.common.benchmark import spread
from loadtests.common.plot import Chart, svg
from loadtests.common.rounds import ratios
from loadtests.tune.quality import Reading
from loadtests.tune.speed import Load, Speed
from loadtests.tune.variants import Variant

MIB = 2**20


def formats_table(
    speeds: Mapping[Variant, Speed], readings: Mapping[Variant, Reading], load: Load, users: int
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


def ways_table(speeds: Mapping[Variant, Speed], load: Load, users: int) -> str:
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


def plot(title: str, speeds: Mapping[Variant, Speed], load: Load) -> str:
    """An SVG: speed of decoding and seconds of the load by sequences, a line for each variant."""
    places = [str(n) for n in load.sequences]
    decode, whole = {}, {}
    for variant, speed in speeds.items():
        decode[variant.name] = [speed.decode_tps[n] for n in load.sequences]
        whole[variant.name] = [speed.seconds(n) for n in load.sequences]
    charts = [
        Chart("tokens/s while decoding", places, decode),
        Chart("seconds of the whole load", places, whole),
    ]
    return svg(title, "sequences", charts)


def _speed_header(load: Load, users: int) -> tuple[str, ...]:
    decode = (f"{n} at once, t/s" for n in load.sequences)
    return ("prompts, t/s", *decode, "memory, MiB", f"time of {users} requests, to the first row")


def _speed_cells(speed: Speed, baseline: Speed, load: Load, users: int) -> Sequence[str]:
    times = ratios(speed.whole_s[users], baseline.whole_s[users]) or []
    return (
        f"{speed.prefill_tps:.0f}",
        *(f"{speed.decode_tps[n]:.1f}" for n in load.sequences),
        f"{speed.peak_bytes / MIB:.0f}",
        spread(times),
    )


def _way(variant: Variant) -> str:
    return variant.name.partition(", ")[2] or "defaults"
