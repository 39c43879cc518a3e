"""What a process has shared in a folder stays, until the process leaves it."""

from __future__ import annotations

from pathlib import Path

from serve_app.base.sharing import locks
from serve_app.base.sharing.locks import FolderLocks


def test_nobody_changes_what_is_shared_until_all_is_left(tmp_path: Path) -> None:
    folder = FolderLocks(tmp_path / "locks")
    assert folder.share("model", lambda: True)
    with folder.alone("model") as held:
        assert held is None
    locks.leave_all()
    with folder.alone("model") as held:
        assert held is not None
    locks.leave_all()
    assert folder.share("model", lambda: True)
    locks.leave_all()


def test_one_part_is_left(tmp_path: Path) -> None:
    folder = FolderLocks(tmp_path / "locks")
    for name in ("left", "kept"):
        assert folder.share(name, lambda: True)
    folder.leave("left")
    folder.leave("left")
    for name, is_free in (("left", True), ("kept", False)):
        with folder.alone(name) as held:
            assert (held is not None) is is_free
    locks.leave_all()
