"""A server under load, as one page: throughput, latency, replicas, queue and memory against users.

    python -m loadtests.load.report run (--url URL | --config FILE) [--users 1,4,8,16] [--mixes MIX ...]
        [--seconds 60] [--think 5] [--seed 20] [--model NAME] --out FOLDER
    python -m loadtests.load.report compare A/report.json B/report.json

`run` puts every mix of users on the server, with every number of them, one load after the other, and writes
report.json, report.md and report.html, which needs nothing else. `compare` prints two runs side by side.
Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loadtests.common.servers import exit_on_sigterm
from loadtests.load import report_page
from loadtests.load.driver import Load, LoadError, Result, drive
from loadtests.load.stream_metrics import Slo
from loadtests.load.target import Target, opened
from serve_app.cli.measure.benchmark import SEED, cpu_name, list_of, number_between, usable_cores
from serve_app.cli.measure.users import parse_mix

MIXES = ("chat=1", "rag=1", "agent=1", "code=1", "batch=1", "chat=6,rag=2,agent=1,code=2,batch=1")
JSON, MARKDOWN, HTML = "report.json", "report.md", "report.html"


def facts(target: Target) -> dict[str, Any]:
    """The facts that the figures depend on."""
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "versions": {
            name: version(name) for name in ("corral", "locust", "llama-cpp-python", "ray")
        },
        "url": target.url if target.directory is None else "started for this",
        "config": target.config,
        "server": [
            {"model": model["id"]}
            | {name: replica["engine"][name] for name in ("n_slots", "n_ctx_slot")}
            | {
                name: replica["engine"]["compute"][name]
                for name in ("threads", "kv_unified", "flash_attn")
            }
            for model in target.stats()["models"]
            for replica in model["replicas"]
        ],
    }


def run(target: Target, loads: Sequence[Load]) -> dict[str, Any]:
    """All loads, one after the other. Raises LoadError if one cannot be put on the server."""
    document: dict[str, Any] = {"facts": facts(target), "runs": []}
    for number, load in enumerate(loads, 1):
        print(
            f"{number}/{len(loads)}: {load.users} users, {load.mix}, {load.run_s} s ...",
            file=sys.stderr,
            flush=True,
        )
        result = drive(target, load)
        print(f"    {_line(result)}", file=sys.stderr, flush=True)
        document["runs"].append(result.document())
    return document


def _line(result: Result) -> str:
    found = result.figures()
    names = ("tokens_per_s", "goodput_per_s", "ttft_p95_s", "itl_p95_ms")
    values = ", ".join(f"{name} {report_page.number(found[name])}" for name in names)
    other = "" if result.other_cores is None else f"; others {result.other_cores:.1f} cores"
    return f"{values}; {result.accounts}; client {result.client_share:.0%} of a core{other}"


def write(document: dict[str, Any], folder: Path) -> None:
    """The three files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON).write_text(json.dumps(document, indent=1) + "\n")
    (folder / MARKDOWN).write_text(report_page.markdown(document))
    (folder / HTML).write_text(report_page.html(document))


def _mix(text: str) -> str:
    """An argument's type: a mix, as its text. Raises ArgumentTypeError."""
    parse_mix(text)
    return text


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's settings."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.load.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run")
    where = measure.add_mutually_exclusive_group(required=True)
    where.add_argument("--url")
    where.add_argument("--config", type=Path)
    measure.add_argument("--users", type=list_of(number_between(1, 1000)), default=(1, 4, 8, 16))
    measure.add_argument("--mixes", nargs="+", type=_mix, default=MIXES)
    measure.add_argument("--seconds", type=number_between(5, 3600), default=60)
    measure.add_argument("--think", type=float, default=5.0)
    measure.add_argument("--seed", type=int, default=SEED)
    measure.add_argument("--slo-ttft", type=float, default=2.0)
    measure.add_argument("--slo-itl", type=float, default=0.15)
    measure.add_argument("--model", default="")
    measure.add_argument("--out", type=Path, required=True)
    compare = commands.add_parser("compare")
    compare.add_argument("files", type=Path, nargs=2, metavar="REPORT.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run or compare."""
    args = parse_args(argv)
    if args.command == "compare":
        one, other = (json.loads(path.read_text()) for path in args.files)
        print(report_page.comparison(one, other))
        return
    slo = Slo(args.slo_ttft, args.slo_itl)
    loads = [
        Load(users, args.seconds, mix, args.think, args.seed, args.model, slo)
        for mix in args.mixes
        for users in args.users
    ]
    with opened(args.url, args.config) as target:
        try:
            document = run(target, loads)
        except LoadError as error:
            sys.exit(str(error))
    write(document, args.out)
    print(args.out / HTML)


if __name__ == "__main__":
    exit_on_sigterm()
    main()
