"""How many lines are asked for at once."""

from __future__ import annotations

from serve_app.ingress.batch.window import FIRST, LineWindow


async def answered(window: LineWindow, n: int, *, refused: bool = False) -> None:
    for _ in range(n):
        async with window.place("", 1) as place:
            place.refused = refused


async def test_it_doubles_with_each_round_until_one_is_refused() -> None:
    window = LineWindow(256)
    await answered(window, int(FIRST))
    assert window.size == 2 * FIRST
    await answered(window, window.size)
    assert window.size == 4 * FIRST


async def test_from_then_on_it_grows_by_one_a_round() -> None:
    window = LineWindow(256)
    await answered(window, 32)
    assert window.size == 40
    await answered(window, 5, refused=True)
    assert window.size == 32, "what is refused together was asked together"
    await answered(window, 33)
    assert window.size == 33


async def test_it_keeps_to_the_most() -> None:
    window = LineWindow(10)
    await answered(window, 100)
    assert window.size == 10
