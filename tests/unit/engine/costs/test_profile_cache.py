"""Profiles that are kept on disk."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.base.engine_options import EngineOptions
from serve_app.base.sharing.locks import is_locked
from serve_app.engine.costs import profile_cache
from serve_app.engine.costs.cost_model import Profile

PROFILE = Profile({1: 0.5}, {8: 0.25}, {2: 0.1}, 512, {1: 0.75}, {8: 0.5}, 0.007)


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    assert profile_cache.load(folder, "a", Profile) is None
    profile_cache.save(folder, "a", PROFILE)
    assert profile_cache.load(folder, "a", Profile) == PROFILE
    assert profile_cache.load(folder, "b", Profile) is None
    assert [path.name for path in folder.iterdir()] == ["a.json"]


def test_one_process_of_a_node_measures(tmp_path: Path) -> None:
    with profile_cache.alone(tmp_path, "a"):
        assert is_locked(tmp_path / "a.lock")
    assert not is_locked(tmp_path / "a.lock")
    with profile_cache.alone(None, "a"):
        pass


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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"decode_s": 3}', '{"depth": "x"}'])
def test_a_damaged_file_is_said_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / "a.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert profile_cache.load(tmp_path, "a", Profile) is None
    assert "cannot be used" in caplog.text


def test_a_folder_that_cannot_be_made_is_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        profile_cache.save(tmp_path / "file" / "profiles", "a", PROFILE)
    assert "cannot be kept" in caplog.text
