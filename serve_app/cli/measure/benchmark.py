"""Prompts, rounds, percentiles, facts of the machine, tables, and the types of arguments.

A machine that others use as well changes its speed from minute to minute. So only what is close
together is compared: the ways of one round. They take turns (A B C, C B A, ...), so that no drift
favours one of them.
"""

from __future__ import annotations

import argparse
import inspect
import os
import platform
import random
import re
import statistics
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer

from serve_app.base.errors import ConfigError

SEED = 20
MODEL = "a GGUF file, or a Hugging Face repository as OWNER/NAME or OWNER/NAME:QUANT"

Prompt = tuple[int, ...]

T = TypeVar("T")
Number = TypeVar("Number", int, float)


class BenchmarkError(Exception):
    """A mode failed, or did other work than the others: there is nothing to compare."""


class Prompts:
    """Random prompts, the same for the same vocabulary and seed. No two begin alike."""

    def __init__(self, vocabulary: Sequence[int], seed: int = SEED) -> None:
        self._vocabulary = vocabulary
        self._rng = random.Random(seed)

    def draw(self, n_tokens: int) -> Prompt:
        return tuple(self._rng.choices(self._vocabulary, k=n_tokens))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which that many percent lie, interpolated; `values` in any order."""
    return float(np.percentile(values, percent))


def peak_bytes(pid: int | str = "self") -> int:
    """The most memory that a process has had resident so far (VmHWM), mapped weights included;
    0 if it has ended. Unlike `ru_maxrss`, it knows nothing of the process that started this one."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.M)
    return 1024 * int(found[1]) if found else 0


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name"))
    return next(names, platform.machine())


def machine_and_model(model: Path) -> dict[str, Any]:
    """The facts that all figures depend on. `model_mb` is in units of 10^6 bytes."""
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "model": model.name,
        "model_mb": round(model.stat().st_size / 1e6),
    }


def machine(model: Path, threads: int) -> dict[str, Any]:
    """The facts that an engine's figures depend on."""
    return machine_and_model(model) | {
        "llama_cpp_python": version("llama-cpp-python"),
        "threads": threads,
    }


def machine_line(facts: dict[str, Any]) -> str:
    return (
        "{cpu}, {cores} cores, {model} ({model_mb} MB), llama-cpp-python {llama_cpp_python}, "
        "{threads} threads".format(**facts)
    )


def spread(values: Sequence[float]) -> str:
    """Median (min-max); a dash if there are none."""
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join([_row(header), _row(["---"] * len(header)), *map(_row, rows)])


class Parser(argparse.ArgumentParser):
    """The arguments of a command that is a program of its own. Its help looks like the other commands'."""

    def add_model(self, what: str, **options: Any) -> None:
        """Take MODEL as the other commands do, or as `--model MODEL`, with these options of an argument."""
        self.add_argument("--model", help=argparse.SUPPRESS, **options)
        options |= {"default": None, "action": _OwnArgument}
        self.add_argument("model", nargs="?", metavar="MODEL", help=what, **options)

    def print_help(self, file: Any = None) -> None:
        def command(**_: object) -> None:
            """Is never called: Typer reads its signature."""

        shown = [one for one in self._actions if one.help != argparse.SUPPRESS]
        signature = inspect.Signature([_parameter(one) for one in shown if one.dest != "help"])
        command.__signature__ = signature  # type: ignore[attr-defined]
        app = typer.Typer(
            rich_markup_mode="markdown",
            add_completion=False,
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        app.command(help=self.description)(command)
        app(["--help"], prog_name=self.prog, standalone_mode=False)


class _OwnArgument(argparse.Action):
    """An argument that leaves the option of its name alone where it is not given."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, _name: Any = None) -> None:
        if values is not None:
            setattr(namespace, self.dest, values)


def _parameter(action: argparse.Action) -> inspect.Parameter:
    """An argument as Typer knows it: its names, its default as a text, and what it is."""
    default, what = action.default, action.help or ""
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    has_default = default not in (None, "", argparse.SUPPRESS)
    what = f"{what[:1].upper()}{what[1:]}."
    if action.option_strings:
        told = typer.Option(*action.option_strings, help=what)
    else:
        told = typer.Argument(metavar=str(action.metavar or action.dest).upper(), help=what)
    kind: Any = bool if action.nargs == 0 else str
    if kind is str:
        default = str(default) if has_default else None
        kind = str if has_default or action.required else str | None
    if action.required:
        default = inspect.Parameter.empty
    keyword, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[kind, told]
    return inspect.Parameter(action.dest, keyword, default=default, annotation=annotation)


def model_file(model: Path) -> Path:
    """The file of what MODEL names, downloaded first if it has to be. Ends the program if there is none."""
    from serve_app.cli.config_file import named_model
    from serve_app.config.sources import DownloadsConfig, ModelSource
    from serve_app.store.models import locate

    try:
        source = ModelSource.model_validate(named_model(str(model)).source)
        return locate(source, DownloadsConfig(), lambda _: None)
    except ConfigError as error:
        sys.exit(str(error))


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def number_between(low: Number, high: Number) -> Callable[[str], Number]:
    """An argument's type: an integer between the two, both included; or a number, if these are floats."""

    def number(text: str) -> Number:
        with suppress(ValueError):
            if low <= (value := type(low)(text)) <= high:
                return value
        kind = "an integer" if isinstance(low, int) else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind} between {low} and {high}.")

    return number


def check_files(*paths: Path | None) -> None:
    """End the program if a file is missing that it is to read, before anything is measured."""
    for path in paths:
        if path is not None and not path.is_file():
            sys.exit(f"There is no file {path}.")


def new_file(text: str) -> Path:
    """An argument's type: a file that can be written once all is measured."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that is there.")
    return path


def list_of(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """An argument's type: values between commas, each once."""

    def values(text: str) -> tuple[T, ...]:
        return tuple(dict.fromkeys(parse(part) for part in text.split(",")))

    return values


def choice(*names: str) -> Callable[[str], str]:
    """An argument's type: one of the names."""

    def name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}.")
        return text

    return name


Way = TypeVar("Way", bound=Hashable)
Measured = TypeVar("Measured")


def turns(ways: Sequence[Way], number: int) -> Sequence[Way]:
    """The ways in the order of the round of this number: even ones as they are, odd ones backwards."""
    return ways[::-1] if number % 2 else ways


def in_turns(
    ways: Sequence[Way],
    n_rounds: int,
    measure: Callable[[int, Way], Measured],
    *,
    warm_up: bool = True,
) -> list[dict[Way, Measured]]:
    """Each round's results by way. `measure(number, way)` is called for every way in the rounds 1 to
    `n_rounds`, and before them in round 0, to warm up. Raises what it raises."""
    found = []
    for number in range(0 if warm_up else 1, n_rounds + 1):
        measured = {way: measure(number, way) for way in turns(ways, number)}
        if number:
            found.append({way: measured[way] for way in ways})
    return found


def of_each(rounds: Sequence[Mapping[Way, Measured]]) -> Iterator[tuple[Way, list[Measured]]]:
    """The ways, each with what was measured of it in all rounds."""
    for way in rounds[0]:
        yield way, [one[way] for one in rounds]


def ratios(values: Sequence[float | None], baseline: Sequence[float | None]) -> list[float] | None:
    """The values over the baseline's of the same rounds; None if one is unknown, or the baseline's is 0."""
    found = []
    for value, other in zip(values, baseline, strict=True):
        if value is None or not other:
            return None
        found.append(value / other)
    return found
