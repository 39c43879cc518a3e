"""Tables of environment variables and of metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer
from ray.util.metrics import Metric

from serve_app.base.metrics import make_with
from serve_app.cli.main import app
from serve_app.cluster.process import use_rays_exporter
from serve_app.run.replica.reporting import ReplicaMetrics, lost_replicas
from serve_app.server.usage.key_metrics import KeyMetrics
from serve_app.server.usage.ledger import COUNTS
from tests.documents.tables import table

_ROOT = Path(__file__).parents[2]


def options() -> str:
    """The command's variables."""
    found: dict[str, tuple[set[str], str, str]] = {}
    group: Any = typer.main.get_command(app)
    for command in group.commands.values():
        for one in command.params:
            if one.envvar:
                names, _, _ = found.setdefault(one.envvar, (set(), one.opts[0], one.help or ""))
                names.add(f"`corral {command.name}`")
    rows = [
        (f"`{variable}`", f"`{option}`", ", ".join(sorted(names)), text)
        for variable, (names, option, text) in sorted(found.items())
    ]
    return table(("variable", "option", "commands", "meaning"), rows)


def settings(name: str) -> str:
    """The variables of a file of `serve_app/cluster/`, in its order."""
    text = (_ROOT / "serve_app/cluster" / name).read_text()
    rows = [
        (f"`{variable}`", "" if commented else f"`{value}`")
        for commented, variable, value in re.findall(r"^(#?)([A-Za-z_]+)=(.*)$", text, re.M)
    ]
    return table(("variable", "value"), rows)


def metrics() -> str:
    """What replicas and ingresses export, in the order in which it is made."""
    use_rays_exporter()  # which tells what a metric is
    by_key = KeyMetrics()
    by_key.add("a", "m", dict.fromkeys(COUNTS, 0.0))
    exporters = (ReplicaMetrics("m"), by_key)
    values: list[Any] = [value for one in exporters for value in vars(one).values()]
    values.append(lost_replicas("m"))
    make_with(None)
    values += [one for value in values if isinstance(value, dict) for one in value.values()]
    rows: dict[str, tuple[str, ...]] = {}
    for one in values:
        if isinstance(one, Metric):
            info = one.info
            kind = type(one).__name__.removeprefix("Ray").lower()
            tags = ", ".join(f"`{tag}`" for tag in info["tag_keys"] if tag != "model")
            name = f"ray_{info['name']}"
            rows[name] = (f"`{name}`", kind, tags, info["description"])
    return table(("metric", "kind", "other labels", "meaning"), rows.values())
