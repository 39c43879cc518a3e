"""Parses commands by their programs' own parsers, and runs none of them.

    python -m tests.documents.options < commands.json

The input is a list of commands, each a list of words. The output is as many messages: what is wrong with
the command, or null. It is a process of its own, because Locust changes the modules of the one it is in.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import typer

from tests.documents.blocks import ROOT

FORWARDED = ("batch", "bench", "capacity", "tune")
"""Commands of `corral` that are programs of their own."""
_STOPS = (click.exceptions.Exit, typer.Exit)
"""What --help and --version raise; Typer has a click of its own."""


class _Parsed(Exception):  # noqa: N818
    """The program has read its command line."""


def problems(commands: Sequence[Sequence[str]]) -> list[str | None]:
    """What is wrong with each command, by its program, which is one of `PROGRAMS`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.documents.options"],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def _corral(words: Sequence[str]) -> None:
    from serve_app.cli import main

    def run(module: str, arguments: Sequence[str]) -> int:
        _module([module, *arguments])
        return 0

    corral = _command(main.app)
    if words and words[0] in FORWARDED:
        with patch.object(main, "_run", run):
            corral.main([*words], prog_name="corral", standalone_mode=False)
    else:
        _click(corral, words)


@cache
def _command(app: typer.Typer) -> Any:
    return typer.main.get_command(app)


def _click(group: Any, words: Sequence[str]) -> None:
    """Down to the subcommand, which reads its own options and arguments."""
    with group.make_context("program", [*words]) as above:
        rest = [*above._protected_args, *above.args]
        if rest:
            name, command, rest = group.resolve_command(above, rest)
            assert command is not None
            with command.make_context(name, rest, parent=above):
                pass


def _module(words: Sequence[str]) -> None:
    """A program that reads its options with argparse, up to where it has read them."""
    name, *rest = words
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.origin is None:
        raise click.UsageError(f"there is no module {name}")
    if not Path(spec.origin).is_relative_to(ROOT):
        return
    if "parse_args(" not in Path(spec.origin).read_text():
        if rest:
            raise click.UsageError(f"{name} takes no options")
        return
    real = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, *_: Any) -> None:
        real(parser, rest)
        raise _Parsed

    with (
        patch.object(argparse.ArgumentParser, "parse_args", parse),
        patch.object(sys, "argv", [name, *rest]),
        contextlib.suppress(_Parsed),
    ):
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        raise click.UsageError(f"{name} did not read its options")


def _locust(words: Sequence[str]) -> None:
    from locust.argument_parser import parse_options

    name = words[[*words].index("-f") + 1]
    importlib.import_module(".".join(Path(name).with_suffix("").parts))  # its own options
    parse_options([*words])


def _ray(words: Sequence[str]) -> None:
    _click(importlib.import_module("ray.scripts.scripts").cli, words)


def _serve(words: Sequence[str]) -> None:
    _click(importlib.import_module("ray.serve.scripts").cli, words)


PROGRAMS: dict[str, Callable[[Sequence[str]], None]] = {
    "corral": _corral,
    "locust": _locust,
    "python": _module,
    "ray": _ray,
    "serve": _serve,
}
"""Programs whose options are read; a module of `python -m` without these words."""
_ELSEWHERE = {"torch", "sglang_router"}
"""Modules of the extra `train`, and of other programs, which are not installed here."""


def _problem(command: Sequence[str]) -> str | None:
    program, *words = command
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            PROGRAMS[program](words)
    except SystemExit as error:
        return said.getvalue() if error.code else None
    except _STOPS:
        return None
    except ModuleNotFoundError as error:
        return None if error.name in _ELSEWHERE else repr(error)
    except Exception as error:
        told = getattr(error, "format_message", error.__repr__)
        return str(told())
    return None


if __name__ == "__main__":
    import locust  # before what it changes is in use

    assert locust
    problem = cache(_problem)  # many are said again and again
    print(json.dumps([problem(tuple(command)) for command in json.load(sys.stdin)]))
