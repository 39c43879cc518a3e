"""Pages that leave memory, of a mapped file or of what was written."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

from serve_app.kernels.openvino.paged.compiling import forget, forgetting, give_back
from tests.unit.engine.harness import until

N_BYTES = 2**22


def resident(path: Path) -> int:
    """Bytes of the file's mappings that are in this process's memory."""
    n_bytes, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            is_ours = line.endswith(str(path))
        elif is_ours and first == "Rss:":
            n_bytes += 1024 * int(line.split()[1])
    return n_bytes


def test_pages_leave_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    content = bytes(range(256)) * (N_BYTES // 256)
    path.write_bytes(content)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:] == content
        assert resident(path) == N_BYTES
        forget(path)
        assert resident(path) == 0
        assert mapped[:] == content


def test_pages_leave_while_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(256)) * (N_BYTES // 256))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with forgetting(path):
            assert len(mapped[:]) == N_BYTES
            until(lambda: resident(path) == 0)
            assert mapped[-1] == 255
        assert resident(path) == 0


def test_nothing_is_forgotten_after_a_failure(tmp_path: Path) -> None:
    before = set(threading.enumerate())

    def fail() -> None:
        with forgetting(tmp_path / "none.bin"):
            assert set(threading.enumerate()) > before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert set(threading.enumerate()) <= before


def test_what_is_not_mapped_is_left_alone(tmp_path: Path) -> None:
    forget(tmp_path / "none.bin")


def test_only_whole_pages_of_a_range_go_back() -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = np.frombuffer(mmap.mmap(-1, 4 * mmap.PAGESIZE, flags), np.uint8).reshape(4, -1)
    pages[:] = 1
    begin = pages.ctypes.data
    give_back(begin + 1, begin + pages.nbytes - 1)
    assert pages.all(axis=1).tolist() == [True, False, False, True]
    assert not pages[1:3].any()
