"""Which models stay loaded, by what Serve's controller knows of all of them."""

from __future__ import annotations

import pytest

from serve_app.routing.residents import Residents

KEEP_S = 300.0


def look(
    residents: Residents,
    name: str,
    now: float,
    *,
    n: int = 0,
    wanted: bool = False,
    needed: float = 0.0,
    idle_s: float | None = None,
    most: int = 1,
) -> float:
    """Serve's controller looks at one model, of which `n` replicas run."""
    return residents.n_replicas(
        name,
        now,
        KEEP_S,
        max_loaded=most,
        n_running=n,
        is_wanted=wanted,
        n_needed=needed,
        idle_s=idle_s,
    )


def test_a_model_that_nobody_asked_for_is_not_loaded() -> None:
    assert look(Residents(), "a", 0.0) == 0


def test_it_stays_for_so_long_after_it_was_wanted() -> None:
    residents = Residents()
    assert look(residents, "a", 0.0, wanted=True) == 1
    assert look(residents, "a", 10.0, n=1, wanted=True, needed=0.3) == 1
    assert look(residents, "a", 10.0 + KEEP_S - 1, n=1, idle_s=KEEP_S - 1) == 1
    assert look(residents, "a", 10.0 + KEEP_S, n=1, idle_s=KEEP_S) == 0
    assert look(residents, "a", 11.0 + KEEP_S) == 0


def test_loading_goes_on_when_whoever_asked_has_left() -> None:
    residents = Residents()
    assert look(residents, "a", 0.0, wanted=True) == 1
    assert look(residents, "a", 5.0) == 1


def test_many_replicas_follow_the_load() -> None:
    assert look(Residents(), "a", 0.0, n=1, wanted=True, needed=2.5) == 2.5


def test_what_is_released_goes() -> None:
    residents = Residents()
    look(residents, "a", 0.0, n=1, wanted=True)
    assert look(residents, "a", 1.0, n=1, idle_s=0.5) == 1
    assert look(residents, "a", 2.0, n=1, idle_s=1e9) == 0


def test_the_least_recently_used_gives_way() -> None:
    residents = Residents()
    for name, used in (("a", 20.0), ("b", 10.0)):
        look(residents, name, 0.0, n=1, wanted=True)
        look(residents, name, used, n=1, wanted=True)
    for name in ("a", "b"):
        look(residents, name, 29.0, n=1, most=2)
    residents.are_awaited(["c"], 29.5)
    assert look(residents, "a", 30.0, n=1, most=2) == 1
    assert look(residents, "b", 30.0, n=1, most=2) == 0
    assert look(residents, "b", 30.1, most=2) == 0, "it is not wanted back at once"
    assert look(residents, "a", 30.2, n=1, most=2) == 1, "there is room now"
    assert look(residents, "c", 40.0, n=1, wanted=True, most=2) == 1
    residents.are_awaited([], 40.0)
    assert look(residents, "a", 40.0, n=1, most=2) == 1


def test_where_there_was_room_for_one_more_one_goes_all_the_same() -> None:
    residents = Residents()
    for name, at in (("a", 0.0), ("b", 20.0)):
        look(residents, name, at, n=1, wanted=True)
        look(residents, name, at + 1, n=1)
    assert look(residents, "b", 22.0, n=1) == 1
    assert look(residents, "a", 22.0, n=1) == 0


def test_one_that_is_used_has_its_turn() -> None:
    residents = Residents()
    look(residents, "a", 0.0, n=1, wanted=True)
    residents.are_awaited(["b"], 30.0)
    assert look(residents, "a", 30.0, n=1, wanted=True) == 1
    residents.are_awaited(["b"], 59.0)
    assert look(residents, "a", 60.0, n=1, wanted=True) == 0


@pytest.mark.parametrize(("now", "n"), [(14.0, 1), (16.0, 0)])
def test_one_that_has_just_come_is_not_idle_yet(now: float, n: int) -> None:
    residents = Residents()
    look(residents, "a", 0.0, n=1, wanted=True)
    residents.are_awaited(["b"], now)
    assert look(residents, "a", now, n=1) == n


def test_a_model_that_is_gone_is_forgotten() -> None:
    residents = Residents()
    residents.are_awaited(["gone"], 0.0)
    look(residents, "a", 0.0, n=1, wanted=True)
    assert look(residents, "a", 100.0, n=1) == 1
