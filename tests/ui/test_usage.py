"""Usage on the page."""

from __future__ import annotations

import httpx

from tests.e2e.conftest import Corral
from tests.ui.conftest import KEY, Open, sync_api

expect = sync_api.expect


def test_ones_own_usage_is_shown_by_day_and_model(guarded_server: Corral, open_page: Open) -> None:
    body = {"model": "demo", "prompt": "Once", "max_tokens": 7, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{guarded_server.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    page = open_page(guarded_server, "usage")
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Save").click()
    row = page.locator("#usage-rows tr").filter(has_text="demo").first
    expect(row).to_contain_text("demo")
    url = f"{guarded_server.url}/v1/usage?group_by=model"
    (used,) = httpx.get(url, headers=headers).json()["data"][-1]["results"]
    cells = row.locator("td").all_text_contents()
    assert cells[2:6] == [
        f"{used[name]:,}"
        for name in (
            *("num_model_requests", "input_tokens"),
            *("input_cached_tokens", "output_tokens"),
        )
    ]
    assert cells[7] == "not measured" or used["joules"] is not None
    n_tokens = used["input_tokens"] + used["output_tokens"]
    plot = page.locator("#usage-plot svg")
    expect(plot).to_have_attribute("aria-label", f"Tokens by day: {n_tokens:,} in 30 days")
    expect(page.locator("#usage-plot g.day")).to_have_count(30)
    expect(page.locator("#usage-key")).to_be_hidden()
