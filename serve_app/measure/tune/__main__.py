"""How a model is served fastest on this machine: format, threads, cache, attention. No Ray, no HTTP.

    python -m serve_app.measure.tune --model PATH [--formats Q4_0,Q4_K_M,IQ4_XS,Q8_0] [--users 4]
        [--sequences 1,4,16] [--prompt-tokens 128] [--max-tokens 32] [--rounds 3] [--threads N]
        [--text FILE] [--windows 8] [--worse 0.03] [--folder FOLDER] [--json FILE]

First, llama.cpp makes a file of each format of yours, and keeps them in FOLDER. All are served by the
engine in turns, A B C, C B A, each in a process of its own. A text is read by all: its perplexity, and how
often the likeliest next token is your file's, are what a format costs. Give an unquantised file (F16,
BF16): one that is quantised already loses a second time.

Then the format that does the load of --users requests at once in the least time is served in other ways, a
setting at a time: threads, attention, kind and format of the cache. A format whose perplexity is more
than --worse above your file's is shown, and not chosen.

The tables and the lines for serve_config.yaml go to stdout, progress to stderr. Speed depends on what else
runs on the machine: mind the range.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from serve_app import folders
from serve_app.llama import quantising
from serve_app.measure.benchmark import (
    BenchmarkError,
    Prompts,
    bounded,
    choice,
    listed,
    machine,
    machine_line,
)
from serve_app.measure.process import text_tokens
from serve_app.measure.tune import quality, quantise, report, speed
from serve_app.measure.tune.quality import TextReading
from serve_app.measure.tune.speed import MeasuredSpeed, TuneLoad
from serve_app.measure.tune.variants import AS_GIVEN, Variant, fastest, ways
from serve_app.placement import machine as machine_of

FORMATS = ("Q4_0", "Q4_K_M", "IQ4_XS", "Q8_0")
"""Formats whose weights llama.cpp repacks, so that it multiplies them faster."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one invocation."""

    model: Path
    formats: tuple[str, ...]
    users: int
    load: TuneLoad
    text: Path | None
    windows: int
    worse: float
    folder: Path


class TuneProgress:
    """The progress bar."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))

    def __enter__(self) -> TuneProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, what: str, n: int) -> None:
        """So many steps of this follow."""
        self._task = self._progress.add_task(what, total=n)

    def step(self, _what: str = "") -> None:
        """One is done."""
        self._progress.advance(self._task)


def files(settings: Settings, screen: TuneProgress) -> list[Variant]:
    """Yours, and one of each format."""
    variants = [Variant(AS_GIVEN, settings.model)]
    screen.begin("making files", len(settings.formats))
    for name in settings.formats:
        path = quantise.quantised(settings.model, name, settings.folder, settings.load.threads)
        variants.append(Variant(name, path))
        screen.step()
    return variants


def readings(
    variants: Sequence[Variant], settings: Settings, screen: TuneProgress
) -> dict[Variant, TextReading]:
    """How each reads the text."""
    text = quality.default_text() if settings.text is None else settings.text.read_text()
    screen.begin("reading a text", len(variants))
    by_variant = {}
    for variant in variants:
        by_variant[variant] = quality.read(
            variant.path, text, settings.windows, settings.load.threads
        )
        screen.step()
    return by_variant


def timed(
    what: str, variants: Sequence[Variant], settings: Settings, screen: TuneProgress
) -> dict[Variant, MeasuredSpeed]:
    """How fast each is."""
    screen.begin(what, settings.load.visits(len(variants)))
    prompts = Prompts(text_tokens(settings.model))
    return speed.measure(variants, settings.load, prompts.draw, screen.step)


def eligible(read: Mapping[Variant, TextReading], worse: float) -> list[Variant]:
    """The variants whose perplexity is at most so much above the first variant's, as a part of it."""
    most = next(iter(read.values())).perplexity * (1 + worse)
    return [variant for variant, reading in read.items() if reading.perplexity <= most]


def parse_args(argv: Sequence[str] | None) -> tuple[Settings, Path | None]:
    """The settings, and where the JSON goes."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.measure.tune", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, best F16 or BF16")
    parser.add_argument(
        "--formats",
        type=listed(choice(*quantising.FORMATS)),
        default=FORMATS,
        help="the formats that are tried",
    )
    parser.add_argument(
        "--users",
        type=bounded(1, 64),
        default=4,
        help="requests at once, for which the fastest is chosen",
    )
    parser.add_argument(
        "--sequences",
        type=listed(bounded(1, 64)),
        default=(1, 4, 16),
        help="other numbers of requests at once, which the tables show",
    )
    parser.add_argument(
        "--prompt-tokens", type=bounded(1, 8192), default=128, help="tokens of each prompt"
    )
    parser.add_argument(
        "--max-tokens", type=bounded(8, 4096), default=32, help="tokens that each request generates"
    )
    parser.add_argument(
        "--rounds", type=bounded(1, 50), default=3, help="runs of each format and setting"
    )
    parser.add_argument(
        "--threads",
        type=bounded(1, 512),
        default=machine_of.read().n_cores,
        help="threads that compute; by default one for each core",
    )
    parser.add_argument(
        "--text", type=Path, default=None, help="a text like yours, for the perplexity"
    )
    parser.add_argument(
        "--windows", type=bounded(1, 1000), default=8, help="parts of the text that are read"
    )
    parser.add_argument(
        "--worse",
        type=float,
        default=0.03,
        help="how much higher the perplexity of the chosen format may be, as a part",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=folders.cache_folder() / "tuned",
        help="where the made files stay",
    )
    parser.add_argument("--json", type=Path, default=None, help="a file for all figures")
    args = parser.parse_args(argv)
    sequences = tuple(sorted({*args.sequences, args.users}))
    load = TuneLoad(sequences, args.prompt_tokens, args.max_tokens, args.rounds, args.threads)
    settings = Settings(
        args.model, args.formats, args.users, load, args.text, args.windows, args.worse, args.folder
    )
    return settings, args.json


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables and the advice, write the files."""
    settings, json_file = parse_args(argv)
    load, users = settings.load, settings.users
    facts = machine(settings.model, load.threads)
    try:
        with TuneProgress() as screen:
            variants = files(settings, screen)
            read = readings(variants, settings, screen)
            by_format = timed("formats", variants, settings, screen)
            allowed = eligible(read, settings.worse)
            best = fastest({one: found.seconds(users) for one, found in by_format.items()}, allowed)
            others = ways(best, load.threads, machine_of.read().n_cpus)
            by_way = timed(f"ways to serve {best.format}", others, settings, screen)
    except (BenchmarkError, ValueError, OSError) as error:
        sys.exit(str(error))
    chosen = fastest({one: found.seconds(users) for one, found in by_way.items()}, others)
    print(f"{machine_line(facts)}; medians of {load.rounds} rounds\n")
    print(report.formats_table(by_format, read, load, users), end="\n\n")
    print(f"{best.format}, served in other ways:\n\n{report.ways_table(by_way, load, users)}\n")
    print(report.advice(chosen, is_given=chosen.path == settings.model))
    if json_file is not None:
        results = {one.name: found.facts() for one, found in (by_format | by_way).items()}
        json_file.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
