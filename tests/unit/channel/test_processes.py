"""Processes that answer, compute, sleep, or are stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from loadtests.common.processes import within
from serve_app.channel import processes

SILENT_S = 0.05


@pytest.mark.parametrize(("code", "is_busy"), [("while True: pass", True), ("input()", False)])
def test_a_process_that_computes_is_busy_unless_it_is_stopped(code: str, is_busy: bool) -> None:
    command = [sys.executable, "-c", f"print(flush=True)\n{code}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert within(60, lambda: processes.is_busy(process.pid) is is_busy)
        os.kill(process.pid, signal.SIGSTOP)
        assert within(60, lambda: not processes.is_busy(process.pid))
        process.kill()
    assert not processes.is_busy(process.pid)


@pytest.mark.parametrize(("is_busy", "n_looks"), [(False, 4), (True, 40)])
async def test_the_silence_of_a_busy_process_counts_a_tenth(
    is_busy: bool, n_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def look(pid: int) -> bool:
        asked.append(pid)
        return is_busy

    async def wait_no_longer(_: object, timeout: float) -> None:  # noqa: ASYNC109
        assert timeout == SILENT_S / 4

    monkeypatch.setattr(asyncio, "wait", wait_no_longer)
    monkeypatch.setattr(processes, "is_busy", look)
    never = asyncio.get_running_loop().create_future()
    assert not await processes.answers(never, 7, SILENT_S)
    assert len(asked) == pytest.approx(n_looks, abs=1)
    assert set(asked) == {7}
    assert not never.cancelled()


async def test_an_answer_may_be_an_error() -> None:
    answer = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(answer.set_exception, EOFError())
    assert await processes.answers(answer, os.getpid(), 3600.0)
    with pytest.raises(EOFError):
        await answer
