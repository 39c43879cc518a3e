"""Answer a file of requests, or a column of a table, without a server.

    corral batch tickets.csv answers.jsonl --model MODEL.gguf --column text

INPUT is a file, or a folder of files: JSON lines, Parquet or CSV. Without --column, each row is a request
of OpenAI's batch format, with `custom_id`, `url` and `body`. With it, that column is the user's message (or
the list of messages), the prompt of /v1/completions, or the text of /v1/embeddings.

OUTPUT is a folder of parts, or, if it ends in .jsonl, a file; its parts are in OUTPUT.parts until all are
done. A line that cannot be answered has an `error`; the others go on. The same command goes on where it was
stopped or killed.

Ray Data runs it: on this machine, or on the cluster of RAY_ADDRESS, where every node must see INPUT, OUTPUT
and the model. Each engine has its lease of cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve_app.base.errors import ConfigError
from serve_app.cli.config_file import ServeOptions, document
from serve_app.cli.measure.benchmark import Parser
from serve_app.config import schema
from serve_app.config.resolved import ResolvedModel

_LINES_PER_PART = 128


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="corral batch", description=__doc__)
    add = parser.add_argument
    add("input", type=Path, help="a file, or a folder of files")
    add("output", type=Path, help="a folder of parts, or a .jsonl file")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="as for `corral serve`; by default the built-in one")
    config = "a configuration file, whose first model is used"
    which.add_argument("--config", type=Path, help=config)
    add("--column", help="the column with the questions; without it, rows are requests")
    add("--endpoint", help="the route that --column is for; by default chat")
    add("--system", help="a system prompt for each row")
    fields = "fields for each request, as '{\"max_tokens\": 64}'"
    add("--fields", type=json.loads, default={}, help=fields)
    add("--slots", type=int, help="requests of an engine that run at once")
    add("--context", type=int, help="tokens of a slot")
    add("--threads", type=int, help="threads of an engine")
    add("--replicas", type=int, help="engines; by default as many as have room")
    lines = "lines that are written at once"
    add("--lines-per-part", type=int, default=_LINES_PER_PART, help=lines)
    return parser.parse_args(argv)


def resolve_model(args: argparse.Namespace) -> ResolvedModel:
    """The model, and how it is served here. Raises ConfigError."""
    from serve_app.run.resolving import resolve

    if args.config is not None:
        app = schema.load(args.config)
    else:
        models = () if args.model is None else (args.model,)
        options = ServeOptions(models, slots=args.slots, context=args.context, threads=args.threads)
        app = schema.parse(document(options)["applications"][0]["args"])
    alone = app.model_copy(update={"models": app.models[:1], "manage_models": False})
    return resolve(alone)[0]


def connect() -> float:
    """Connect to a cluster's Ray, or to one of this process alone that only tells errors; its CPUs."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    import ray

    local: dict[str, Any] = {"include_dashboard": False}
    ray.init(
        log_to_driver=False,
        logging_level=logging.ERROR,
        **({} if os.environ.get("RAY_ADDRESS") else local),
    )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get("CPU", 1.0)


def answer(args: argparse.Namespace) -> int:
    """Do the work, and say how it went. 1 if a line has an error. Raises ConfigError."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    from serve_app.plugins.batch import parts, run
    from serve_app.plugins.batch.answerer import PartSettings
    from serve_app.plugins.batch.rows import CHAT, ENDPOINTS, Reading

    path = args.endpoint or CHAT
    if path not in ENDPOINTS or not isinstance(args.fields, dict):
        raise ConfigError(
            f"--endpoint is one of {', '.join(ENDPOINTS)}; --fields is a JSON object."
        )
    files = run.inputs(args.input)
    is_file = args.output.suffix == ".jsonl"
    folder = args.output.with_name(args.output.name + ".parts") if is_file else args.output
    if is_file and args.output.exists():
        raise ConfigError(f"{args.output} is there already.")
    model = resolve_model(args)
    reading = Reading(path, args.column, args.system, args.fields)
    work = PartSettings(model, reading, folder.resolve())
    n_replicas = args.replicas or max(1, int(connect() / model.num_cpus))
    began = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    n_bytes = sum(Path(file).stat().st_size for file in files)
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=n_bytes)

        def show(done: run.Done) -> None:
            progress.update(
                task, completed=done.read, description=done.summary(time.monotonic() - began)
            )

        done = run.run(files, work, args.lines_per_part, n_replicas, show)
    if is_file:
        parts.join(folder, args.output)
        shutil.rmtree(folder)
    print(f"{done.summary(time.monotonic() - began)}. The answers are in {args.output}.")
    return int(done.errors > 0)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        status = answer(args)
    except ConfigError as error:
        sys.exit(str(error))
    sys.exit(status)


if __name__ == "__main__":
    main()
