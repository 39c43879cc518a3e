"""Open requests: their bound, and who finds room."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest

from serve_app.errors import RateLimitError
from serve_app.ingress.access.turnstile import OpenRequests


def fill(requests: OpenRequests, held: ExitStack, client: str) -> int:
    """How many the client gets until it is refused."""
    n = 0
    with suppress(RateLimitError):
        while n <= requests.limit:
            held.enter_context(requests.entered(client))
            n += 1
    return n


@pytest.mark.parametrize(
    ("limit", "got"), [(1000, [800, 160, 32]), (10, [8, 2, 0]), (1, [1, 0]), (2, [2, 0])]
)
def test_each_gets_four_fifths_of_what_is_left(limit: int, got: list[int]) -> None:
    requests = OpenRequests(limit)
    with ExitStack() as held:
        assert [fill(requests, held, f"client {i}") for i in range(len(got))] == got
        assert len(requests) == sum(got)
    assert len(requests) == 0


def test_a_newcomer_finds_a_place_until_none_is_left() -> None:
    requests = OpenRequests(8)
    with ExitStack() as held:
        assert fill(requests, held, "greedy") == 7
        for number in range(1):
            held.enter_context(requests.entered(f"newcomer {number}"))
        with pytest.raises(RateLimitError, match=r"0 open requests.* 8 of at most 8") as told:
            held.enter_context(requests.entered("too late"))
        assert told.value.retry_after_s == 1


def test_who_leaves_makes_room_and_is_forgotten() -> None:
    requests = OpenRequests(4)
    with ExitStack() as held:
        assert fill(requests, held, "a") == 4
    with ExitStack() as held:
        assert fill(requests, held, "b") == 4
    assert not requests._by_client
