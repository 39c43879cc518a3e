"""The routes that show usage: Corral's own, and OpenAI's for organizations.

Source: OpenAI's API reference, "Usage".
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Query
from fastapi.responses import Response

from serve_app.base.errors import InvalidRequestError, PermissionDeniedError
from serve_app.server.http import request_context
from serve_app.server.http.dependencies import of_app
from serve_app.server.http.description import also, api_router
from serve_app.server.usage.budgets import DAY_S
from serve_app.server.usage.ledger import (
    COUNTS,
    DIMENSIONS,
    HOUR_S,
    MINUTE_S,
    MOST_SHOWN_ROWS,
    Ledger,
)

ROUTER = api_router()
_WIDTHS = {"1m": MINUTE_S, "1h": HOUR_S, "1d": DAY_S}
_LIMITS = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 366)}
"""The number of buckets of a page by default, and at most."""
_FIELDS = {
    "input_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "input_cached_tokens": "cached_tokens",
    "num_model_requests": "requests",
}
"""OpenAI's names of counts."""
_GROUPS = {"api_key_id": "key", "model": "model", "endpoint": "endpoint", "batch": "batch"}
"""OpenAI's names of dimensions; `endpoint` is Corral's own."""
_MOST_VALUES = 100
Names = Annotated[list[str] | None, Query(max_length=_MOST_VALUES)]


LedgerArgument = Annotated[Ledger, of_app("ledger")]


@ROUTER.get("/v1/usage", responses=also("text/csv"))
@ROUTER.get("/v1/organization/usage/completions", responses=also("text/csv"))
async def usage(
    ledger: LedgerArgument,
    start_time: Annotated[int | None, Query(ge=0, le=2**40)] = None,
    end_time: Annotated[int | None, Query(ge=0, le=2**40)] = None,
    bucket_width: Literal["1m", "1h", "1d"] = "1d",
    group_by: Annotated[list[str] | None, Query(max_length=8)] = None,
    group_by_list: Annotated[list[str] | None, Query(alias="group_by[]", max_length=8)] = None,
    models: Names = None,
    api_key_ids: Names = None,
    batch: bool | None = None,
    limit: Annotated[int | None, Query(ge=1)] = None,
    page: Annotated[int | None, Query(ge=0, le=2**40)] = None,
    format: Literal["json", "csv"] = "json",  # noqa: A002
) -> Response:
    """The usage, in buckets of time, as OpenAI's usage API tells it. With API keys, one's own usage
    only, but for operators. Times are seconds since 1970; by default, the last week by days."""
    groups = list(dict.fromkeys([*(group_by or ()), *(group_by_list or ())]))
    for name in groups:
        if name not in _GROUPS:
            raise InvalidRequestError(f"Unknown group {name[:100]!r}.", "group_by")
    width, (usual, most) = _WIDTHS[bucket_width], _LIMITS[bucket_width]
    n_buckets = min(limit or usual, most)
    now = int(ledger.clock())
    end = end_time or now + 1
    first = (now - (n_buckets - 1) * width) if start_time is None else start_time
    first = max(first, page or 0) // width * width
    last = min(end, first + n_buckets * width)
    only = _only(models, api_key_ids, batch=batch)
    columns = [_GROUPS[name] for name in groups]
    rows = await ledger.usage(first, last, width, columns, only)
    if len(rows) == MOST_SHOWN_ROWS:
        raise InvalidRequestError("There are too many groups. Ask for fewer buckets.", "limit")
    # In a thread: a large page takes half a second, in which no stream would go on.
    if format == "csv":
        table = await asyncio.to_thread(_csv, rows, columns)
        return Response(table, media_type="text/csv; charset=utf-8")
    buckets = range(first, last, width)
    next_page = last if last < end else None
    content = await asyncio.to_thread(_page, rows, buckets, next_page)
    return Response(content, media_type="application/json")


def _page(rows: Sequence[dict[str, Any]], buckets: range, next_page: int | None) -> str:
    """The page as JSON. Each row is written by itself, and other threads go on in between."""
    results: dict[int, list[str]] = {at: [] for at in buckets}
    for row in rows:
        results[row["bucket"]].append(json.dumps(_result(row)))
    data = ",".join(
        f'{{"object":"bucket","start_time":{at},"end_time":{at + buckets.step},'
        f'"results":[{",".join(texts)}]}}'
        for at, texts in results.items()
    )
    ends = {"has_more": next_page is not None, "next_page": next_page and str(next_page)}
    return f'{{"object":"page","data":[{data}],{json.dumps(ends)[1:]}'


def _only(
    models: Sequence[str] | None, keys: Sequence[str] | None, *, batch: bool | None
) -> dict[str, Sequence[str]]:
    """The rows that the caller may see, and wants to. Raises PermissionDeniedError."""
    caller = request_context.current()
    only: dict[str, Sequence[str]] = {}
    if caller.account is None:
        caller.check_operator("Usage")
    elif not caller.is_operator:
        own = caller.account.key.name
        if keys and set(keys) != {own}:
            raise PermissionDeniedError(
                "Only operators see what others use. Leave out `api_key_ids`.", "api_key_ids"
            )
        keys = [own]
    if keys:
        only["key"] = keys
    if models:
        only["model"] = models
    if batch is not None:
        only["batch"] = [str(int(batch))]
    return only


def _result(row: dict[str, Any]) -> dict[str, Any]:
    groups = {name: row.get(column) for name, column in _GROUPS.items()}
    groups["batch"] = None if groups["batch"] is None else bool(groups["batch"])
    counts = {name: _number(row[column]) for name, column in _FIELDS.items()}
    own = {name: _count_or_none(name, row) for name in COUNTS if name not in _FIELDS.values()}
    return {
        "object": "organization.usage.completions.result",
        **counts,
        "input_audio_tokens": 0,
        "output_audio_tokens": 0,
        "project_id": None,
        "user_id": None,
        **groups,
        **own,
    }


def _count_or_none(name: str, row: dict[str, Any]) -> float | None:
    """A count; None for energy that was not measured."""
    return None if name == "joules" and not row[name] else _number(row[name])


def _number(value: float) -> float:
    """An integer, if it is one."""
    return int(value) if value.is_integer() else round(value, 6)


_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""The first characters of texts that spreadsheets take for formulas."""


def _csv(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    names = [name for name in DIMENSIONS if name in columns]
    writer.writerow(["start", *names, *COUNTS])
    for row in rows:
        start = datetime.fromtimestamp(row["bucket"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        values = [row[name] for name in names]
        shown = [f"'{value}" if str(value).startswith(_FORMULA) else value for value in values]
        writer.writerow([start, *shown, *(_count_or_none(name, row) for name in COUNTS)])
    return text.getvalue()
