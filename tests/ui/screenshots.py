"""python -m tests.ui.screenshots FOLDER: the documents' pictures of the page, from a real server."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Corral, model
from tests.ui.conftest import launch, served, sync_api
from tests.ui.test_chat import done, say
from tests.ui.test_live import endless_requests

QUESTIONS = ("What is the capital of Portugal?", "Tell me a story about a brave fox.")
WATCHED_MS = 15_000


def main() -> None:
    """Take them."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    demo = model(None, "corral-demo", n_slots=8, n_ctx_slot=2048)
    demo["serve"] = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}}
    with contextmanager(served)([demo]) as server, sync_api.sync_playwright() as playwright:
        browser = launch(playwright)
        for name, scheme, take in (("chat", "light", chat), ("live", "dark", live)):
            page = browser.new_page(
                base_url=server.url, viewport={"width": 1200, "height": 760}, color_scheme=scheme
            )
            take(server, page, folder / f"{name}.png")
        browser.close()


def chat(_: Corral, page: Any, file: Path) -> None:
    """Two questions, and why the second answer took as long as it did."""
    page.goto("/")
    for text in QUESTIONS:
        answer = say(page, text)
        done(answer)
    answer.get_by_text("Where the time went").click()
    answer.locator(".why-bar").wait_for()
    page.mouse.move(0, 0)
    page.screenshot(path=file)


def live(server: Corral, page: Any, file: Path) -> None:
    """Two replicas with requests that stay, after others that left."""
    page.goto("/#/live")
    page.locator(".replica").nth(1).wait_for()
    with endless_requests(server, 5):
        page.wait_for_timeout(WATCHED_MS)
    with endless_requests(server, 11):
        page.wait_for_timeout(WATCHED_MS)
        page.screenshot(path=file)


if __name__ == "__main__":
    main()
