"""How a model is served fastest on this machine: format, backend, threads, drafts, cache. No Ray, no HTTP.

    corral tune MODEL-f16.gguf --users 4

First, llama.cpp makes a file of each format of yours, and keeps them in FOLDER. All are served by the
engine in turns, A B C, C B A, each in a process of its own. A text is read by all: its perplexity, and how
often the likeliest next token is your file's, are what a format costs. Give an unquantised file (F16,
BF16): one that is quantised already loses a second time.

Then the format that does the load of --users requests at once in the least time is served in other
ways. One setting changes at a time. They are OpenVINO, threads, drafts of --draft or of the model's own
layers, attention, kind and format of the cache. A format whose perplexity is more than --worse above
your file's is shown, and not chosen. Prompts are parts of the text. As in a server, the layout of
weights is measured at the first start.

The tables and the lines for serve_config.yaml go to stdout, progress to stderr. Speed depends on what else
runs on the machine: mind the range.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from serve_app.base import folders
from serve_app.base.engine_options import EngineOptions, KernelsName
from serve_app.cli.measure import benchmark, quality
from serve_app.cli.measure.bench import WARM_UP_TOKENS, add_load_arguments, engine_options
from serve_app.cli.measure.process import MeasuredRun, RunnerProcess, engine_runner
from serve_app.cli.measure.quality import TextReading
from serve_app.kernels.llama import quantising
from serve_app.kernels.llama.model import Model
from serve_app.run.placement import machine as machine_of

AS_GIVEN = "as given"
FORMATS = ("Q4_0", "Q4_K_M", "IQ4_XS", "Q8_0")
"""Formats whose weights llama.cpp repacks, so that it multiplies them faster."""
MIB = 2**20
# Seconds of profiling at most, as in a server.
PROFILE_S = 27.0


@dataclass(frozen=True, slots=True)
class Variant:
    format: str
    """AS_GIVEN, or llama.cpp's name of a format."""
    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Differences from Corral's defaults: fields of `engine` in the configuration."""

    @property
    def way(self) -> str:
        return ", ".join(f"{name}: {json.dumps(value)}" for name, value in self.settings.items())

    @property
    def name(self) -> str:
        return f"{self.format}, {self.way}" if self.settings else self.format

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True, slots=True)
class TuneLoad:
    sequences: tuple[int, ...]
    """How many run at once, one number after the other."""
    prompt_tokens: int
    max_tokens: int
    rounds: int
    threads: int
    """The threads of variants that do not say."""


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """Medians of all rounds."""

    prefill_tps: float
    decode_tps: Mapping[int, float]
    """Generated tokens a second while all decode, by the number of sequences."""
    whole_s: Mapping[int, tuple[float, ...]]
    """Seconds of the whole load in each round, by the number of sequences."""
    peak_bytes: int

    def facts(self) -> dict[str, Any]:
        return {
            "prefill_tps": self.prefill_tps,
            "decode_tps": dict(self.decode_tps),
            "whole_s": {n: list(times) for n, times in self.whole_s.items()},
            "peak_mib": self.peak_bytes / MIB,
        }


def measure_variants(
    variants: Sequence[Variant],
    load: TuneLoad,
    draw: Callable[[int], benchmark.Prompt],
    on_visit: Callable[[], None],
) -> dict[Variant, MeasuredSpeed]:
    """The speed of each that can be served, in turns, so that a noisy machine is fair. `draw` gives a new
    prompt of so many tokens; `on_visit` is called after each visit. Raises BenchmarkError when the first
    cannot be served."""
    most = max(load.sequences)

    def visit(_number: int, variant: Variant) -> dict[int, MeasuredRun]:
        backend, options = backend_and_options(variant, load)
        opener = partial(engine_runner, backend)
        try:
            with RunnerProcess(variant.name, opener, variant.path, options) as process:
                process.run([draw(load.prompt_tokens)], WARM_UP_TOKENS)
                return {
                    n: process.run([draw(load.prompt_tokens) for _ in range(n)], load.max_tokens)
                    for n in load.sequences
                }
        finally:
            on_visit()

    able = list[Variant]()
    for variant in variants:
        try:
            visit(0, variant)
        except benchmark.BenchmarkError as error:
            if not able:
                raise
            print(f"Left out: {error}", file=sys.stderr)
        else:
            able.append(variant)
    rounds = benchmark.in_turns(able, load.rounds, visit, warm_up=False)
    return {
        variant: MeasuredSpeed(
            prefill_tps=statistics.median(runs[most].prefill_tps for runs in visits),
            decode_tps={
                n: statistics.median(runs[n].decode_tps or 0.0 for runs in visits)
                for n in load.sequences
            },
            whole_s={n: tuple(runs[n].wall_s for runs in visits) for n in load.sequences},
            peak_bytes=max(run.peak_bytes for runs in visits for run in runs.values()),
        )
        for variant, visits in benchmark.of_each(rounds)
    }


