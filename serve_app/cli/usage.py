"""`corral usage` and `corral keys`: who used how much, and who may."""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Sequence

from rich.console import Console

from serve_app.cli.client import Client, Json
from serve_app.cli.screen import plain_table

_DAY_S = 86400
GROUPS = {"key": "api_key_id", "model": "model", "endpoint": "endpoint", "batch": "batch"}
"""The columns by which usage is shown, and the API's names for them."""


def show_usage(
    client: Client, console: Console, days: int, groups: Sequence[str], *, form: str = "table"
) -> None:
    """Print what was used in so many days with today: as a `table`, `json` or `csv`. Raises ServerError."""
    first = (int(time.time()) // _DAY_S - days + 1) * _DAY_S
    query = [("start_time", str(first)), ("bucket_width", "1d"), ("limit", str(days))]
    query += [("group_by", GROUPS[group]) for group in groups]
    if form == "csv":
        query.append(("format", "csv"))
        console.out(client.text(f"/v1/usage?{urllib.parse.urlencode(query)}"), end="")
        return
    page = client.get(f"/v1/usage?{urllib.parse.urlencode(query)}")
    if form == "json":
        console.out(json.dumps(page), highlight=False)
        return
    table = plain_table("day", *groups)
    for name in ("requests", "prompt", "cached", "answers", "compute s", "joules", "cost"):
        table.add_column(name, justify="right")
    for bucket in page["data"]:
        day = time.strftime("%Y-%m-%d", time.gmtime(bucket["start_time"]))
        for row in bucket["results"]:
            names = ("num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens")
            cells = [f"{row[name]:,}" for name in names]
            shown = [str(row[GROUPS[group]]) for group in groups]
            joules = "" if row["joules"] is None else f"{row['joules']:,.0f}"
            cost = f"{row['cost']:,.6f}".rstrip("0").rstrip(".")
            table.add_row(day, *shown, *cells, f"{row['compute_s']:,.1f}", joules, cost)
    console.print(table)


def make_key(client: Client, console: Console, fields: Json) -> None:
    """Make an API key, and print it. Raises ServerError."""
    _print_secret(console, client.post("/v1/keys", fields))


def renew_key(client: Client, console: Console, name: str) -> None:
    """Give an API key another secret, and print it. Raises ServerError."""
    _print_secret(console, client.post(f"/v1/keys/{urllib.parse.quote(name, safe='')}/rotate", {}))


def withdraw_key(client: Client, console: Console, name: str) -> None:
    """Revoke an API key. Raises ServerError."""
    client.delete(f"/v1/keys/{urllib.parse.quote(name, safe='')}")
    console.print(f"{name} is not valid any more.")


def show_keys(client: Client, console: Console, *, as_json: bool) -> None:
    """Print all API keys, without their secrets. Raises ServerError."""
    page = client.get("/v1/keys")
    if as_json:
        console.out(json.dumps(page), highlight=False)
        return
    table = plain_table("name", "made", "expires", "labels", "limits")
    for key in page["data"]:
        own = ("object", "name", "created", "expires", "labels")
        limits = "\n".join(f"{name}: {value}" for name, value in key.items() if name not in own)
        labels = "\n".join(f"{name}={text}" for name, text in key.get("labels", {}).items())
        times = [key.get(name, "")[:10] for name in ("created", "expires")]
        table.add_row(key["name"], times[0] or "by the file", times[1] or "never", labels, limits)
    console.print(table)


def _print_secret(console: Console, key: Json) -> None:
    console.out(key["key"], highlight=False)
