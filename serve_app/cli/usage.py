"""`corral usage`: who used how much."""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from serve_app.cli.client import Client

_DAY_S = 86400
GROUPS = {"key": "api_key_id", "model": "model", "endpoint": "endpoint", "batch": "batch"}
"""The columns by which usage is shown, and the API's names for them."""


def usage(
    client: Client, console: Console, days: int, groups: Sequence[str], *, form: str = "table"
) -> None:
    """Print what was used in so many days, today among them: as a `table`, `json` or `csv`. Raises
    ServerError."""
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
    table = Table(box=None, pad_edge=False, header_style="bold")
    counts = ("requests", "prompt", "cached", "answers", "compute s")
    for name in ("day", *groups):
        table.add_column(name, no_wrap=True)
    for name in counts:
        table.add_column(name, justify="right")
    for bucket in page["data"]:
        day = time.strftime("%Y-%m-%d", time.gmtime(bucket["start_time"]))
        for row in bucket["results"]:
            names = ("num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens")
            cells = [f"{row[name]:,}" for name in names]
            shown = [str(row[GROUPS[group]]) for group in groups]
            table.add_row(day, *shown, *cells, f"{row['compute_s']:,.1f}")
    console.print(table)