def backend_and_options(variant: Variant, load: TuneLoad) -> tuple[KernelsName, EngineOptions]:
    """The backend that serves a variant, and its options: those of `corral bench`, but profiled, and with
    drafts from the text, as in a server."""
    settings = {"threads": load.threads, "speculate": True, **variant.settings}
    backend = settings.pop("backend", "llama.cpp")
    draft = settings.pop("draft", {})
    if "source" in draft:
        settings["draft"] = Path(draft["source"]["path"])
    options = engine_options(
        max(load.sequences),
        load.prompt_tokens,
        load.max_tokens,
        own_layers="own_layers" in draft,
        profile_limit_s=PROFILE_S,
        profile_folder=folders.cache_folder() / "profiles",
        **settings,
    )
    return backend, options


def ways(
    best: Variant, n_physical: int, n_logical: int, drafts: Sequence[Mapping[str, Any]] = ()
) -> list[Variant]:
    """Ways to serve the best variant's file, a setting changed at a time. Corral's defaults come first."""
    counts = sorted({n for n in (n_physical // 2, n_logical) if n > 0} - {n_physical})
    changes: list[dict[str, Any]] = [
        {"backend": "openvino"},
        *({"threads": n} for n in counts),
        *({"draft": draft} for draft in drafts),
        {"flash_attn": False},
        {"kv_unified": True},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    ]
    return [best, *(Variant(best.format, best.path, change) for change in changes)]


def drafts_for(model: Model, draft: Path | None) -> list[dict[str, Any]]:
    """The settings of `draft` that a model can have: its own layers, and a file."""
    own: list[dict[str, Any]] = [{"own_layers": True}] if model.n_own_layers else []
    return own if draft is None else [*own, {"source": {"path": str(draft)}}]


def text_prompts(tokens: Sequence[int]) -> Callable[[int], benchmark.Prompt]:
    """Draws parts of a text as prompts, the same in every invocation."""
    random_places = random.Random(benchmark.SEED)

    def draw(n_tokens: int) -> benchmark.Prompt:
        start = random_places.randrange(max(1, len(tokens) - n_tokens))
        return tuple(tokens[start : start + n_tokens])

    return draw


def eligible(read: Mapping[Variant, TextReading], worse: float) -> list[Variant]:
    """The variants whose perplexity is at most so much above the first variant's, as a part of it."""
    most = next(iter(read.values())).perplexity * (1 + worse)
    return [variant for variant, reading in read.items() if reading.perplexity <= most]


def fastest(
    speeds: Mapping[Variant, MeasuredSpeed], users: int, eligible: Sequence[Variant]
) -> Variant:
    """The eligible variant with the least median time for so many users; the earliest of equals."""
    return min(eligible, key=lambda variant: statistics.median(speeds[variant].whole_s[users]))


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
        (variant.way or "defaults", *_speed_cells(speed, speeds[default], load, users))
        for variant, speed in speeds.items()
    ]
    return benchmark.table(("engine", *_speed_header(load, users)), rows)


def _speed_header(load: TuneLoad, users: int) -> tuple[str, ...]:
    decode = (f"{n} at once, t/s" for n in load.sequences)
    return ("prompts, t/s", *decode, "memory, MiB", f"time of {users} requests, to the first row")


def _speed_cells(
    speed: MeasuredSpeed, baseline: MeasuredSpeed, load: TuneLoad, users: int
) -> Sequence[str]:
    times = benchmark.ratios(speed.whole_s[users], baseline.whole_s[users]) or []
    return (
        f"{speed.prefill_tps:.0f}",
        *(f"{speed.decode_tps[n]:.1f}" for n in load.sequences),
        f"{speed.peak_bytes / MIB:.0f}",
        benchmark.spread(times),
    )


def advice(best: Variant, *, is_given: bool) -> str:
    model: dict[str, Any] = {"id": best.path.stem, "source": {"path": str(best.path)}}
    if best.settings:
        model["engine"] = dict(best.settings)
    lines = yaml.safe_dump({"models": [model]}, sort_keys=False, width=100)
    head = "Your file as it is" if is_given else f"The {best.format} file"
    use = "Put this under `args` of serve_config.yaml"
    return f"{head} is the fastest choice for this load. {use}:\n\n{lines}"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's settings; `sequences` has the number of users, too."""
    parser = benchmark.Parser(prog="corral tune", description=__doc__)
    parser.add_model(f"{benchmark.MODEL}; best F16 or BF16", type=Path)
    add, folder = parser.add_argument, folders.cache_folder() / "tuned"
    formats = benchmark.list_of(benchmark.choice(*quantising.FORMATS))
    add("--formats", type=formats, default=FORMATS, help="the formats that are tried")
    users = "requests at once, for which the fastest is chosen"
    add("--users", type=benchmark.number_between(1, 64), default=4, help=users)
    add_load_arguments(parser)
    parser.set_defaults(
        sequences=(1, 4, 16), max_tokens=32, threads=machine_of.read_machine().n_cores
    )
    draft = "a draft model of the same vocabulary, to be tried"
    add("--draft", type=Path, default=None, help=draft)
    text = "a text like yours, for the perplexity and as prompts"
    add("--text", type=Path, default=None, help=text)
    add(
        "--windows",
        type=benchmark.number_between(1, 1000),
        default=8,
        help="parts of the text that are read",
    )
    worse = "how much higher the perplexity of the chosen format may be, as a part"
    add("--worse", type=benchmark.number_between(0.0, 1e6), default=0.03, help=worse)
    add("--folder", type=Path, default=folder, help="where the made files stay")
    add("--json", type=benchmark.new_file, default=None, help="a file for all figures")
    args = parser.parse_args(argv)
    if args.model is None:
        parser.error("MODEL is needed: the file to make others of.")
    args.sequences = tuple(sorted({*args.sequences, args.users}))
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables and the advice, write the files."""
    args = parse_args(argv)
    args.model = benchmark.model_file(args.model)
    benchmark.check_files(args.draft, args.text)
    users, threads = args.users, args.threads
    load = TuneLoad(args.sequences, args.prompt_tokens, args.max_tokens, args.rounds, threads)
    facts = benchmark.machine(args.model, threads)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))

    def time_variants(title: str, variants: Sequence[Variant]) -> dict[Variant, MeasuredSpeed]:
        task = progress.add_task(title, total=len(variants) * (1 + load.rounds))
        return measure_variants(
            variants, load, text_prompts(tokens), lambda: progress.advance(task)
        )

    try:
        with progress:
            variants = [Variant(AS_GIVEN, args.model)]
            for name in progress.track(args.formats, description="making files"):
                path = quality.quantised_file(args.model, name, args.folder, threads)
                variants.append(Variant(name, path))
            text = quality.default_text() if args.text is None else args.text.read_text()
            model = Model(args.model, vocab_only=True)
            tokens = model.tokenize(text, add_special=False, parse_special=False)
            readings = {
                variant: quality.read_windows(variant.path, text, args.windows, threads)
                for variant in progress.track(variants, description="reading a text")
            }
            by_format = time_variants("formats", variants)
            best = fastest(by_format, users, eligible(readings, args.worse))
            drafts = drafts_for(model, args.draft)
            others = ways(best, threads, machine_of.read_machine().n_cpus, drafts)
            by_way = time_variants(f"ways to serve {best.format}", others)
    except (benchmark.BenchmarkError, ValueError, OSError) as error:
        sys.exit(str(error))
    chosen = fastest(by_way, users, list(by_way))
    print(f"{benchmark.machine_line(facts)}; medians of {load.rounds} rounds\n")
    print(formats_table(by_format, readings, load, users), end="\n\n")
    print(f"{best.format}, served in other ways:\n\n{ways_table(by_way, load, users)}\n")
    print(advice(chosen, is_given=chosen.path == args.model))
    if args.json is not None:
        results = {variant.name: speed.facts() for variant, speed in (by_format | by_way).items()}
        args.json.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
