"""What clients have had of the decoder."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.policy.accounts import Accounts


def entered(*clients: str) -> Accounts:
    accounts = Accounts()
    for client in clients:
        accounts.enter(client)
    return accounts


def test_who_is_served_is_charged() -> None:
    accounts = entered("a", "b")
    accounts.charge("a", 2.0)
    accounts.charge("a", 0.5)
    assert (accounts["a"], accounts["b"], accounts.active) == (2.5, 0.0, 2)


def test_who_comes_starts_at_the_least_of_those_who_are_there() -> None:
    accounts = entered("a", "b")
    accounts.charge("a", 5.0)
    accounts.charge("b", 3.0)
    accounts.enter("c")
    assert accounts["c"] == 3.0


def test_who_was_away_has_saved_nothing_up() -> None:
    accounts = entered("a", "b")
    accounts.leave("b")
    accounts.charge("a", 4.0)
    accounts.enter("b")
    assert accounts["b"] == 4.0


def test_who_is_away_for_a_moment_keeps_its_debt() -> None:
    accounts = entered("a", "b")
    accounts.charge("b", 9.0)
    accounts.leave("b")
    accounts.charge("a", 1.0)
    accounts.enter("b")
    assert (accounts["a"], accounts["b"]) == (1.0, 9.0)


def test_a_second_request_changes_nothing() -> None:
    accounts = entered("a", "b")
    accounts.charge("b", 9.0)
    accounts.enter("a")
    accounts.leave("a")
    assert (accounts["a"], accounts.active) == (0.0, 2)


def test_nothing_is_kept_of_those_who_owe_nothing() -> None:
    accounts = entered("a", "b", "c")
    accounts.charge("b", 9.0)
    accounts.leave("c")
    accounts.leave("b")
    assert set(accounts._spent_s) == {"a", "b"}
    accounts.leave("a")
    assert (accounts._spent_s, accounts.active) == ({}, 0)
    accounts.charge("a", 1.0)  # somebody's last batch
    assert accounts._spent_s == {}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("enter"), st.sampled_from("abc")),
            st.tuples(st.just("leave"), st.sampled_from("abc")),
            st.tuples(st.just("charge"), st.sampled_from("abc")),
        ),
        max_size=50,
    )
)
def test_the_least_account_never_falls_while_somebody_is_there(
    events: list[tuple[str, str]],
) -> None:
    accounts = Accounts()
    live = dict.fromkeys("abc", 0)
    least = 0.0
    for event, client in events:
        if event == "enter":
            accounts.enter(client)
            live[client] += 1
        elif event == "leave" and live[client]:
            accounts.leave(client)
            live[client] -= 1
        elif event == "charge":
            accounts.charge(client, 1.0)
        active = [accounts[one] for one, n in live.items() if n]
        assert accounts.active == len(active)
        assert min(active, default=0.0) >= (least if active else 0.0)
        least = min(active, default=0.0)
