"""Chats in the browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Corral, wait_until
from tests.ui.conftest import ENDLESS, KEY, Open, Watched, n_running, sync_api

expect = sync_api.expect

HOSTILE = (
    "<script>document.title='owned'</script>\n\n"
    "<img src=x onerror=\"document.title='owned'\">\n\n"
    '<iframe src="https://evil.example/"></iframe><style>*{display:none}</style>\n\n'
    "![pixel](https://evil.example/pixel.png) [press](javascript:document.title='owned')\n\n"
    "[data](data:text/html,x) [here](/v1/stats) [web](https://example.org/)\n\n"
    "```html\n<script>document.title='owned'</script>\n```\n\n"
    "| <b>a</b> | [b](vbscript:x) |\n| --- | --- |\n| <svg onload=alert(1)> | &lt;i&gt; |\n"
)


def say(page: Any, text: str) -> Any:
    """Send a message; the answer to it."""
    n_before = page.locator("#messages .assistant").count()
    page.fill("#question", text)
    page.keyboard.press("Enter")
    return page.locator("#messages .assistant").nth(n_before)


def give_more(page: Any, parameters: dict[str, Any]) -> None:
    """Parameters for the next requests."""
    page.click("#settings-button")
    page.fill("#settings textarea[name=more]", json.dumps(parameters))
    page.click("#settings-button")


def done(answer: Any) -> None:
    """Wait for its end."""
    answer.locator(".facts").wait_for()
    expect(answer).not_to_have_attribute("aria-busy", "true")


def test_the_first_chat(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server)
    page.get_by_role("button", name="What is the capital of Portugal?").click()
    answer = page.locator(".assistant")
    done(answer)
    expect(answer.locator(".markdown")).to_contain_text("Lisbon")
    facts = answer.locator(".facts")
    expect(facts).to_contain_text(re.compile(r"\d+ tokens.*\d+ prompt tokens.*first token after"))
    expect(page.locator("#status")).to_contain_text("The answer is complete")
    answer.get_by_text("Where the time went").click()
    expect(answer.locator(".why-body")).to_contain_text("computed")
    expect(answer.locator(".why-key dt")).to_have_count(4)

    page.reload()  # it is kept, and goes on from there
    expect(page.locator(".assistant .markdown")).to_contain_text("Lisbon")
    expect(page.locator("#chats li")).to_have_count(1)
    second = say(page, "List three fruits.")
    done(second)
    expect(second.locator("ol > li")).to_have_count(3)
    second.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".assistant")).to_have_count(2)
    done(page.locator(".assistant").nth(1))


def test_enter_while_an_answer_streams_stops_nothing(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server)
    give_more(page, ENDLESS)
    answer = say(page, "Count.")
    expect(answer.locator(".markdown")).not_to_be_empty()
    page.fill("#question", "And then?")
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_have_value("And then?")  # it waits there
    assert n_running(ui_server) == 1
    expect(answer).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    expect(answer.locator(".facts")).to_contain_text("stopped")


def test_a_question_is_edited_and_asked_again(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server)
    done(say(page, "List three fruits."))
    done(say(page, "Thank you."))
    page.locator("#messages .user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("What is the capital of Portugal?")
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator("#messages .user")).to_have_count(1)
    answer = page.locator("#messages .assistant")
    done(answer)
    expect(answer).to_have_count(1)
    expect(answer.locator(".markdown")).to_contain_text("Lisbon")
    page.locator("#messages .user").get_by_role("button", name="Edit").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#messages .user .plain")).to_have_text("What is the capital of Portugal?")


def test_chats_are_renamed_and_found(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server)
    done(say(page, "List three fruits."))
    page.click("#new-chat")
    done(say(page, "What is the capital of Portugal?"))
    page.get_by_role("button", name="Rename List three fruits.").click()
    page.keyboard.type("Groceries")  # in the place of the old title, which is selected
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Groceries", exact=True)).to_be_visible()
    for wanted, n in (("grocer", 1), ("LISBON", 1), ("nowhere", 0), ("", 2)):
        page.fill("#search-chats", wanted)
        expect(page.locator("#chats li")).to_have_count(n)
    page.reload()
    expect(page.locator("#chats")).to_contain_text("Groceries")


def test_a_text_file_is_attached(ui_server: Corral, open_page: Open, tmp_path: Path) -> None:
    page = open_page(ui_server)
    page.fill("#question", "Read this.")
    notes, picture, large = (tmp_path / name for name in ("notes.md", "a.txt", "large.csv"))
    notes.write_text("# Notes\nein größerer Text")
    page.set_input_files("#text-file", notes)
    text = "Read this.\n\nnotes.md:\n```\n# Notes\nein größerer Text\n```"
    expect(page.locator("#question")).to_have_value(text)
    picture.write_bytes(b"\x89PNG\0")
    large.write_text("1" * 200_001)
    for file, why in ((picture, "a.txt is no text."), (large, "large.csv is larger than 200 kB.")):
        page.set_input_files("#text-file", file)
        expect(page.locator("#picture-error")).to_have_text(why)
        expect(page.locator("#question")).to_have_value(text)


def test_stopping_frees_the_slot(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server)
    give_more(page, ENDLESS)
    answer = say(page, "Tell me a story about a brave fox.")
    expect(answer.locator(".markdown")).not_to_be_empty()
    assert n_running(ui_server) == 1
    page.get_by_role("button", name="Stop").click()
    done(answer)
    wait_until(lambda: n_running(ui_server) == 0, 10, "slot free")
    expect(answer.locator(".facts")).to_contain_text("stopped")
    expect(page.locator("#send")).to_have_text("Send")
    answer.get_by_text("Where the time went").click()
    expect(answer.locator(".why-key")).to_contain_text("read the prompt")


def test_hostile_answers_stay_text(ui_server: Corral, open_page: Open, watched: Watched) -> None:
    """The model itself says it: a grammar allows nothing else."""
    page = open_page(ui_server)
    give_more(page, {"grammar": f"root ::= {json.dumps(HOSTILE)}", "max_tokens": 1500})
    answer = say(page, "Hello!")
    done(answer)
    said = answer.locator(".markdown")
    for text in ("<script>document", "<img src=x onerror", "<iframe src", "<style>", "<svg onload"):
        expect(said).to_contain_text(text)
    expect(
        said.locator("script, img, iframe, style, svg, b, object, form, [onerror]")
    ).to_have_count(0)
    hrefs = said.locator("a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert hrefs == ["https://evil.example/pixel.png", "https://example.org/"]
    expect(said.locator("figure pre code")).to_have_text("<script>document.title='owned'</script>")
    expect(said.locator("td").nth(1)).to_have_text("<i>")
    expect(page).to_have_title("Corral")
    page.reload()
    expect(page.locator(".assistant .markdown")).to_contain_text("<img src=x onerror")
    expect(page).to_have_title("Corral")
    assert watched.errors == []  # so the policy for content had nothing to stop
    assert watched.hosts == {ui_server.url.removeprefix("http://")}


def test_tool_calls_are_folded_and_take_results(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "The weather.", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    give_more(page, {"tools": tools, "tool_choice": "required"})
    answer = say(page, "What is the weather in Lisbon?")
    done(answer)
    call = answer.locator(".calls details")
    expect(call.locator("summary")).to_contain_text("get_weather")
    expect(call.locator("pre")).to_be_hidden()
    call.locator("summary").click()
    expect(call.locator("pre")).to_contain_text('"city"')
    give_more(page, {"tools": tools, "tool_choice": "none"})
    answer.get_by_label("Result of get_weather").fill('{"temperature_celsius": 21}')
    answer.get_by_role("button", name="Send results").click()
    expect(page.locator(".message.tool")).to_contain_text("21")
    done(page.locator(".assistant").nth(1))


def test_exports(ui_server: Corral, open_page: Open, tmp_path: Path) -> None:
    page = open_page(ui_server)
    give_more(page, {"temperature": 0, "user": "o'hara"})
    done(say(page, "List three fruits."))
    page.click("#settings-button")
    with page.expect_download() as download:
        page.click("#export-json")
    download.value.save_as(tmp_path / "chat.json")
    exported = json.loads((tmp_path / "chat.json").read_text())
    assert [message["role"] for message in exported["messages"]] == ["user", "assistant"]
    page.click("#export-curl")
    command = page.locator("#curl").inner_text()
    assert command.startswith(f"curl --no-buffer {ui_server.url}/v1/chat/completions")
    quoted = command.split("-d '", 1)[1].removesuffix("'").replace("'\\''", "'")
    body = json.loads(quoted)
    assert (body["messages"][0]["content"], body["user"]) == ("List three fruits.", "o'hara")
    again = ui_server.http.post(
        "/v1/chat/completions", json=body | {"stream": False, "stream_options": None}
    )
    assert again.json()["choices"][0]["message"]["content"] == exported["messages"][1]["content"]


def test_several_chats_are_kept_until_they_are_deleted(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server)
    for text in ("What is the capital of Portugal?", "List three fruits."):
        page.click("#new-chat")
        done(say(page, text))
    expect(page.locator("#chats li")).to_have_count(2)
    page.get_by_role("button", name="What is the capital of Portugal?", exact=True).click()
    expect(page.locator(".assistant .markdown")).to_contain_text("Lisbon")
    page.get_by_role("button", name="Delete What is the capital of Portugal?").click()
    expect(page.locator("#chats li")).to_have_count(1)
    expect(page.locator("#chat-title")).to_have_text("List three fruits.")


def test_what_cannot_be_asked_is_said(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server)
    give_more(page, {"temprature": 1})
    answer = say(page, "Hello!")
    expect(answer.get_by_role("note")).to_have_text(
        "The server ignored these parameters: temprature"
    )
    page.click("#settings-button")
    page.fill("#settings textarea[name=more]", "[1")
    page.fill("#question", "Hello!")
    page.keyboard.press("Enter")
    expect(page.locator("#messages > .error")).to_contain_text("must be a JSON object")


def test_a_key_is_needed_and_refused(guarded_server: Corral, open_page: Open) -> None:
    page = open_page(guarded_server)
    dialog = page.locator("#key-dialog")
    expect(dialog).to_be_visible()
    page.fill("#key", "not-a-key-of-this-server")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("The API key is not valid here.")
    page.fill("#key", KEY)
    page.get_by_role("button", name="Save").click()
    expect(dialog).to_be_hidden()
    answer = say(page, "What is the capital of Portugal?")
    done(answer)
    expect(answer.locator(".markdown")).to_contain_text("Lisbon")
    assert page.evaluate("JSON.stringify(localStorage).includes('ana-secret')") is False
    page.goto("/#/live")
    expect(page.locator("#live-state")).to_have_text("Live")


def test_a_long_answer_does_not_slow_the_page_down(ui_server: Corral, open_page: Open) -> None:
    """What is final is not made again: its elements stay the same while the text grows."""
    page = open_page(ui_server)
    text = "".join(f"## Part {i}\n\nSome words about {i}.\n\n" for i in range(30))
    give_more(page, {"grammar": f"root ::= {json.dumps(text)}", "max_tokens": 1900})
    answer = say(page, "Hello!")
    answer.locator(".markdown h4").nth(2).wait_for()
    first = answer.locator(".markdown h4").first.element_handle()
    done(answer)
    expect(answer.locator(".markdown h4")).to_have_count(30)
    assert first.evaluate("element => element.isConnected")


@pytest.mark.parametrize("view", ["chat", "compare", "live"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(ui_server: Corral, open_page: Open, view: str, scheme: str) -> None:
    """What axe finds: names, roles, contrast, order."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(ui_server, view, color_scheme=scheme)
    if view == "chat":
        done(say(page, "List three fruits."))
        page.click("#settings-button")
    if view == "live":
        page.locator(".replica details").first.click()
        page.locator(".curve svg").wait_for()
    found = axe.run(page).response["violations"]
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []


def test_the_keyboard_is_enough(ui_server: Corral, open_page: Open) -> None:
    page = open_page(ui_server)
    focused = "document.activeElement.id"
    assert page.evaluate(focused) == "question"
    page.keyboard.type("List three fruits.")
    page.keyboard.press("Enter")
    done(page.locator(".assistant"))
    assert page.evaluate(focused) == "question"
    page.keyboard.press("Shift+Tab")  # back to the button for pictures,
    page.keyboard.press("Shift+Tab")  # to that for text files,
    page.keyboard.press("Shift+Tab")  # and to the messages, and to what is in them
    expect(page.locator("#messages :focus, #messages:focus")).to_have_count(1)
