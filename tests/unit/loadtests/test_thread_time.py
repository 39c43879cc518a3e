"""CPU time beside the computing threads."""

from __future__ import annotations

import os
import threading

from loadtests.common.thread_time import beside_compute_s, thread_times


def test_the_busiest_threads_of_the_busiest_process_are_left_out() -> None:
    before = {(1, 1): 5.0, (1, 2): 1.0, (2, 2): 9.0}
    after = {(1, 1): 5.5, (1, 2): 9.0, (1, 3): 7.0, (2, 2): 12.0, (3, 3): 0.25}
    assert beside_compute_s(before, after, 2) == 0.5 + 3.0 + 0.25
    assert beside_compute_s({}, {}, 2) == 0.0


def test_every_thread_of_a_process_is_seen_and_ended_processes_are_not() -> None:
    seen, leave = threading.Event(), threading.Event()

    def work() -> None:
        sum(range(200_000))
        seen.set()
        leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert seen.wait(10)
        times = thread_times([os.getpid(), 2**22 + 1])
    finally:
        leave.set()
        thread.join()
    assert times[os.getpid(), thread.native_id or 0] > 0
    assert {pid for pid, _ in times} == {os.getpid()}
