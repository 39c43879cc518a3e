"""How engines take turns on the cores of a machine."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_app.base.sharing import turns
from serve_app.base.sharing.turns import Turns

# Takes the turn and says so for each line that it reads; keeps the turn until then.
PROGRAM = """
import sys
from pathlib import Path
from serve_app.base.sharing.turns import Turns
ours = Turns(Path(sys.argv[1]))
for line in sys.stdin:
    ours.give() if line.strip() == "give" else ours.take()
    print("done", flush=True)
"""


class Clock:
    """The time that the turns go by."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        threading.Event().wait(seconds)  # another thread has the lock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turns, "time", clock)
    return clock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns" / "0-1"


class Process:
    """Another engine, in a process of its own."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def ask(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def wait_until_done(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture
def other(path: Path) -> Iterator[Process]:
    other = Process(path)
    yield other
    other.process.kill()
    other.process.communicate()


def test_alone_a_turn_takes_as_long_as_it_likes(path: Path, clock: Clock) -> None:
    ours = Turns(path, stall_s=0.25)
    assert ours.take() == math.inf
    clock.now += 5
    assert ours.take() == math.inf
    ours.give()
    assert (ours.held_s, ours.waited_s) == (5, 0)
    ours.close()


def test_beside_others_a_step_leaves_each_of_them_one_before_a_stream_has_waited_too_long(
    path: Path, clock: Clock
) -> None:
    ours, other = Turns(path), Turns(path, stall_s=0.06)
    other.take()
    other.give()
    assert ours.take() == pytest.approx(0.03)
    ours.give()
    clock.now += 2
    assert ours.take() == pytest.approx(0.06)  # it may come back
    ours.give()
    clock.now += 9
    assert ours.take() == math.inf  # it rests
    ours.close()
    other.close()


def _let(one: Turns, seconds: float, clock: Clock) -> None:
    """Have an engine compute for so long, in its turn."""
    one.take()
    clock.now += seconds


def test_who_had_least_is_next(path: Path, clock: Clock) -> None:
    first, second, third = (Turns(path) for _ in range(3))
    order = []
    _let(first, 0.3, clock)
    with ThreadPoolExecutor(2) as pool:

        def compute(name: str, one: Turns, seconds: float) -> None:
            one.take()
            order.append(name)
            clock.now += seconds
            one.take()  # the others have had less
            order.append(name)
            one.give()

        second_done = pool.submit(compute, "second", second, 0.2)
        _wait_for_waiting(first, 1)
        third_done = pool.submit(compute, "third", third, 0.05)
        _wait_for_waiting(first, 2)
        clock.now += 0.1  # the others are level with the 0.3 s that it had when they came
        first.take()
        order.append("first")
        first.give()
        second_done.result()
        third_done.result()
    # After these turns, they have had 0.4, 0.5 and 0.35 s.
    assert sorted(order[:2]) == ["second", "third"]
    assert order[2:] == ["third", "first", "second"]
    assert first.held_s == pytest.approx(0.4)
    assert second.held_s == pytest.approx(0.2)
    for one in (first, second, third):
        one.close()


def _wait_for_waiting(one: Turns, n: int) -> None:
    while one._table.n_waiting < n:
        threading.Event().wait(0.001)


def test_a_short_step_does_not_end_a_turn(path: Path, clock: Clock) -> None:
    ours, other = Turns(path), Turns(path)
    ours.take()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.take)
        _wait_for_waiting(ours, 1)
        clock.now += 0.03
        ours.take()
        assert not waiting.done()
        clock.now += 0.03
        with ThreadPoolExecutor(1) as mine:
            again = mine.submit(ours.take)
            waiting.result()
            assert not again.done()
            other.give()
            again.result()
    ours.close()
    other.close()


def test_who_rests_saves_nothing_and_keeps_its_debts(path: Path, clock: Clock) -> None:
    ours, other = Turns(path), Turns(path)
    _let(ours, 0.4, clock)
    ours.give()
    _let(other, 5.0, clock)  # nobody waited: it owes nothing
    other.give()
    entries = ours._table.entries
    ours.take()
    assert (entries[0].had_s, entries[1].had_s) == (0.0, 0.0)
    clock.now += 1.0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.take)
        _wait_for_waiting(ours, 1)
        ours.give()
        waiting.result()
    clock.now += 0.5
    other.give()
    # The other one came when the first had had its second: neither owes the other anything for that.
    assert (entries[0].had_s, entries[1].had_s) == (1.0, 1.5)
    assert (ours.held_s, other.held_s) == pytest.approx((1.4, 5.5))
    ours.close()
    other.close()


def test_work_behind_all_others_waits_and_can_become_urgent(path: Path, clock: Clock) -> None:
    ours, other = Turns(path), Turns(path)
    _let(other, 0.1, clock)
    moved = iter(range(1, 1000))

    def tick() -> float:
        return clock.now + 0.2 * next(moved)

    clock.monotonic = tick  # type: ignore[method-assign]
    assert ours.take(behind=True) is None
    other.give()
    assert ours.take() is not None
    ours.give()
    ours.close()
    other.close()


def test_who_gives_up_gives_the_turn_that_came_in_the_meantime(path: Path, clock: Clock) -> None:
    ours, other = Turns(path), Turns(path)
    _let(other, 0.1, clock)
    ours._table.entries[ours._index].waits = True  # as after a wait `behind` that was too long
    other.give()
    assert ours._table.holder == ours._index
    ours.give()
    assert ours._table.holder == -1
    assert other.take() is not None
    ours.close()
    other.close()


def test_who_waited_behind_the_others_is_owed_nothing(path: Path, clock: Clock) -> None:
    """Its background work waited for ten minutes. Then it has a stream, too."""
    ours, other, third = (Turns(path) for _ in range(3))
    entries = ours._table.entries
    _let(other, 600, clock)
    entries[0].waits = entries[0].is_behind = ours._table.n_waiting = True
    other.take()
    assert entries[1].had_s == 600
    with ThreadPoolExecutor(2) as pool:
        new = pool.submit(third.take)
        _wait_for_waiting(ours, 2)
        assert entries[2].had_s == 600  # and not as little as who waits behind
        urgent = pool.submit(ours.take)
        while entries[0].is_behind:
            threading.Event().wait(0.001)
        assert entries[0].had_s == 600
        other.give()
        for waiting, one in ((urgent, ours), (new, third)):
            waiting.result()
            one.give()
    for one in (ours, other, third):
        one.close()


def test_who_computes_for_too_long_is_passed_over_and_is_level_with_the_others_then(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ours, other = Turns(path), Turns(path)
    ours.take()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.take)
        _wait_for_waiting(ours, 1)
        clock.now += 3
        waiting.result()
        assert "holds its turn: others go on" in caplog.text
        clock.now += 60
        again = pool.submit(ours.take)
        _wait_for_waiting(other, 1)
        assert ours.held_s == 3  # until it was passed over
        assert ours._table.entries[0].had_s == other._table.entries[1].had_s + 60
        other.give()
        again.result()
    ours.close()
    other.close()


def test_who_has_one_turn_after_the_other_is_not_passed_over(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ours, other = Turns(path), Turns(path)
    ours.take()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.take)
        _wait_for_waiting(ours, 1)
        ours._table.entries[1].had_s = 100.0
        for _ in range(60):
            clock.now += 0.06
            ours.take()
            threading.Event().wait(0.004)  # it looks some times
        assert not waiting.done()
        ours.give()
        waiting.result()
    assert "holds its turn" not in caplog.text
    ours.close()
    other.close()


def test_folders_may_have_long_names(tmp_path: Path) -> None:
    """The address of a socket has 107 characters."""
    path = tmp_path / ("folder" * 20) / "turns" / "0-1"
    ours, other = Turns(path), Turns(path)
    ours.take()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.take)
        _wait_for_waiting(ours, 1)
        ours.give()
        waiting.result()
    ours.close()
    other.close()


def test_bells_may_be_lost_or_left_behind(path: Path) -> None:
    """By who cleans up folders, and by who was killed before it had its entry."""
    ours = Turns(path)
    name = ours._name
    (path.parent / f"{name}.1").touch()
    other = Turns(path)
    ours.take()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.take)
        _wait_for_waiting(ours, 1)
        (path.parent / f"{name}.1").unlink()
        ours.give()
        assert waiting.result() is not None
    assert ours._table.entries[1].pid == os.getpid()
    ours.close()
    other.close()


def test_what_passes_of_all_take_is_known_to_each(path: Path) -> None:
    ours, other = Turns(path), Turns(path)
    assert ours.expect(0.2) == 0.2
    assert other.expect(0.1) == pytest.approx(0.3)
    ours.close()
    assert other.expect(0.1) == 0.1
    other.close()
    assert turns.Alone().expect(0.1) == 0.1


def test_a_holder_that_is_killed_gives_the_turn(path: Path, other: Process) -> None:
    ours = Turns(path)
    other.ask("take")
    other.wait_until_done()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ours.take)
        _wait_for_waiting(ours, 1)
        other.process.send_signal(signal.SIGKILL)
        assert waiting.result() == math.inf  # it is not among the active ones any more
    assert ours._table.entries[1 - ours._index].pid == 0
    ours.close()


def test_a_holder_that_is_stopped_is_passed_over_and_comes_back(
    path: Path, other: Process, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Turns(path)
    other.ask("take")
    other.wait_until_done()
    other.process.send_signal(signal.SIGSTOP)
    ours.take()
    assert f"process {other.process.pid} holds its turn" in caplog.text
    other.process.send_signal(signal.SIGCONT)
    other.ask("take")
    _wait_for_waiting(ours, 1)
    ours.give()
    other.wait_until_done()
    other.ask("give")
    other.wait_until_done()
    ours.take()
    ours.close()


def test_one_that_is_stopped_while_it_waits_is_passed_over(path: Path, other: Process) -> None:
    first, second = Turns(path), Turns(path)
    first.take()
    other.ask("take")
    _wait_for_waiting(first, 1)
    other.process.send_signal(signal.SIGSTOP)
    first.give()  # to the stopped one
    second.take()
    second.give()
    other.process.send_signal(signal.SIGCONT)
    other.wait_until_done()
    first.close()
    second.close()


def test_entries_of_the_dead_are_used_again(path: Path, other: Process) -> None:
    other.ask("give")
    other.wait_until_done()
    other.process.kill()
    other.process.wait()
    ours = Turns(path)
    assert (ours._index, ours._table.n_entries) == (0, 1)
    ours.close()


def test_there_are_places_for_64(path: Path) -> None:
    all_of_them = [Turns(path) for _ in range(64)]
    with pytest.raises(OSError, match="64 engines share"):
        Turns(path)
    for one in all_of_them:
        one.close()
    Turns(path).close()
    assert len(list(path.parent.iterdir())) == 1


def test_without_a_file_the_cores_are_ones_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with turns.join(None):
        assert turns.current().take() == math.inf
    (tmp_path / "file").touch()
    with turns.join(tmp_path / "file" / "turns"):
        assert turns.current().take() == math.inf
    assert "takes no turns with others" in caplog.text


def test_within_a_turn_another_one_is_the_same(path: Path, clock: Clock) -> None:
    with turns.join(path):
        ours = turns.current()
        with ours.turn():
            clock.now += 1
            with ours.turn():
                clock.now += 1
            assert ours.take() == math.inf
        assert ours.held_s == 2
    assert isinstance(turns.current(), turns.Alone)
