"""Profiles that are kept on disk."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine.autotune import profile_cache
from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.modes import Mode, ModeChoice
from serve_app.engine.backends.choice import KernelsChoice
from serve_app.engine.options import EngineOptions
from serve_app.llama.formats import Threads

CHOICE = ModeChoice(
    Mode(flash_attn=True, kv_unified=False),
    "split: as configured",
    Profile({1: 0.5}, {8: 0.25}, {2: 0.1}, 512, {1: 0.75}, {8: 0.5}, 0.007),
)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"threads": Threads(2, 3, 4, "measured")},
        {"other": (Mode(flash_attn=True, kv_unified=True), Profile({1: 0.25}, masked=0.5))},
    ],
)
def test_what_was_kept_is_found_again(tmp_path: Path, changed: dict[str, Any]) -> None:
    folder, choice = tmp_path / "profiles", replace(CHOICE, **changed)
    assert profile_cache.load(folder, "a", ModeChoice) is None
    profile_cache.save(folder, "a", choice)
    assert profile_cache.load(folder, "a", ModeChoice) == choice
    assert profile_cache.load(folder, "b", ModeChoice) is None
    assert [path.name for path in folder.iterdir()] == ["a.json"]


def test_a_choice_of_a_backend_is_found_again(tmp_path: Path) -> None:
    choice = KernelsChoice("openvino", "measured")
    assert profile_cache.load(tmp_path, "a", KernelsChoice) is None
    profile_cache.save(tmp_path, "a", choice)
    assert profile_cache.load(tmp_path, "a", KernelsChoice) == choice
    (tmp_path / "a.json").write_text('{"name": "vllm", "reason": ""}')
    assert profile_cache.load(tmp_path, "a", KernelsChoice) is None


def test_other_conditions_have_another_name() -> None:
    options = EngineOptions(n_slots=2, n_ctx_slot=64, threads=2)
    names = {
        profile_cache.key(options, model="m"),
        profile_cache.key(options, model="n"),
        profile_cache.key(replace(options, threads=4), model="m"),
        profile_cache.key(replace(options, n_batch=256), model="m"),
        profile_cache.key(replace(options, pinned=((1, 2),)), model="m"),
    }
    assert len(names) == 5
    assert profile_cache.key(replace(options, max_waiting=3), model="m") in names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"decode_s": {"1": 0.5}}',
        '{"mode": {"flash_attn": true, "kv_unified": false}, "reason": "", "profile": {"depth": "x"}}',
        '{"mode": {"flash_attn": true, "kv_unified": false}, "reason": "", "profile": {"decode_s": 3}}',
        '{"mode": {"flash_attn": true, "kv_unified": "no"}, "reason": "", "profile": {}}',
        '{"mode": {"flash_attn": true}, "reason": "", "profile": {}}',
        '{"mode": {"flash_attn": true, "kv_unified": true}, "reason": "", "profile": {}, "other": [1]}',
        '{"mode": {"flash_attn": true, "kv_unified": true}, "reason": "", "profile": {}, "threads": 2}',
    ],
)
def test_a_damaged_file_is_said_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / "a.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert profile_cache.load(tmp_path, "a", ModeChoice) is None
    assert "cannot be used" in caplog.text


def test_a_folder_that_cannot_be_made_is_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        profile_cache.save(tmp_path / "file" / "profiles", "a", CHOICE)
    assert "cannot be kept" in caplog.text
