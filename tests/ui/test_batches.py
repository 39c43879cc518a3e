"""Batches on the page."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.e2e.conftest import Corral
from tests.ui.conftest import Open, sync_api

expect = sync_api.expect
N_LINES = 300
URL = "/v1/completions"


def begin(server: Corral) -> str:
    """A batch that takes a while."""
    body = {"model": "demo", "prompt": "Once", "max_tokens": 200, "ignore_eos": True}
    line: dict[str, Any] = {"method": "POST", "url": URL, "body": body}
    lines = "\n".join(json.dumps({"custom_id": str(i), **line}) for i in range(N_LINES))
    told = {"purpose": (None, "batch"), "file": ("in.jsonl", lines)}
    file = server.http.post("/v1/files", files=told).json()
    asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    batch_id: str = server.http.post("/v1/batches", json=asked).json()["id"]
    return batch_id


def test_a_batch_is_watched_and_cancelled(batch_server: Corral, open_page: Open) -> None:
    page = open_page(batch_server, "live")
    expect(page.locator("#tiles > div").first).to_be_visible()
    expect(page.locator("#batches")).to_be_hidden()
    batch_id = begin(batch_server)
    row = page.locator("#batch-rows tr").filter(has_text=batch_id)
    expect(row).to_contain_text("in progress")
    expect(row).to_contain_text(re.compile(rf"[1-9]\d* of {N_LINES} lines"))
    expect(row).to_contain_text(re.compile(r"\d lines/s, .* left"))
    page.get_by_role("button", name=f"Cancel {batch_id}").click()
    expect(row).to_contain_text("cancelled")
    expect(page.get_by_role("button", name=f"Cancel {batch_id}")).to_be_hidden()
    now = batch_server.http.get(f"/v1/batches/{batch_id}").json()
    counts = now["request_counts"]
    assert now["status"] == "cancelled"
    assert 0 < counts["completed"] < N_LINES
    expect(row).to_contain_text(f"{counts['completed']} of {N_LINES} lines")


def test_a_server_that_takes_none_shows_none(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server, "live")
    expect(page.locator("#tiles > div").first).to_be_visible()
    expect(page.locator("#batches")).to_be_hidden()
