"""The load tests' report, from a document made by hand: one file, for any screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.load.report_page import CHARTS, COLUMNS, TIMELINE, html
from tests.ui.conftest import Watched

MIXES = ("chat=1", "chat=6,rag=2,agent=1,code=2,batch=1,slow=1,vanish=1")
USERS = (1, 4, 16)
SCREENS = [(width, scheme) for width in (1280, 360) for scheme in ("light", "dark")]


def load(mix: str, users: int) -> dict[str, Any]:
    """A run whose figures grow with the users."""
    samples = [{name: float(users + i) for name in TIMELINE} | {"at_s": 0.7 * i} for i in range(12)]
    return {
        "load": {"mix": mix, "users": users, "run_s": 8, "think_s": 5.0, "seed": 20},
        "figures": dict.fromkeys(COLUMNS, 12.345 * users),
        "accounts": {"refused": 2, "failed": 1, "missing": 0, "twice": 0},
        "errors": {"500 engine_failed": 1},
        "client_share": 0.04,
        "other_cores": 0.5,
        "samples": samples,
    }


def document() -> dict[str, Any]:
    server = {"model": "demo", "n_slots": 4, "n_ctx_slot": 2048, "threads": 2, "kv_unified": True}
    versions = {"corral": "0.1.0", "llama-cpp-python": "0.3.36"}
    facts = {"cpu": "A CPU", "cores": 2, "versions": versions, "server": [server]}
    facts["config"] = {"path": "/a/path/that/is/long/" * 6}
    return {"facts": facts, "runs": [load(mix, users) for mix in MIXES for users in USERS]}


@pytest.fixture(params=SCREENS, ids=lambda screen: f"{screen[0]}-{screen[1]}")
def report(
    request: pytest.FixtureRequest, browser: Any, watched: Watched, tmp_path: Path
) -> Iterator[Any]:
    """The page as it lies on a disk. It has asked nobody for anything, and complained of nothing."""
    width, scheme = request.param
    (tmp_path / "report.html").write_text(html(document()))
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, is_mobile=width < 600
    )
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda one: asked.append(one.url))
    watched.look_at(page)
    page.goto(f"file://{tmp_path}/report.html")
    yield page
    context.close()
    assert watched.errors == []
    assert asked == [f"file://{tmp_path}/report.html"]


def test_it_fits_and_axe_finds_nothing(report: Any) -> None:
    wide = "document.documentElement.scrollWidth - window.innerWidth"
    assert report.evaluate(wide) <= 0
    assert report.evaluate("window.innerWidth") == report.viewport_size["width"]
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(report).response["violations"]
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []


def test_every_chart_says_what_its_axes_are(report: Any) -> None:
    charts = report.locator("svg")
    titles = [*CHARTS.values(), *(title for _ in MIXES for title in TIMELINE.values())]
    assert charts.count() == len(titles)
    for i, title in enumerate(titles):
        texts = charts.nth(i).locator("text").all_text_contents()
        of_x = "users" if i < len(CHARTS) else "seconds"
        assert texts[0] == title
        assert texts[-1] == of_x


def test_no_text_of_a_chart_is_cut_off_or_on_another(report: Any) -> None:
    boxes = """chart => {
        const whole = chart.getBoundingClientRect();
        const inside = box => box.left >= whole.left - 1 && box.right <= whole.right + 1
            && box.top >= whole.top - 1 && box.bottom <= whole.bottom + 1;
        const shown = [...chart.querySelectorAll("text")].filter(text => text.textContent);
        const all = shown.map(text => [text.textContent, text.getBoundingClientRect()]);
        const apart = (a, b) => a.right <= b.left || b.right <= a.left
            || a.bottom <= b.top + 4 || b.bottom <= a.top + 4;
        return [
            ...all.filter(([, box]) => !inside(box)).map(([name]) => `cut: ${name}`),
            ...all.flatMap(([name, a], i) => all.slice(i + 1)
                .filter(([, b]) => !apart(a, b)).map(([other]) => `${name} on ${other}`)),
        ];
    }"""
    for chart in report.locator("svg").all():
        assert chart.evaluate(boxes) == []


def test_text_has_the_colour_of_the_scheme(report: Any) -> None:
    colour = "element => getComputedStyle(element).fill"
    body = report.evaluate("getComputedStyle(document.body).color")
    assert report.locator("svg text").first.evaluate(colour) == body
