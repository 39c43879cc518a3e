"""The report's pages, from a document made by hand."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

from loadtests.load.report_page import (
    COLUMNS,
    against_users,
    comparison,
    html,
    markdown,
    number,
    timeline,
)
from loadtests.load.stream_metrics import Slo, figures


def run(mix: str, users: int, **found: float | None) -> dict[str, Any]:
    sample = {
        "at_s": 0.0,
        "replicas": 1,
        "running": users,
        "waiting": 0,
        "backlog_s": 0.5,
        "store_mib": 9.0,
    }
    return {
        "load": {"mix": mix, "users": users, "run_s": 60, "think_s": 5.0, "seed": 20},
        "figures": dict.fromkeys(COLUMNS, 1.5) | found,
        "accounts": {"refused": 2, "failed": 0, "missing": 0, "twice": 0},
        "errors": {},
        "client_share": 0.04,
        "other_cores": 0.1,
        "samples": [
            sample | {"at_s": float(i), "rss_mib": 1000.0 + i, "files": None} for i in range(100)
        ],
    }


def document(*runs: dict[str, Any]) -> dict[str, Any]:
    server = {"model": "demo", "n_slots": 4, "n_ctx_slot": 2048, "threads": 2, "kv_unified": True}
    return {
        "facts": {
            "cpu": "A <CPU>",
            "cores": 2,
            "versions": {"corral": "0.1.0"},
            "server": [server],
        },
        "runs": list(runs),
    }


ONE = document(run("chat=1", 4, tokens_per_s=40.0), run("chat=1", 1), run("rag=1", 4))


def test_markdown_has_a_table_for_each_mix_in_order_of_users() -> None:
    text = markdown(ONE)
    assert (
        "A <CPU>, 2 cores; demo: 4 slots of 2048 tokens, 2 threads, unified; corral 0.1.0" in text
    )
    assert "60 s, think 5.0 s, seed 20" in text
    chat = text[text.index("## chat=1") : text.index("## rag=1")]
    rows = [line.split(" | ") for line in chat.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["| 1", "| 4"]
    assert rows[1][1] == "40"
    assert "The client used 4% of a core" in text
    assert "WARNING" not in text


def test_the_page_stands_alone_and_is_escaped() -> None:
    page = html(ONE)
    assert "A &lt;CPU&gt;" in page
    assert "<CPU>" not in page
    assert page.count("<figure>") == 3  # all mixes, and the server under each
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_mix_without_some_number_of_users_has_a_gap() -> None:
    root = ElementTree.fromstring(against_users(ONE))
    lines = [e.get("points") or "" for e in root.iter() if e.tag.endswith("polyline")]
    assert [len(points.split()) for points in lines[:2]] == [2, 1]


def test_a_timeline_has_few_places_and_no_chart_of_what_is_not_known() -> None:
    drawn = timeline("chat=1", run("chat=1", 4))
    assert "memory, MiB" in drawn
    assert "open files" not in drawn
    assert drawn.count("<circle") <= 6 * 60


def test_a_short_timeline_has_no_second_twice() -> None:
    one = run("chat=1", 4)
    one["samples"] = [sample | {"at_s": 0.7 * i} for i, sample in enumerate(one["samples"][:12])]
    root = ElementTree.fromstring(timeline("chat=1", one))
    chart = next(e for e in root.iter() if e.tag.endswith("svg"))
    below = [e.text for e in chart if e.get("text-anchor") == "middle" and e.text]
    assert below == ["0", "1", "3", "4", "6", "7", "seconds"]


def test_failures_and_books_are_warned_of() -> None:
    bad = run("chat=1", 2) | {"errors": {"500 engine_failed": 3}, "other_cores": 0.84}
    bad["accounts"] = {"refused": 0, "failed": 3, "missing": 1, "twice": 0}
    text = markdown(document(bad))
    assert "WARNING: chat=1, 2 users: other processes used 0.8 cores meanwhile." in text
    assert "WARNING: chat=1, 2 users: 1 missing, 0 twice." in text
    assert "WARNING: chat=1, 2 users: 3 failed: 500 engine_failed." in text


def test_comparison_pairs_the_same_mix_and_users() -> None:
    other = document(run("chat=1", 4, tokens_per_s=60.0, ttft_p50_s=None), run("chat=1", 8))
    text = comparison(ONE, other)
    assert "| 4 | tokens_per_s | 40 | 60 | 1.50x |" in text
    assert "| 4 | ttft_p50_s | 1.5 | - | - |" in text
    assert "| 1 |" not in text
    assert "| 8 |" not in text


def test_numbers() -> None:
    shown = [number(value) for value in (None, 0.0, 0.01234, 12.345, 1234.5)]
    assert shown == ["-", "0", "0.0123", "12.3", "1,234"]


def test_every_column_is_a_figure() -> None:
    assert set(COLUMNS) <= set(figures([], 1.0, Slo(1.0, 0.1)))
    json.dumps(ONE)
