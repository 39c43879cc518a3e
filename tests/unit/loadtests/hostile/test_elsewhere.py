"""Attackers get what others leave of the processors, and end with their time."""

from __future__ import annotations

import os
import time
from typing import NoReturn

import pytest

from loadtests.hostile import elsewhere


def test_what_a_function_returns_comes_back_from_a_process_that_gives_way() -> None:
    told = elsewhere.call(lambda: (os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)), 60)
    assert told is not None
    pid, niceness = told
    assert pid != os.getpid()
    assert niceness == elsewhere.LAST


def test_a_large_answer_comes_back_whole() -> None:
    assert elsewhere.call(lambda: bytes(2**20), 60) == bytes(2**20)


def test_what_does_not_end_is_ended() -> None:
    assert elsewhere.call(lambda: time.sleep(600), 0.1) is None


def test_what_fails_returns_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> NoReturn:
        raise ValueError("broken")

    assert elsewhere.call(fail, 60) is None
    assert "ValueError: broken" in capfd.readouterr().err
