"""Commands that measure, as programs of their own with what newcomers would leave out."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

import typer

from serve_app.builtin_model import BUILTIN_MODEL
from serve_app.cli.client import DEFAULT_URL

_SLO = "ttft_p95=2s,itl_p95=150ms"


def bench(arguments: Sequence[str]) -> int:
    """Run `python -m serve_app.measure.bench`, by default of the built-in model; its exit status."""
    options = [*arguments]
    if not _has(options, "--model", "-h", "--help"):
        options += ["--model", str(BUILTIN_MODEL)]
    return _run("serve_app.measure.bench", options)


def batch(arguments: Sequence[str]) -> int:
    """`python -m serve_app.batch`; its exit status."""
    return _run("serve_app.batch", arguments, needs=("pyarrow", "pandas"), extra="batch")


def tune(arguments: Sequence[str]) -> int:
    """Run `python -m serve_app.measure.tune`; its exit status."""
    return _run("serve_app.measure.tune", arguments)


def capacity(arguments: Sequence[str]) -> int:
    """Run `python -m serve_app.measure.capacity`; its exit status."""
    options = [*arguments]
    if not _has(options, "-h", "--help"):
        if not _has(options, "--url", "--configs"):
            options += ["--url", DEFAULT_URL]
        if not _has(options, "--slo"):
            options += ["--slo", _SLO]
    return _run("serve_app.measure.capacity", options)


def _has(arguments: Sequence[str], *names: str) -> bool:
    return any(argument.partition("=")[0] in names for argument in arguments)


def _run(module: str, arguments: Sequence[str], needs: Sequence[str] = (), extra: str = "") -> int:
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        typer.echo(
            f"This command needs {' and '.join(missing)}. To install what it needs, run: "
            f"{sys.executable} -m pip install 'corral[{extra}]'",
            err=True,
        )
        return 1
    return subprocess.run([sys.executable, "-P", "-m", module, *arguments], check=False).returncode
