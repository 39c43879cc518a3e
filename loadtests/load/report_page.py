"""The pages of `loadtests.load.report`, from its JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from loadtests.common.plot import Chart, chart_svg, colours_of
from serve_app.cli.measure import benchmark

Document = Mapping[str, Any]
Run = Mapping[str, Any]

COLUMNS = {
    "tokens_per_s": "tokens/s",
    "goodput_per_s": "good answers/s",
    "good_share": "good share",
    "ttft_p50_s": "TTFT p50, s",
    "ttft_p95_s": "TTFT p95, s",
    "itl_p50_ms": "ITL p50, ms",
    "itl_p95_ms": "ITL p95, ms",
    "itl_p99_ms": "ITL p99, ms",
    "e2e_p95_s": "E2E p95, s",
    "user_tokens_per_s_p50": "tokens/s of a user",
}
CHARTS = {
    "tokens_per_s": "tokens/s",
    "goodput_per_s": "good answers/s",
    "ttft_p50_s": "TTFT p50, s",
    "ttft_p95_s": "TTFT p95, s",
    "itl_p50_ms": "ITL p50, ms",
    "itl_p95_ms": "ITL p95, ms",
}
TIMELINE = {
    "replicas": "replicas",
    "running": "running requests",
    "waiting": "waiting requests",
    "backlog_s": "backlog, s",
    "store_mib": "kept prefixes, MiB",
    "rss_mib": "memory, MiB",
    "files": "open files",
}
MOST_PLACES = 60
MOST_OTHER_CORES = 0.2
"""The cores that other processes may use before the reader is warned."""
_STYLE = """
:root { color-scheme: light dark }
body { font: 14px sans-serif; margin: 1em; overflow-wrap: anywhere }
pre { white-space: pre-wrap }
td, th { padding: 2px 9px; text-align: right; white-space: nowrap }
.wide { overflow-x: auto }
figure { margin: 1em 0 }
figcaption ul { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; padding: 0 }
.key { display: inline-block; width: 14px; height: 4px; margin-right: 5px; vertical-align: middle }
.charts { display: flex; flex-wrap: wrap }
svg { max-width: 100% }
svg text { fill: currentcolor }
svg path { stroke: #8886 }
"""


def number(value: float | None) -> str:
    """Three digits of it; a dash for what was not measured."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(document: Document) -> str:
    """A line of facts, and a table for each mix of users."""
    lines = [_facts_line(document), ""]
    for mix, runs in by_mix(document).items():
        lines += [f"## {mix}", "", benchmark.table(_header(), [_row(run) for run in runs]), ""]
    return "\n".join([*lines, *_notes(document), ""])


def html(document: Document) -> str:
    """The same with charts, in one file."""
    parts = ['<!doctype html><html lang="en"><head><meta charset="utf-8">']
    parts.append('<meta name="viewport" content="width=device-width">')
    parts.append(f"<title>Load report</title><style>{_STYLE}</style></head><body><main>")
    parts += ["<h1>Load report</h1>", f"<p>{escape(_facts_line(document))}</p>"]
    parts.append(against_users(document))
    for mix, runs in by_mix(document).items():
        rows = [_row(run) for run in runs]
        parts += [f"<h2>{escape(mix)}</h2>", *_html_table(mix, _header(), rows)]
    parts.append("<h2>The server meanwhile, with the most users</h2>")
    parts += [timeline(mix, runs[-1]) for mix, runs in by_mix(document).items()]
    parts += [f"<p>{escape(note)}</p>" for note in _notes(document)]
    known = json.dumps(document["facts"], indent=1)
    parts += ["<h2>What was measured</h2>", f"<pre>{escape(known)}</pre>"]
    return "\n".join([*parts, "</main></body></html>", ""])


def against_users(document: Document) -> str:
    """Throughput and latency against users, a line for each mix."""
    mixes = by_mix(document)
    users = sorted({run["load"]["users"] for run in document["runs"]})
    charts = []
    for name, title in CHARTS.items():
        lines = {}
        for mix, runs in mixes.items():
            found = {run["load"]["users"]: run["figures"][name] for run in runs}
            lines[mix] = [found.get(count) for count in users]
        charts.append(Chart(title, [str(count) for count in users], lines))
    return _figure("Against users", "users", charts)


def timeline(mix: str, run: Run) -> str:
    """The server's replicas, queue and memory over a run."""
    samples = run["samples"]
    every = max(1, -(-len(samples) // MOST_PLACES))
    shown = samples[::every]
    places = _spread([f"{one['at_s']:.0f}" for one in shown])
    charts = [
        Chart(title, places, {"server": [one[name] for one in shown]})
        for name, title in TIMELINE.items()
        if any(one[name] is not None for one in shown)
    ]
    title = f"{mix}, {run['load']['users']} users"
    return _figure(title, "seconds", charts) if charts else ""


def _spread(names: Sequence[str]) -> list[str]:
    """Six of the names at most, none twice; the others are empty."""
    every = max(1, -(-len(names) // 6))
    shown = dict.fromkeys(names[::every])
    return [
        name if i == names.index(name) and name in shown else "" for i, name in enumerate(names)
    ]


def _figure(title: str, x_title: str, charts: Sequence[Chart]) -> str:
    """Charts under one legend, as many in a row as there is room for."""
    colours = colours_of(charts)
    keys = [
        f'<li><span class="key" style="background:{colour}"></span>{escape(name)}</li>'
        for name, colour in colours.items()
    ]
    head = f"<figure><figcaption>{escape(title)}<ul>{''.join(keys)}</ul></figcaption>"
    drawn = "\n".join(chart_svg(chart, x_title, colours) for chart in charts)
    return f'{head}<div class="charts">{drawn}</div></figure>'


def comparison(one: Document, other: Document) -> str:
    """Two runs side by side, where both have the same mix and users, and the ratio."""
    lines = [f"A: {_facts_line(one)}", f"B: {_facts_line(other)}", ""]
    found = {_point(run): run for run in other["runs"]}
    header = ["users", "figure", "A", "B", "B/A"]
    for mix, runs in by_mix(one).items():
        rows = []
        for run in runs:
            match = found.get(_point(run))
            if match is None:
                continue
            for name in COLUMNS:
                a, b = run["figures"][name], match["figures"][name]
                ratio = f"{b / a:.2f}x" if a and b is not None else "-"
                rows.append([run["load"]["users"], name, number(a), number(b), ratio])
        lines += [f"## {mix}", "", benchmark.table(header, rows), ""]
    return "\n".join(lines)


def by_mix(document: Document) -> dict[str, list[Run]]:
    """The runs of each mix, in order of users."""
    mixes: dict[str, list[Run]] = {}
    for run in sorted(document["runs"], key=lambda run: run["load"]["users"]):
        mixes.setdefault(run["load"]["mix"], []).append(run)
    return mixes


def _point(run: Run) -> tuple[str, int]:
    return run["load"]["mix"], run["load"]["users"]


def _facts_line(document: Document) -> str:
    known = document["facts"]
    servers = [
        "{model}: {n_slots} slots of {n_ctx_slot} tokens, {threads} threads, ".format(**server)
        + ("unified" if server["kv_unified"] else "split")
        for server in known["server"]
    ]
    loads = [run["load"] for run in document["runs"]]
    how = sorted(
        {f"{load['run_s']} s, think {load['think_s']} s, seed {load['seed']}" for load in loads}
    )
    versions = ", ".join(f"{name} {value}" for name, value in known["versions"].items())
    return "; ".join([f"{known['cpu']}, {known['cores']} cores", *servers, versions, *how])


def _header() -> list[str]:
    return ["users", *COLUMNS.values(), "refused", "failed"]


def _row(run: Run) -> list[object]:
    values = [number(run["figures"][name]) for name in COLUMNS]
    books = run["accounts"]
    return [run["load"]["users"], *values, books["refused"], books["failed"]]


def _notes(document: Document) -> Iterator[str]:
    """Notes that readers need to judge the figures."""
    runs = document["runs"]
    share = max((run["client_share"] for run in runs), default=0.0)
    yield f"The client used {share:.0%} of a core at most."
    for run in runs:
        mix, users = _point(run)
        if (other := run["other_cores"] or 0.0) > MOST_OTHER_CORES:
            yield f"WARNING: {mix}, {users} users: other processes used {other:.1f} cores meanwhile."
        books = run["accounts"]
        if books["missing"] or books["twice"]:
            yield f"WARNING: {mix}, {users} users: {books['missing']} missing, {books['twice']} twice."
        for reason, count in run["errors"].items():
            yield f"WARNING: {mix}, {users} users: {count} failed: {reason}."


def _html_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[object]]
) -> Iterator[str]:
    """It scrolls by itself where it is too wide, with the keyboard, too."""
    yield f'<div class="wide" role="region" tabindex="0" aria-label="{escape(title)}"><table><tr>'
    yield "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>"
    yield "</table></div>"
