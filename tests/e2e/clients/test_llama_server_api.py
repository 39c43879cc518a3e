"""llama-server's own API with curl, as its README shows it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.e2e.conftest import Corral


def curl(corral: Corral, path: str, body: dict[str, Any] | None = None) -> Any:
    """What curl prints, as JSON."""
    data = [] if body is None else ["--json", json.dumps(body)]
    command = ["curl", "--silent", "--max-time", "60", f"{corral.url}{path}", *data]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def test_completion(corral: Corral) -> None:
    body = {"prompt": "Building a website can be done in 10 simple steps:", "n_predict": 16}
    answer = curl(corral, "/completion", body | {"temperature": 0, "ignore_eos": True})
    assert (answer["stop"], answer["stop_type"]) == (True, "limit")
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == 16
    assert answer["timings"]["predicted_per_second"] > 0
    assert (
        answer["timings"]["prompt_n"] + answer["timings"]["cache_n"] == answer["tokens_evaluated"]
    )
    assert answer["generation_settings"]["temperature"] == 0
    openai_body = body | {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    del openai_body["n_predict"]
    assert curl(corral, "/v1/completions", openai_body)["choices"][0]["text"] == answer["content"]


def test_stream(corral: Corral) -> None:
    body = {"prompt": "Once", "n_predict": 8, "stream": True, "ignore_eos": True, "temperature": 0}
    command = ["curl", "--silent", "--no-buffer", "--max-time", "60", f"{corral.url}/completion"]
    done = subprocess.run([*command, "--json", json.dumps(body)], capture_output=True, check=True)
    lines = [line for line in done.stdout.decode().split("\n\n") if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    tokens = [token for event in events for token in event["tokens"]]
    assert len(tokens) == events[-1]["tokens_predicted"] == 8
    whole = curl(corral, "/completion", body | {"stream": False, "return_tokens": True})
    assert whole["tokens"] == tokens
    assert whole["content"] == "".join(event["content"] for event in events)


def test_tokens_there_and_back(corral: Corral) -> None:
    text = "Hello, wörld!"
    tokens = curl(corral, "/tokenize", {"content": text})["tokens"]
    assert curl(corral, "/detokenize", {"tokens": tokens}) == {"content": text, "prompt": text}
    pieces = curl(corral, "/tokenize", {"content": text, "with_pieces": True})["tokens"]
    assert [piece["id"] for piece in pieces] == tokens


def test_a_template_is_applied_as_chats_are(corral: Corral) -> None:
    messages = [{"role": "user", "content": "Name three fruits."}]
    prompt = curl(corral, "/apply-template", {"model": "demo", "messages": messages})["prompt"]
    assert "Name three fruits." in prompt
    chat = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 20}
    said = curl(corral, "/chat/completions", chat)["choices"][0]["message"]["content"]
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "n_predict": 20}
    assert curl(corral, "/completion", body)["content"] == said


def test_props_slots_and_health(corral: Corral) -> None:
    props = curl(corral, "/props?model=demo")
    slots = curl(corral, "/slots?model=demo")
    assert props["total_slots"] == len(slots) > 0
    assert props["chat_template"]
    assert not any(slot["is_processing"] for slot in slots)
    assert curl(corral, "/health") == {"status": "ok"}
    assert curl(corral, "/models") == curl(corral, "/v1/models")


def test_no_tokens_for_infill(corral: Corral) -> None:
    body = {"input_prefix": "def add(a, b):", "input_suffix": "\n"}
    error = curl(corral, "/infill", body)["error"]
    assert (error["type"], error["param"]) == ("not_supported_error", "suffix")


def test_a_slot_is_saved_and_restored(corral: Corral) -> None:
    body = {"model": "demo", "prompt": "One two three four five six", "n_predict": 4}
    curl(corral, "/completion", body | {"temperature": 0})
    slots = curl(corral, "/slots?model=demo")
    slot = max(slots, key=lambda slot: slot["n_past"])["id"]
    asked = {"model": "demo", "filename": "slot.bin"}
    saved = curl(corral, f"/slots/{slot}?action=save", asked)
    assert saved["n_saved"] > 0
    assert saved["n_written"] == (corral.directory / "slots" / "slot.bin").stat().st_size
    erased = curl(corral, f"/slots/{slot}?action=erase", {"model": "demo"})
    assert erased == {"id_slot": slot, "n_erased": saved["n_saved"]}
    restored = curl(corral, f"/slots/{slot}?action=restore", asked)
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    refused = curl(corral, "/slots/0?action=erase", {"model": "big"})["error"]
    assert "engine.slot_folder" in refused["message"]
