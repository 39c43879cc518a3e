"""Live metrics, and narrow screens."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Corral, wait_until
from tests.ui.conftest import ENDLESS, N_REPLICAS, N_SLOTS, Open, n_running, states, sync_api
from tests.ui.test_chat import done, say

expect = sync_api.expect
N_REQUESTS = 16


@contextmanager
def endless_requests(server: Corral, n: int) -> Iterator[None]:
    """So many requests that go on until the end."""
    over = threading.Event()

    def ask(i: int) -> None:
        body = {"messages": [{"role": "user", "content": f"Tell me story {i}."}], "stream": True}
        try:
            with httpx.stream(
                "POST", f"{server.url}/v1/chat/completions", json=body | ENDLESS, timeout=60
            ) as answer:
                for _ in answer.iter_bytes():
                    if over.is_set():
                        return
        except httpx.HTTPError:
            return  # its replica was killed

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
        wait_until(lambda: n_running(server) == 0, 30, "all slots free")


def tile(page: Any, name: str) -> Any:
    """The value of a tile."""
    found = page.locator("#tiles > div").filter(has=page.get_by_text(name, exact=True))
    return found.locator("dd").first


@pytest.mark.timeout(240)
def test_sixteen_requests_and_a_killed_replica(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server, "live")
    expect(page.locator(".replica")).to_have_count(N_REPLICAS)
    expect(tile(page, "Slots busy")).to_have_text("0")
    with endless_requests(ui_server, N_REQUESTS):
        busy = re.compile(r"^([89]|1\d)$")
        expect(tile(page, "Slots busy")).to_have_text(busy)
        expect(tile(page, "Tokens/s")).to_have_text(re.compile(r"^[1-9]"))
        expect(tile(page, "First token")).to_have_text(re.compile(r"^\d.* m?s$"))
        expect(page.locator(".slot[data-state=decode]").first).to_be_visible()
        page.locator(".replica details").first.click()
        expect(page.locator(".curve .now").first).to_be_visible()
        expect(page.locator("#timeline .line")).to_have_count(2)

        (victim, *_) = ui_server.pids("ServeReplica:corral:engine-demo")
        before = {one["replica_id"] for one in states(ui_server)[0]["replicas"]}
        os.kill(victim, signal.SIGKILL)
        page.get_by_text("Events", exact=True).click()
        expect(page.locator("#events .gone")).to_have_count(1)
        expect(page.locator("#events .came")).to_have_count(1, timeout=90_000)
        expect(page.locator(".replica")).to_have_count(N_REPLICAS)
        expect(page.locator("#timeline .event.gone")).to_have_count(1)
        now = set(page.locator(".replica h3").all_inner_texts())
        assert len(before - now) == len(now - before) == 1
    expect(tile(page, "Slots busy")).to_have_text("0")


def test_slots_say_what_is_in_them(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server, "live")
    with endless_requests(ui_server, 1):
        slot = page.locator(".slot[data-state=decode]")
        expect(slot).to_have_count(1)
        card = page.locator(".replica").filter(has=slot)
        expect(card.locator(".slots")).to_have_attribute("aria-label", f"1 of {N_SLOTS} slots busy")
        card.locator("summary").click()
        row = card.locator("tr").filter(has_text="decode")
        expect(row.locator("td").nth(5)).to_contain_text("chatcmpl-")
        expect(row.locator("td").nth(3)).to_have_text(re.compile(r"^[1-9]"))


def test_two_models_side_by_side(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server, "compare")
    expect(page.get_by_label("Model B")).to_have_value("random")
    page.locator(".one").nth(1).get_by_text("Settings").click()
    page.locator(".one").nth(1).get_by_label("Max tokens").fill("8")
    page.fill("#compare-question", "What is the capital of Portugal?")
    page.keyboard.press("Enter")
    expect(page.locator(".one .facts")).to_have_count(2)
    expect(page.locator(".one").nth(0).locator(".markdown")).to_contain_text("Lisbon")
    expect(page.locator(".one").nth(1).locator(".facts")).to_contain_text("8 tokens")
    expect(page.locator("#status")).to_have_text("Both answers are complete.")


@pytest.mark.parametrize("view", ["chat", "compare", "live", "usage"])
def test_a_narrow_screen_scrolls_down_only(ui_server: Corral, open_page: Open, view: str) -> None:
    page = open_page(ui_server, view, viewport={"width": 360, "height": 740})
    if view == "chat":
        done(say(page, "List three fruits."))
        page.click("#settings-button")
        page.get_by_role("button", name="Chats").click()
        expect(page.locator("#chats li")).to_have_count(1)
        page.locator("#chats .chat").click()
        expect(page.locator("#side")).to_be_hidden()
    if view == "live":
        page.locator(".replica summary").first.click()
        page.locator(".curve svg").wait_for()
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 360
    beyond = page.locator("main button:visible, main select:visible, main textarea:visible")
    for box in [one.bounding_box() for one in beyond.all()]:
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360


def test_colours_follow_the_system_and_the_button(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.get_by_role("button", name="Colours: auto").click()
    expect(page.get_by_role("button", name="Colours: light")).to_be_visible()
    assert page.evaluate(ground) != dark
    page.reload()
    expect(page.get_by_role("button", name="Colours: light")).to_be_visible()
    page.get_by_role("button", name="Colours: light").click()
    assert page.evaluate(ground) == dark


def test_an_operator_loads_and_unloads_a_model(on_demand_server: Corral, open_page: Open) -> None:
    page = open_page(on_demand_server, "live")
    button = page.locator("#load-button")
    expect(button).to_have_text("Load")
    expect(tile(page, "Replicas")).to_have_text("0")
    button.click()
    expect(button).to_have_text("Unload")
    expect(tile(page, "Replicas")).to_have_text("1")
    button.click()
    expect(button).to_have_text("Load")
    expect(tile(page, "Replicas")).to_have_text("0")
    expect(page.locator("#load-error")).to_be_empty()


def test_a_model_that_is_always_loaded_has_no_such_button(
    ui_server: Corral, open_page: Open
) -> None:
    page = open_page(ui_server, "live")
    expect(page.locator(".replica")).to_have_count(N_REPLICAS)
    expect(page.locator("#load-button")).to_be_hidden()
