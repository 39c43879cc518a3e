"""Listings of repositories: kept, and asked for again."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.store import hub, remote
from serve_app.store.names import HubName

COMMIT = "0123456789" * 4
WHOLE: remote.Listing = {
    "commit": COMMIT,
    "files": [{"path": path, "n_bytes": 1} for path in ("a-Q4_0.gguf", "mmproj-a.gguf")],
}
PART: remote.Listing = {"commit": COMMIT, "files": WHOLE["files"][:1]}


def test_a_part_that_others_know_is_not_kept_as_the_whole_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = HubName("owner/name", "a-Q4_0.gguf", COMMIT)

    def unreachable(_name: HubName) -> remote.Listing:
        raise remote.UnreachableError("scripted")

    monkeypatch.setattr(hub, "_ask", unreachable)
    monkeypatch.setattr(hub, "_in_library", lambda _name: None)
    found = hub.find(name, tmp_path, lambda: PART)
    assert [file.path for file in found.files] == ["a-Q4_0.gguf"]

    monkeypatch.setattr(hub, "_ask", lambda _name: WHOLE)
    assert hub.files(name, tmp_path) == ["a-Q4_0.gguf", "mmproj-a.gguf"]
    monkeypatch.setattr(hub, "_ask", unreachable)  # a commit never changes
    assert hub.files(name, tmp_path) == ["a-Q4_0.gguf", "mmproj-a.gguf"]
