"""Which replica a prompt goes to."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from serve_app.channel.blocks import chain
from serve_app.channel.score import Fleet, Report, RoutedPrompt

IDLE = Report(n_slots=4, prompt_token_s=0.002, token_s=0.005, answer_tokens=100)


def tokens(name: str, n: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(1000) for _ in range(n)]


def prompt(key: int, held: list[int], n_own: int = 32) -> RoutedPrompt:
    asked = held + tokens(f"own {key}", n_own)
    return RoutedPrompt(key, len(asked), chain(asked), 100, f"group {key}")


def report(**changed: object) -> Report:
    fields = {name: getattr(IDLE, name) for name in IDLE.__slots__}
    return Report(**(fields | changed))


def holding(held: list[int], **changed: object) -> Report:
    return report(blocks=frozenset(chain(held)), **changed)


def fleet(*reports: Report | None) -> Fleet[int]:
    made = Fleet[int](random.Random(1))
    made.update(range(len(reports)))
    for replica, said in enumerate(reports):
        if said is not None:
            made.hear(replica, said, 0.0)
    return made


def send(router: Fleet[int], asked: RoutedPrompt, now: float = 0.0) -> int:
    """Route a prompt as the router does; returns its replica."""
    replica, found = router.rank(asked, now)[0]
    router.book(replica, asked, found.missing, now)
    return replica


SYSTEM = tokens("system", 512)


def test_a_replica_whose_model_may_be_unloaded_waits_for_more_work_than_a_loaded_one() -> None:
    router = fleet(holding(SYSTEM), holding(SYSTEM))
    router.silence(1, 1.0)
    asked = prompt(1, SYSTEM)
    assert send(router, asked, 1.0) == 0
    router.hear(0, holding(SYSTEM, n_live=4, work_s=20.0), 2.0)
    assert send(router, asked, 2.0) == 1
    router.hear(1, IDLE, 3.0)
    assert router[1].forecast(asked, 3.0).ttft_s < 1.5


def test_what_all_cache_groups_share_is_found_like_a_prefix_of_ones_own() -> None:
    asked = SYSTEM + tokens("own", 64)
    own, shared = chain(asked, "mine"), chain(asked)
    for held, n_found in [
        (shared[:16], 512),
        (own[:4], 128),
        (own[:4] + shared[:16], 512),
        (own[:17] + shared[:16], 544),
        (chain(asked, "theirs"), 0),
    ]:
        router = fleet(report(blocks=frozenset(held)))
        prompt = RoutedPrompt(1, len(asked), own, shared=shared)
        assert router[0].forecast(prompt, 0.0).missing == len(asked) - n_found


@pytest.mark.parametrize(
    ("reports", "chosen"),
    [
        pytest.param((IDLE, holding(SYSTEM)), 1, id="who holds the prefix"),
        pytest.param((holding(SYSTEM[:64]), holding(SYSTEM)), 1, id="who holds more of it"),
        pytest.param((IDLE, holding(SYSTEM, n_live=4, work_s=1)), 1, id="a short wait pays"),
        pytest.param((IDLE, holding(SYSTEM, n_live=4, work_s=9)), 0, id="a long one does not"),
        pytest.param((IDLE, holding(SYSTEM, n_live=1, prefill_s=3)), 0, id="nor behind prompts"),
        pytest.param((report(prompt_token_s=0.004), IDLE), 1, id="the faster machine"),
        pytest.param((report(prompt_token_s=0.004), report(n_live=5, work_s=30)), 0, id="if free"),
        pytest.param((report(n_live=3), IDLE), 1, id="the emptier one"),
        pytest.param(
            (report(n_live=4, work_s=2, first_end_s=1.9), report(n_live=3, prefill_s=0.4)),
            1,
            id="who has a slot, if all of the other end together",
        ),
        pytest.param((None, report(n_live=9, work_s=9)), 0, id="a new one is taken for idle"),
    ],
)
def test_the_first_token_comes_soonest(reports: tuple[Report, ...], chosen: int) -> None:
    assert fleet(*reports).rank(prompt(1, SYSTEM), 0.0)[0][0] == chosen


def test_a_holder_among_many_is_always_looked_at() -> None:
    router = fleet(*[IDLE] * 40, holding(SYSTEM), *[IDLE] * 23)
    assert {router.rank(prompt(key, SYSTEM), 0.0)[0][0] for key in range(50)} == {40}


def test_a_burst_without_anything_in_common_spreads() -> None:
    router = fleet(*[IDLE] * 8)
    sent = Counter(send(router, prompt(key, tokens(str(key), 256))) for key in range(32))
    assert max(sent.values()) <= 6


def test_a_burst_fills_all_slots_before_any_of_it_waits_for_one() -> None:
    speeds = (0.004, 0.0055)  # so much measurements of like machines may differ
    router = fleet(*[report(n_slots=8, prompt_token_s=s, answer_tokens=64) for s in speeds])
    sent = Counter(send(router, prompt(key, [], 9), key / 300) for key in range(16))
    assert sent == {0: 8, 1: 8}


def test_a_burst_with_a_common_prefix_stays_together_until_that_costs_more() -> None:
    router = fleet(*[IDLE] * 8)
    few = Counter(send(router, prompt(key, SYSTEM)) for key in range(3))
    many = Counter(send(router, prompt(key, SYSTEM)) for key in range(3, 64))
    assert len(few) == 1
    assert len(many) == 8
    assert max(many.values()) < 3 * min(many.values())


def test_faster_machines_get_more() -> None:
    fast, slow = IDLE, report(prompt_token_s=0.006, token_s=0.015)
    router = fleet(*[fast, slow] * 4)
    sent = Counter(send(router, prompt(key, tokens(str(key), 256))) % 2 for key in range(128))
    assert 2 <= sent[0] / sent[1] <= 4.5


def test_what_was_sent_counts_until_a_report_includes_it() -> None:
    router, asked = fleet(IDLE), prompt(1, SYSTEM)
    send(router, asked)
    assert router[0].forecast(prompt(2, SYSTEM), 0.1).missing == 32
    router.hear(0, report(n_live=0, work_s=0.001), 0.5)
    assert router[0].forecast(prompt(2, SYSTEM), 0.5).missing == 32
    router.hear(0, report(requests=frozenset([1])), 1.0)
    assert router[0].forecast(prompt(2, SYSTEM), 1.0).missing == 512 + 32
    assert router[0].sent == {}


def test_who_has_ended_is_no_work_any_more() -> None:
    router, asked = fleet(IDLE), prompt(1, SYSTEM)
    alone_s = router[0].forecast(prompt(2, [], 64), 0.0).ttft_s
    send(router, asked)
    assert router[0].forecast(prompt(2, [], 64), 0.0).ttft_s > alone_s
    router.on_end(0, asked.group)
    router.on_end(0, asked.group)
    router.on_end(7, "unknown")
    assert router[0].forecast(prompt(2, [], 64), 0.0).ttft_s == pytest.approx(alone_s)
    assert router[0].forecast(prompt(2, SYSTEM), 0.0).missing == 32


def test_a_request_that_went_elsewhere_is_counted_there() -> None:
    router, asked = fleet(holding(SYSTEM), IDLE), prompt(1, SYSTEM)
    assert send(router, asked) == 0
    router.on_send(1, asked.key, 0.0)
    router.on_send(1, 999, 0.0)
    assert (set(router[0].sent), set(router[1].sent)) == (set(), {asked.key})
    assert router[1].forecast(prompt(2, SYSTEM), 0.0).missing == 32


def test_work_gets_done_between_reports() -> None:
    busy = report(n_live=8, work_s=4.0)
    router, asked = fleet(busy), prompt(1, [], 64)
    waits = [router[0].forecast(asked, now).ttft_s for now in (0.0, 2.0, 4.0, 9.0)]
    assert waits[0] > waits[1] > waits[2] == waits[3]


def test_without_reports_nothing_is_remembered_for_ever() -> None:
    router = fleet(None)
    for key in range(100):
        send(router, prompt(key, tokens(str(key), 64)), now=float(key))
    assert len(router[0].sent) <= 22
    assert len(router[0].held) <= 22 * 4


def test_replicas_come_and_go() -> None:
    router = fleet(IDLE, IDLE)
    send(router, prompt(1, SYSTEM))
    router.update([1, 2])
    assert {replica for replica, _ in router.rank(prompt(2, SYSTEM), 1.0)} == {1, 2}
    router.update([])
    assert router.rank(prompt(3, SYSTEM), 2.0) == []


def adapted(key: int, turn: int) -> RoutedPrompt:
    return RoutedPrompt(key, 64, max_tokens=100, group=f"group {key}", turn=turn)


def test_requests_go_where_their_adapters_are_in_use() -> None:
    busy = {"n_live": 1, "work_s": 0.5}
    router = fleet(report(turns=frozenset({7}), **busy), report(turns=frozenset({8}), **busy))
    assert [send(router, adapted(key, turn)) for key, turn in enumerate([7, 8, 8, 7])] == [
        0,
        1,
        1,
        0,
    ]


def test_an_idle_replica_is_better_than_one_that_waits() -> None:
    router = fleet(report(n_live=4, work_s=4.0, turns=frozenset({7})), report())
    assert send(router, adapted(1, 7)) == 1


def test_a_long_queue_is_no_better_than_a_turn_among_others() -> None:
    router = fleet(
        report(n_live=12, work_s=20.0, turns=frozenset({7})),
        report(n_live=1, work_s=0.5, turns=frozenset({8})),
    )
    assert send(router, adapted(1, 7)) == 1


def test_four_adapters_on_two_replicas_are_two_on_each() -> None:
    router = fleet(report(n_slots=16), report(n_slots=16))
    for key in range(16):
        send(router, adapted(key, key % 4))
    used = [{one.prompt.turn for one in router[replica].sent.values()} for replica in range(2)]
    assert sorted(map(len, used)) == [2, 2]
    assert not used[0] & used[1]


def test_of_many_replicas_those_that_serve_its_adapters_are_looked_at() -> None:
    others = [report(n_live=1, work_s=0.5, turns=frozenset({8})) for _ in range(40)]
    router = fleet(*others, report(n_live=1, work_s=0.5, turns=frozenset({7})))
    assert [send(router, adapted(key, 7)) for key in range(3)] == [40] * 3
