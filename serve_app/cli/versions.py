"""`corral weights` and `corral rollback`: which version of a model answers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from serve_app.cli.client import Client, Json


class WeightError(ValueError):
    """Not a weight, as `new=10`; the message is for people."""


def parsed(texts: Sequence[str]) -> dict[str, float]:
    """Percent by the names of versions, from texts as `new=10`. Raises WeightError."""
    weights: dict[str, float] = {}
    for text in texts:
        name, _, percent = text.partition("=")
        try:
            weights[name] = float(percent.removesuffix("%"))
        except ValueError:
            raise WeightError(f"{text!r} is no weight: write VERSION=PERCENT, as new=10.") from None
    return weights


def weights(client: Client, console: Console, model: str, changes: dict[str, float]) -> None:
    """Change weights, if some are given, and print them. Raises ServerError."""
    if changes:
        card = client.post("/models/weights", {"model": model, "weights": changes})
    else:
        card = client.get(f"/v1/models/{model}")
    _print(console, model, card["versions"])


def rollback(client: Client, console: Console, model: str) -> None:
    """Give all to the version before, and print the weights. Raises ServerError."""
    _print(console, model, client.post("/models/rollback", {"model": model})["versions"])


def _print(console: Console, model: str, versions: Sequence[Json]) -> None:
    if not versions:
        console.print(f"{model} has one version only.")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("version", "weight", "share now", "status"):
        table.add_column(column)
    for one in versions:
        share, status = f"{100 * one['share']:.3g}%", one["status"]["value"]
        table.add_row(one["id"], f"{one['weight']:.4g}", share, status)
    console.print(table)
