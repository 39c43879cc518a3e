"""What Ray's processes write, as the keeper prints it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve_app.cluster.keeper import RayLogs


def shown(logs: RayLogs, capfd: pytest.CaptureFixture[str]) -> list[str]:
    logs.print_new()
    return capfd.readouterr().out.splitlines()


def test_lines_are_shown_once_behind_their_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = RayLogs(tmp_path)
    file = tmp_path / "worker-1f-01000000-42.err"
    file.write_text(":job_id:01000000\nearly\n:actor_name:ServeReplica:corral:Ingress\nready\nhal")
    assert shown(logs, capfd) == ["(pid=42) early", "(ServeReplica:corral:Ingress pid=42) ready"]
    assert shown(logs, capfd) == []
    with file.open("ab") as more:
        more.write(b"f\n\xff\n")
    (tmp_path / "raylet.err").write_text("lost\n")
    (tmp_path / "dashboard_agent.err").write_text("unread\n")
    assert shown(logs, capfd) == [
        "(raylet) lost",
        "(ServeReplica:corral:Ingress pid=42) half",
        "(ServeReplica:corral:Ingress pid=42) \ufffd",
    ]


def test_a_file_that_begins_anew_is_read_from_its_beginning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = RayLogs(tmp_path)
    file = tmp_path / "worker-1f-01000000-42.out"
    file.write_text("first line\n")
    assert shown(logs, capfd) == ["(pid=42) first line"]
    file.write_text("next\n")
    assert shown(logs, capfd) == ["(pid=42) next"]


def test_another_reader_goes_on_where_one_has_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "worker-1f-01000000-42.err"
    file.write_text(":actor_name:ServeController\nfirst\n")
    logs = RayLogs(tmp_path)
    assert shown(logs, capfd) == ["(ServeController pid=42) first"]
    with file.open("a") as more:
        more.write("second\n")
    later = RayLogs(tmp_path, logs.positions, logs.names)
    assert shown(later, capfd) == ["(ServeController pid=42) second"]


def test_what_is_written_while_nobody_looks_is_shown_at_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = RayLogs(tmp_path)
    with logs.following():
        (tmp_path / "worker-1f-01000000-42.err").write_text("last\n")
    assert capfd.readouterr().out == "(pid=42) last\n"


def test_a_line_without_end_is_shown_in_parts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.cluster.keeper._MOST_BYTES", 8)
    logs = RayLogs(tmp_path)
    (tmp_path / "worker-1f-01000000-42.err").write_text("0123456789\n")
    assert shown(logs, capfd) == ["(pid=42) 01234567"]
    assert shown(logs, capfd) == ["(pid=42) 89"]


def test_a_folder_that_is_gone_has_no_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert shown(RayLogs(tmp_path / "gone"), capfd) == []


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "worker-1f-01000000-42.err").write_text("lost\n")
    logs, kept = RayLogs(tmp_path), os.dup(1)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    try:
        logs.print_new()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(full)
    assert logs.positions == {"worker-1f-01000000-42.err": 5}
