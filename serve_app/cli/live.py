"""`corral ps`, `stats` and `top`: what a server tells, as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve_app.cli.client import Client, Json
from serve_app.cli.screen import plain_table
from serve_app.run.placement.machine import list_cpus

_RATE_FRAMES = 3
"""Frames, one a second, after which rates mean something."""
_SHOWN_EVENTS = 5


def merge_patch(target: Json, patch: Json) -> Json:
    """A JSON merge patch (RFC 7396) applied to an object; null removes a field. Neither is changed."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            before = result.get(key)
            result[key] = merge_patch(before if isinstance(before, dict) else {}, value)
        else:
            result[key] = value
    return result


def views(client: Client) -> Iterator[Json]:
    """The whole view, about once a second, for as long as the server sends it. A stream ends after a
    minute; the next one begins at once. Raises ServerError."""
    while True:
        view: Json = {}
        for patch in client.events("/v1/live"):
            view = merge_patch(view, patch)
            yield view


def processes(view: Json) -> Table:
    """A row for each replica: what it serves, and where."""
    table = plain_table("model", "replica", "state", "slots", "context", "threads", "cores", "node")
    for key, replica in _replicas(view):
        table.add_row(
            replica["model"],
            key,
            _state(replica["state"]),
            f"{replica['running']}/{replica['n_slots']}",
            f"{replica['n_ctx_slot']:,}",
            str(replica["threads"]),
            list_cpus(replica.get("cores") or ()) or "-",
            str(replica["node"])[:8],
        )
    _add_missing(table, view)
    return table


def statistics(view: Json) -> Table:
    """A row for each replica: how fast it is, and how long requests wait."""
    table = plain_table(
        "model",
        "busy",
        "waiting",
        "tokens\nper s",
        "prompt\nper s",
        "cached",
        "TTFT\np50 / p95",
        "gap\np50 / p95",
        "wait",
    )
    table.collapse_padding = True  # 80 columns hold it so
    for _, replica in _replicas(view):
        table.add_row(
            replica["model"],
            f"{replica['running']}/{replica['n_slots']}",
            str(replica["waiting"]),
            f"{replica['generated_per_s']:,.1f}",
            f"{replica['prompt_per_s']:,.0f}",
            "-" if (hits := replica.get("hits")) is None else f"{hits:.0%}",
            _quantiles(replica["ttft"]),
            _quantiles(replica["itl"]),
            f"{replica['wait_s']:.1f} s",
        )
    _add_missing(table, view)
    return table


def screen(view: Json) -> RenderableType:
    slots = plain_table("model", "replica", "has cores", "slots")
    for key, one in _replicas(view):
        slots.add_row(one["model"], key, f"{one['turns'][0]:.0%}", _slots(one["slots"].values()))
    events = sorted(view.get("events", {}).values(), key=lambda event: event["n"])
    lines = [Text(_event(event), style="dim") for event in events[-_SHOWN_EVENTS:]]
    legend = Text("D decodes  P computes its prompt  K keeps a system prompt  . idle", style="dim")
    return Group(statistics(view), slots, legend, *lines)


def ps(client: Client, console: Console, *, as_json: bool) -> None:
    """Print what runs, once. Raises ServerError."""
    (view,) = islice(views(client), 1)
    _print(console, view, processes(view), as_json=as_json)


def show_stats(client: Client, console: Console, *, as_json: bool) -> None:
    """Print the figures of a few seconds. Raises ServerError."""
    *_, view = islice(views(client), _RATE_FRAMES)
    _print(console, view, statistics(view), as_json=as_json)


def top(client: Client, console: Console, n_frames: int | None) -> None:
    """Show all of it until Ctrl-C, or so many times. Raises ServerError."""
    with Live(console=console, screen=console.is_terminal and n_frames is None) as live:
        for view in islice(views(client), n_frames):
            live.update(screen(view), refresh=True)


def _print(console: Console, view: Json, table: Table, *, as_json: bool) -> None:
    if as_json:
        console.out(json.dumps(view), highlight=False)
    else:
        console.print(table)


def _replicas(view: Json) -> list[tuple[str, Json]]:
    return sorted(view.get("replicas", {}).items(), key=lambda pair: (pair[1]["model"], pair[0]))


def _add_missing(table: Table, view: Json) -> None:
    """A row for each model of which nothing answers yet."""
    seen = {one["model"] for _, one in _replicas(view)}
    for model, told in view.get("models", {}).items():
        if model not in seen:
            states = ", ".join(f"{n} {name.lower()}" for name, n in told["states"].items() if n)
            table.add_row(model, states or "no replica")


def _state(state: str) -> Text:
    styles = {"up": "green", "draining": "yellow", "silent": "red"}
    return Text(state, style=styles.get(state, ""))


def _quantiles(quantiles_ms: list[float | None]) -> str:
    """Median and p95, in the unit that reads best, which is said once if it is the same."""
    texts = ["-" if ms is None else _duration(ms) for ms in quantiles_ms[:2]]
    units = {text.partition(" ")[2] for text in texts}
    if len(units) == 1:
        texts[:-1] = [text.partition(" ")[0] for text in texts[:-1]]
    return " / ".join(texts)


def _duration(ms: float) -> str:
    return f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.0f} ms"


def _slots(slots: Any) -> Text:
    letters = {"decode": ("D", "green"), "prefill": ("P", "yellow"), "pinned": ("K", "blue")}
    return Text.assemble(*(letters.get(slot[0], (".", "dim")) for slot in slots))


def _event(event: Json) -> str:
    count = f"{event['count']} " if event["count"] > 1 else ""
    return f"{event['model']}: {count}{event['kind']} {event.get('replica', '')}".rstrip()
