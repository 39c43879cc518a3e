"""Workers are real processes: they die, take too long or too much, and cost their own request only."""

from __future__ import annotations

import asyncio
import io
import json
import os
import platform
import re
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from serve_app.base.errors import (
    CorralError,
    EngineClosedError,
    EngineUnavailableError,
    InvalidRequestError,
    PermissionDeniedError,
    QueueFullError,
)
from serve_app.config.serve_options import RayServeOptions
from serve_app.server.answering.preparation import MAX_TEXT_CHARS
from serve_app.server.answering.vectors import MAX_NUMBERS, ComputedVectors
from serve_app.server.http import request_context
from serve_app.server.http.request_context import Caller
from serve_app.server.model_registry import ModelFile, ModelInfo, Models
from serve_app.server.workers import pool as pool_module
from serve_app.server.workers import wire
from serve_app.server.workers import worker as worker_module
from serve_app.server.workers.pool import NICENESS, QUICK_BYTES, SMALL_BYTES, WorkerPool, Zygote
from serve_app.server.workers.worker import SHORTEST_NS, STACK_BYTES, Start
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.integration.ingress import work

FILE = ModelFile("demo", 2048, str(BUILTIN_MODEL))
LINUX = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))


@pytest.fixture(params=["started", "forked"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[WorkerPool]:
    opened = {FILE.id: ModelInfo.open(FILE)} if request.param == "forked" else None
    made = WorkerPool([FILE], [work.__name__], n_quick=2, n_slow=2, opened=opened)
    yield made
    await made.close()


ONE_KIND = pytest.mark.parametrize("pool", ["forked"], indirect=True)
"""For what the pool does, whatever its workers were forked from."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_a_vocabulary_costs_once_is_paid_before_workers_are_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would pay it again, at its first text: a large vocabulary made that slow work."""
    start = worker_module.Start((FILE,), (), wire.name_of(ModelInfo.open))
    models = worker_module._models(start, None)
    assert isinstance(models, dict)
    monkeypatch.delattr(llama_cpp, "llama_vocab_get_text")
    assert models["demo"].tokenizer.least_tokens(1000) > 1


async def test_work_is_done_in_another_process_which_is_used_again(pool: WorkerPool) -> None:
    first = await pool.run("a", work.pid, b"")
    assert first != os.getpid()
    assert await pool.run("b", work.pid, b"") == first
    assert await pool.run("a", work.count_tokens, b"The quick brown fox.") > 3


async def test_workers_have_other_models_when_these_change(pool: WorkerPool) -> None:
    """A worker that knows the earlier ones is not used again, also where it was at work meanwhile."""
    first = await pool.run("a", work.pid, b"")
    sleeping = asyncio.create_task(pool.run("a", work.sleep, b"1"))
    await until(lambda: len(pool.at_work) == 1)
    await pool.renew([FILE, ModelFile("other", 2048, str(BUILTIN_MODEL))])
    assert await pool.run("a", work.names, b"") == ["demo", "other"]
    await sleeping
    for _ in range(3):
        assert await pool.run("a", work.names, b"") == ["demo", "other"]
    await until(lambda: not is_alive(first))


async def test_a_worker_finds_what_the_caller_may_use(pool: WorkerPool) -> None:
    """Also the next caller, whom the same worker serves."""
    for allowed, may in ((None, True), (["other", "d*"], True), (["other"], False), ([], False)):
        request_context.enter(Caller(allowed_models=allowed))
        for name in ("demo", "DEMO:latest", ""):
            if may:
                assert await pool.run("a", work.find_model, name.encode()) == "demo"
                continue
            with pytest.raises(PermissionDeniedError, match="may not use"):
                await pool.run("a", work.find_model, name.encode())


@ONE_KIND
async def test_errors_come_back_as_they_are(pool: WorkerPool) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await pool.run("a", work.refuse, b"")
    assert (refused.value.message, refused.value.param) == ("No.", "prompt")


@ONE_KIND
async def test_what_nobody_thought_of_is_told_without_its_words(pool: WorkerPool) -> None:
    with pytest.raises(CorralError, match="failed to handle") as failed:
        await pool.run("a", work.fail, b"")
    assert "secret" not in str(failed.value)
    assert failed.value.status == 500


async def test_what_ends_two_workers_is_refused_and_not_tried_again(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidRequestError, match="crashed the process"):
        await pool.run("a", work.crash, b"body")
    assert len(caplog.records) == 2
    assert await pool.run("b", work.count_tokens, b"Hello") > 0


@ONE_KIND
async def test_a_worker_that_dies_once_is_replaced_unnoticed(
    pool: WorkerPool, tmp_path: Path
) -> None:
    assert await pool.run("a", work.crash_once, os.fsencode(tmp_path / "died")) == "alive"


@ONE_KIND
async def test_idle_workers_that_died_cost_no_request(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    pids = await asyncio.gather(*(pool.run(client, work.pid, b"") for client in "ab"))
    assert len(set(pids)) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(map(is_alive, pids)))
    assert await pool.run("a", work.count_tokens, b"Hello") > 0
    assert not caplog.records


async def test_memory_is_bounded(pool: WorkerPool) -> None:
    with pytest.raises(InvalidRequestError, match="memory"):
        await pool.run("a", work.take_memory, b"")


async def test_answers_that_cannot_be_packed_are_told_and_cost_no_worker(pool: WorkerPool) -> None:
    first = await pool.run("a", work.pid, b"")
    with pytest.raises(InvalidRequestError, match="memory"):
        await pool.run("a", work.answer_at_length, b"")
    with pytest.raises(CorralError, match="failed to handle"):
        await pool.run("a", work.answer_with_a_socket, b"")
    assert await pool.run("a", work.pid, b"") == first


async def test_what_one_body_took_is_no_bound_for_the_next_to_come(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "QUICK_S", 60.0)  # so that the worker is used again
    monkeypatch.setattr(pool_module, "QUICK_BYTES", 2**30)
    monkeypatch.setattr(pool_module, "SMALL_BYTES", 2**30)
    first = await pool.run("a", work.pid, b"")
    await pool.run("a", work.keep_memory, b"")
    assert await pool.run("b", work.size, bytes(8 * 2**20)) == 8 * 2**20
    assert await pool.run("b", work.pid, b"") == first


@ONE_KIND
async def test_endless_work_ends_and_others_do_not_wait_for_it(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "WALL_S", 1.0)
    endless = [asyncio.create_task(pool.run("evil", work.spin, bytes([i]))) for i in range(4)]
    await asyncio.sleep(0)
    for _ in range(20):
        assert await pool.run("good", work.count_tokens, b"Hello") > 0
    assert not any(task.done() and task.exception() is None for task in endless)
    outcomes = await asyncio.gather(*endless, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {QueueFullError}


@ONE_KIND
async def test_slow_work_gets_what_others_leave_of_the_processors(pool: WorkerPool) -> None:
    running = asyncio.create_task(pool.run("evil", work.spin, b""))

    def slowed() -> bool:
        return any(one.is_idle_priority for one in pool.at_work)

    await until(slowed)
    (worker,) = (one for one in pool.at_work if one.is_idle_priority)
    assert os.sched_getscheduler(worker.pid) == os.SCHED_IDLE
    running.cancel()
    await until(lambda: not is_alive(worker.pid))
    assert await pool.run("good", work.policy, b"") == os.SCHED_OTHER


async def test_long_prompts_are_read_at_a_lower_priority_and_soon(pool: WorkerPool) -> None:
    usual = await pool.run("a", work.niceness, b"")
    long = bytes(SMALL_BYTES + 1)
    assert await pool.run("a", work.niceness, long) == min(19, usual + NICENESS)
    assert await pool.run("a", work.policy, long) == os.SCHED_OTHER
    assert await pool.run("a", work.niceness, b"") == usual


@ONE_KIND
async def test_long_prompts_have_workers_of_their_own_which_are_kept(pool: WorkerPool) -> None:
    long, longer = bytes(SMALL_BYTES + 1), bytes(2 * SMALL_BYTES)
    kept, small = await pool.run("a", work.pid, long), await pool.run("a", work.pid, b"")
    assert kept != small
    assert await pool.run("b", work.pid, longer) == kept
    assert await pool.run("b", work.pid, b"") == small


@ONE_KIND
async def test_small_bodies_wait_for_no_larger_ones(pool: WorkerPool) -> None:
    larger = [bytes(SMALL_BYTES + number) for number in (1, 2, 3)]
    waiting = [asyncio.create_task(pool.run("a", work.wait_for_ever, body)) for body in larger]
    await until(lambda: len(pool.at_work) == 2)
    async with asyncio.timeout(pool_module.STUCK_S / 2):
        await pool.run("b", work.pid, bytes(SMALL_BYTES))
    for task in waiting:
        task.cancel()


@pytest.mark.skipif(LINUX < (6, 12), reason="slices are the kernel's choice here")
async def test_workers_hold_others_up_for_short_slices_only(pool: WorkerPool) -> None:
    for body in (b"", bytes(SMALL_BYTES + 1)):
        assert await pool.run("a", work.slice_ns, body) == SHORTEST_NS


@ONE_KIND
async def test_large_bodies_are_read_soon_at_a_lower_priority_in_places_for_slow_work(
    pool: WorkerPool,
) -> None:
    usual = await pool.run("a", work.niceness, b"")
    large = [bytes(QUICK_BYTES), b"!"]
    endless = asyncio.create_task(pool.run("evil", work.spin, *large))
    await until(lambda: any(one.is_idle_priority for one in pool.at_work))
    waits = asyncio.create_task(pool.run("evil", work.size, *large))
    assert await pool.run("a", work.niceness, *large) == min(19, usual + NICENESS)
    assert await pool.run("a", work.policy, *large) == os.SCHED_OTHER
    assert not waits.done()
    endless.cancel()
    assert await waits == QUICK_BYTES + 1


@ONE_KIND
async def test_a_large_body_that_ended_a_worker_is_slow_work_at_once(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pool_module, "QUICK_BYTES", 0)
    body = bytes(tmp_path / "crashed")
    assert await pool.run("a", work.policy_after_a_crash, body) == os.SCHED_IDLE


@ONE_KIND
async def test_a_client_keeps_no_other_ones_large_bodies_waiting(pool: WorkerPool) -> None:
    endless = [asyncio.create_task(pool.run("evil", work.spin, bytes([i]))) for i in range(3)]
    await until(lambda: any(one.is_idle_priority for one in pool.at_work))
    large = bytes(QUICK_BYTES + 1)
    assert await pool.run("good", work.size, large) == len(large)
    assert not any(task.done() for task in endless)
    for task in endless:
        task.cancel()


@ONE_KIND
async def test_what_has_taken_all_its_time_is_not_tried_again(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "CPU_S", 1.0)
    with pytest.raises(InvalidRequestError, match="seconds of CPU time"):
        await pool.run("a", work.spend_time, b"")
    assert len(caplog.records) == 1


@ONE_KIND
async def test_work_that_waits_for_ever_does_not_keep_its_place(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "STUCK_S", 0.1)
    monkeypatch.setattr(pool_module, "WALL_S", 1.0)
    with pytest.raises(QueueFullError):
        await pool.run("a", work.wait_for_ever, b"")


@ONE_KIND
async def test_one_client_cannot_fill_the_queue_for_slow_work(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MAX_SLOW_WAITING", 1)
    endless = [asyncio.create_task(pool.run("evil", work.spin, bytes([i]))) for i in range(3)]
    done, waiting = await asyncio.wait(endless, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = done
    with pytest.raises(QueueFullError, match="large requests") as told:
        refused.result()
    assert told.value.retry_after_s == 10
    for task in waiting:
        task.cancel()


@ONE_KIND
async def test_who_leaves_ends_the_work(pool: WorkerPool) -> None:
    running = asyncio.create_task(pool.run("a", work.spin, b""))
    await until(lambda: bool(pool.at_work))
    (worker,) = pool.at_work
    running.cancel()
    await until(lambda: not is_alive(worker.pid))


@ONE_KIND
async def test_who_leaves_soon_leaves_the_worker_to_others(pool: WorkerPool) -> None:
    first = await pool.run("a", work.pid, b"")
    for _ in range(5):
        leaving = asyncio.create_task(pool.run("a", work.pid, b""))
        while not pool.at_work:  # noqa: ASYNC110
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        assert await pool.run("b", work.pid, b"") == first


@ONE_KIND
async def test_large_bodies_that_crash_cost_no_worker_of_small_ones(pool: WorkerPool) -> None:
    small = await pool.run("a", work.pid, b"")
    with pytest.raises(InvalidRequestError):
        await pool.run("b", work.crash, bytes(SMALL_BYTES + 1))
    assert await pool.run("a", work.pid, bytes(SMALL_BYTES)) == small


async def test_many_who_leave_before_there_are_workers_leave_few_behind(pool: WorkerPool) -> None:
    for _ in range(10):
        leaving = asyncio.create_task(pool.run("a", work.pid, b""))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
    await asyncio.gather(*(pool.run(client, work.pid, b"") for client in "ab"))
    assert 1 <= len(pool._idle) <= 2


async def test_workers_have_room_for_the_tokenizers_recursion(pool: WorkerPool) -> None:
    assert await pool.run("a", work.stack_limit, b"") == STACK_BYTES


async def test_a_forked_zygote_reads_no_vocabulary_and_has_no_files_of_the_ingress() -> None:
    """It would keep connections open that the ingress has closed."""
    gone, opened = replace(FILE, path="/nowhere.gguf"), {FILE.id: ModelInfo.open(FILE)}
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    pool = WorkerPool([gone], [work.__name__], opened=opened)
    os.close(writing)
    try:
        assert await pool.run("a", work.count_tokens, b"The quick brown fox.") > 3
        assert os.read(reading, 1) == b""  # it would block if somebody had the other end
    finally:
        os.close(reading)
        await pool.close()


async def test_the_zygote_is_started_again(pool: WorkerPool) -> None:
    first = await pool.run("a", work.pid, b"")
    os.kill(pool._zygote.pid, signal.SIGKILL)
    ended = os.WEXITED | os.WNOWAIT | os.WNOHANG
    await until(lambda: os.waitid(os.P_PID, pool._zygote.pid, ended) is not None)
    with pytest.raises(InvalidRequestError):
        await pool.run("a", work.crash, b"x")  # the idle worker goes, too
    second = await pool.run("a", work.pid, b"")
    assert second != first


async def test_work_is_refused_if_the_process_that_forks_is_lost_again_and_again(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who adds a model meanwhile is refused, too, and leaves no process behind."""
    lost = list[int]()

    class Lost(Zygote):
        def __init__(self, start: Start, models: Models | None = None) -> None:
            super().__init__(start, models)
            lost.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(pool_module, "Zygote", Lost)
        os.kill(pool._zygote.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailableError):
            await pool.run("a", work.pid, b"")
        with pytest.raises(EngineUnavailableError):
            await pool.renew([FILE])
        assert not is_alive(lost[-1])
    assert await pool.run("a", work.pid, b"")


@pytest.fixture
async def watched() -> AsyncIterator[WorkerPool]:
    """A pool that asks its processes often, and gives silent ones little time."""
    options = RayServeOptions(health_check_period_s=0.05, health_check_timeout_s=0.5)
    made = WorkerPool([FILE], [work.__name__], n_quick=1, n_slow=1, options=options)
    watching = asyncio.create_task(made.watch())
    yield made
    watching.cancel()
    await made.close()


async def test_a_zygote_that_hangs_is_replaced_before_somebody_needs_it(
    watched: WorkerPool,
) -> None:
    first = await watched.run("a", work.pid, b"")
    stopped = watched._zygote
    os.kill(stopped.pid, signal.SIGSTOP)
    await until(lambda: watched._zygote is not stopped)
    assert not is_alive(stopped.pid)
    with pytest.raises(InvalidRequestError):
        await watched.run("a", work.crash, b"x")
    assert await watched.run("a", work.pid, b"") != first


async def test_an_idle_worker_that_hangs_is_replaced_before_somebody_needs_it(
    watched: WorkerPool,
) -> None:
    first = await watched.run("a", work.pid, b"")
    os.kill(first, signal.SIGSTOP)
    await until(lambda: not is_alive(first))
    assert await watched.run("a", work.pid, b"") != first


async def test_work_of_a_worker_that_hangs_is_done_by_another(
    watched: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "STUCK_S", 0.1)
    running = asyncio.create_task(watched.run("a", work.spin, b""))
    await until(lambda: bool(watched.at_work))
    (worker,) = watched.at_work
    os.kill(worker.pid, signal.SIGSTOP)
    await until(lambda: not is_alive(worker.pid))
    await until(lambda: bool(watched.at_work))
    running.cancel()


async def test_the_pool_ends_with_processes_that_are_stopped(watched: WorkerPool) -> None:
    worker, zygote = await watched.run("a", work.pid, b""), watched._zygote.pid
    for pid in (worker, zygote):
        os.kill(pid, signal.SIGSTOP)
    await watched.close()
    assert not is_alive(zygote)
    await until(lambda: not is_alive(worker))


async def test_all_processes_end_with_the_pool() -> None:
    pool = WorkerPool([], [work.__name__], n_quick=1, n_slow=1)
    worker, zygote = await pool.run("a", work.pid, b""), pool._zygote.pid
    await pool.close()
    assert not is_alive(zygote)
    await until(lambda: not is_alive(worker))


async def test_work_ends_with_the_pool_and_starts_no_process_again() -> None:
    pool = WorkerPool([], [work.__name__])
    running = asyncio.create_task(pool.run("a", work.spin, b""))
    await until(lambda: bool(pool.at_work))
    await pool.close()
    with pytest.raises(EngineClosedError):
        await running
    with pytest.raises(EngineClosedError):
        await pool.run("a", work.pid, b"")
    assert not is_alive(pool._zygote.pid)


@pytest.mark.parametrize(("mode", "kind"), [("RGB", "PNG"), ("RGBA", "PNG"), ("CMYK", "JPEG")])
async def test_the_largest_pictures_fit_into_a_workers_memory(
    pool: WorkerPool, mode: str, kind: str
) -> None:
    image = pytest.importorskip("PIL.Image")
    made = io.BytesIO()
    image.new(mode, (4096, 4096)).save(made, kind)
    assert await pool.run("a", work.see, made.getvalue()) == (2048, 2048, 3 * 2048**2)


@pytest.mark.parametrize("as_base64", [False, True])
async def test_the_most_vectors_fit_into_a_workers_memory(
    pool: WorkerPool, as_base64: bool
) -> None:
    """Their JSON and its copies take many times their own bytes."""
    vectors = np.full((2048, MAX_NUMBERS // 2048), -1.2345678e-30, np.float32)
    form = ComputedVectors("demo", 1, as_base64=as_base64, norm=-1)
    answer = await pool.run("a", work.write_vectors, *form.pieces(vectors))
    assert answer.count(b'"index":') == 2048


async def test_the_longest_text_fits_into_a_workers_memory() -> None:
    text = ("The quick brown fox jumps over the lazy dog. " * 20_000)[:MAX_TEXT_CHARS]
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    long_context = ModelFile("demo", 2**20, str(BUILTIN_MODEL))
    pool = WorkerPool([long_context], [work.__name__], n_quick=1, n_slow=1)
    try:
        assert await pool.run("a", work.count_tokens_of_chat, body) > 150_000
    finally:
        await pool.close()
