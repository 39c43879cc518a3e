"""Listings of repositories: kept, and asked for again."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.config.model_names import HubName
from serve_app.store import hub, remote

COMMIT = "0123456789" * 4
LISTING: remote.Listing = {
    "commit": COMMIT,
    "files": [{"path": path, "n_bytes": 1} for path in ("a-Q4_0.gguf", "mmproj-a.gguf")],
}


def test_a_commit_is_asked_for_once_and_a_branch_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[HubName] = []

    def ask(name: HubName) -> remote.Listing:
        asked.append(name)
        return LISTING

    monkeypatch.setattr(hub, "_ask", ask)
    branch = HubName("owner/name")
    for _ in range(2):
        assert hub.pin(branch, tmp_path) == HubName("owner/name", "a-Q4_0.gguf", COMMIT)
    commit = HubName("owner/name", "Q4_0", COMMIT)
    assert [file.path for file in hub.find(commit, tmp_path).files] == ["a-Q4_0.gguf"]
    assert asked == [branch, branch]


def test_what_was_known_counts_while_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(_name: HubName) -> remote.Listing:
        raise remote.UnreachableError("scripted")

    monkeypatch.setattr(hub, "_ask", unreachable)
    monkeypatch.setattr(hub, "_in_library", lambda _name: None)
    with pytest.raises(remote.UnreachableError, match="scripted"):
        hub.pin(HubName("owner/name"), tmp_path)
    monkeypatch.setattr(hub, "_ask", lambda _name: LISTING)
    hub.pin(HubName("owner/name"), tmp_path)
    monkeypatch.setattr(hub, "_ask", unreachable)
    assert hub.pin(HubName("owner/name"), tmp_path).revision == COMMIT
