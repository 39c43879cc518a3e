"""`/v1/live` of a real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import DEMO_SLOTS, Corral, model, sse, wait_until
from tests.unit.apis.page.test_snapshot import merged

Boards = Iterator[dict[str, Any]]
_ENDLESS = {"max_tokens": 200_000, "ignore_eos": True, "context_shift": True}
_QUIET_S = 1.5


@contextmanager
def viewing(server: Corral) -> Iterator[Boards]:
    """The board after each event."""

    def boards(lines: Iterator[str]) -> Boards:
        board: dict[str, Any] = {}
        for line in lines:
            if line:
                board = merged(board, sse(line))
                yield board

    with httpx.stream("GET", f"{server.url}/v1/live", timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield boards(answer.iter_lines())


def replica(board: dict[str, Any], model_id: str) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = [one for one in board["replicas"].values() if one["model"] == model_id]
    return found


def n_looks(server: Corral) -> int:
    """How often engines have been asked for their statistics, by their logs."""
    logs = (server.directory / "ray").glob("session_2*/logs/serve/replica_*engine-*.log")
    return sum(log.read_text().count("CALL stats ") for log in logs)


def test_viewers_see_requests_come_and_go(corral: Corral) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story."}]}
    with viewing(corral) as boards:
        board = next(boards)
        assert set(board["models"]) == {"big", "small", "demo"}
        assert board["models"]["demo"]["states"] == {"RUNNING": 1}
        asked = corral.http.stream(
            "POST", "/v1/chat/completions", json=body | _ENDLESS | {"stream": True}
        )
        with asked:
            busy = next(board for board in boards if replica(board, "demo")["generated_per_s"] > 0)
            told = replica(busy, "demo")
            assert (told["running"], told["n_slots"]) == (1, DEMO_SLOTS)
            (slot,) = [slot for slot in told["slots"].values() if slot[0] == "decode"]
            assert slot[3] > 0
            assert told["point"][0] == 1
            assert told["ttft"][3] > 0
        assert next(True for board in boards if replica(board, "demo")["running"] == 0)


def test_nobody_is_asked_while_nobody_views(corral: Corral, without_ray: bool) -> None:
    if without_ray:
        pytest.skip("counts lines that Serve writes")
    with viewing(corral) as boards, viewing(corral) as others:
        for _ in range(3):
            next(boards), next(others)

    def quiet() -> bool:
        before = n_looks(corral)
        time.sleep(_QUIET_S)
        return before > 0 and n_looks(corral) == before

    wait_until(quiet, 60, "the looks have ended")


@pytest.mark.long
def test_a_viewer_does_not_hold_up_the_end(start: Callable[..., Corral]) -> None:
    """Serve waits for requests that run; this one would run for ever."""
    server = start([model(None, "demo", n_slots=1, n_ctx_slot=512)])
    server.wait_ready()
    with viewing(server) as boards:
        next(boards)
        server.stop()
        with suppress(
            httpx.RemoteProtocolError
        ):  # Serve's proxy may be gone before it has told the end
            list(boards)
    assert "force-killing" not in server.log
