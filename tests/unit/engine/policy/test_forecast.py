"""How many seconds of work there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.base.errors import QueueFullError
from serve_app.base.sampling import SamplingParams
from serve_app.base.values.answers import FinishReason
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine import EngineOptions
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.costs.cost_model import CostModel, Profile
from serve_app.engine.policy.forecast import Backlog, Correction, ForecastErrors
from serve_app.engine.policy.policy import SlotPolicy

COSTS = CostModel(Profile({1: 0.05, 4: 0.08}, {16: 0.16, 100: 0.5}))


def waiting(n_prompt: int, max_tokens: int | None, client: str = "", name: str = "a") -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens)
    request = GenerationRequest(name, (1,) * n_prompt, sampling, client)
    return Sequence(request, lambda delta: None)


def seconds(backlog: Backlog, *live: Sequence) -> float:
    return backlog.forecast(live).work_s


def test_prompts_and_answers_take_what_was_measured() -> None:
    backlog = Backlog(COSTS, n_slots=4)
    assert seconds(backlog) == 0
    assert seconds(backlog, waiting(101, 50)) == pytest.approx(100 * 0.005 + 50 * 0.02)
    assert seconds(backlog, waiting(1, None)) == pytest.approx(128 * 0.02)
    assert seconds(backlog, waiting(1, 5000)) == pytest.approx(128 * 0.02)


def test_it_learns_how_long_answers_are() -> None:
    backlog = Backlog(COSTS, n_slots=4)
    for _ in range(100):
        done = waiting(1, None)
        done.n_generated = 10
        end = done.finish(FinishReason.ABORT).end
        assert end is not None
        backlog.learn_end(done, end)
    assert seconds(backlog, waiting(1, None)) == pytest.approx(10 * 0.02, rel=0.01)


def test_the_first_end_is_that_of_the_shortest_answer_that_runs() -> None:
    backlog, running = Backlog(COSTS, n_slots=4), [waiting(1, 50), waiting(1, 30)]
    for sequence in running:
        sequence.trace.admitted = 1.0
    assert backlog.forecast([]).first_end_s == 0
    assert backlog.forecast([*running, waiting(1, 9)]).first_end_s == pytest.approx(30 * 0.08)


def test_a_first_token_waits_for_the_prompts_before_it_as_streams_slow_them() -> None:
    """Prompts take 0.5 s each, and a token of the one request that is alone 0.05 s."""
    backlog, other, own = Backlog(COSTS, n_slots=4), waiting(101, 50, "a"), waiting(101, 50, "b")
    for crowding, expected_s in ((1.0, 1.25), (3.0, 3.0)):  # at least by its slots' load: a quarter
        expected = backlog.forecast([other], crowding).expect(own, {"a": 1}, [])
        token_s = 0.05 + (0.08 - 0.05) / 3
        assert expected.first_token_s == pytest.approx(expected_s + token_s)
        assert expected.alone_s == pytest.approx(0.55)


def test_places_get_free_one_by_one() -> None:
    backlog = Backlog(COSTS, n_slots=4)
    assert backlog.forecast([]).place_free_s("", {}, []) == 1
    three = [waiting(1001, 100)] * 3
    assert backlog.forecast(three).place_free_s("", {"": 3}, []) == 7
    assert backlog.forecast([]).place_free_s("", {"": 3}, three) == 7
    unmeasured = Backlog(CostModel(Profile()), 4).forecast([waiting(9, 9)])
    assert unmeasured.place_free_s("", {"": 1}, []) == 1


def test_a_clients_places_get_free_as_its_turns_come() -> None:
    """Each request takes 2 s of the machine."""
    forecast = Backlog(COSTS, n_slots=4).forecast(
        [waiting(1, 100, "a")] * 8 + [waiting(1, 100, "b")] * 2
    )
    live = {"a": 8, "b": 2}
    assert forecast.place_free_s("a", live, []) == 3  # 10 requests, 8 of them its own
    assert forecast.place_free_s("b", live, []) == 4  # in turns with two of a
    assert forecast.place_free_s("c", live, []) == 2  # anybody's


@pytest.mark.parametrize(
    ("n_live", "n_arrived", "wait_s"),
    [(0, 0, 0), (3, 0, 0), (4, 0, 2), (7, 0, 8), (7, 3, 8), (3, 3, 0)],
)
def test_the_wait_for_a_slot(n_live: int, n_arrived: int, wait_s: float) -> None:
    """100 tokens take 2 s with four slots: each of them frees its slot 2 s after the one before."""
    backlog = Backlog(COSTS, n_slots=4)
    live = [waiting(1, 100)] * n_live
    known = backlog.forecast(live[n_arrived:])
    counts = {"": n_live} if n_live else {}
    assert known.wait_s("", counts, live[:n_arrived]) == pytest.approx(wait_s)


@pytest.mark.parametrize(
    ("client", "wait_s"),
    [
        pytest.param("c", 0, id="two others with a slot each"),
        pytest.param("b", 2 * 2, id="its own one, and two of a"),
        pytest.param("a", 10 * 2, id="its own, and all of b"),
    ],
)
def test_a_client_waits_for_its_own_and_its_turns(client: str, wait_s: float) -> None:
    """Each request takes 2 s of the machine, which has two slots."""
    backlog = Backlog(CostModel(Profile({1: 0.05, 2: 0.04}, {16: 0.16})), n_slots=2)
    requests = [waiting(1, 100, "a")] * 10 + [waiting(1, 100, "b")]
    live = {"a": 10, "b": 1} if client != "c" else {"a": 10}
    for n_arrived in (0, 3, len(requests)):
        known = backlog.forecast(requests[n_arrived:])
        found = known.wait_s(client, live, requests[:n_arrived])
        assert found == pytest.approx(wait_s)


def test_what_a_sequence_costs_is_its_tokens_where_nothing_was_measured() -> None:
    assert Backlog(COSTS, n_slots=4).cost_s(waiting(101, 50)) == pytest.approx(0.5 + 50 * 0.02)
    assert Backlog(CostModel(Profile()), 4).cost_s(waiting(101, 50)) == 151


def test_it_learns_how_fast_work_gets_done() -> None:
    """Half as fast as measured, for a minute; steps without tokens say nothing."""
    backlog = Backlog(COSTS, n_slots=4)
    for _ in range(60):
        backlog.learn_pace(100, 0, 1.0)
        backlog.learn_pace(0, 0, 1.0)
    assert seconds(backlog, waiting(1, 50)) == pytest.approx(2 * 50 * 0.02, rel=0.01)
    for _ in range(60):
        backlog.learn_pace(0, 50, 1.0)
    assert seconds(backlog, waiting(101, None)) == pytest.approx(0.5 + 128 * 0.02, rel=0.01)


def test_nothing_measured_nothing_learnt() -> None:
    backlog = Backlog(CostModel(Profile()), 4)
    backlog.learn_pace(100, 10, 1.0)
    assert seconds(backlog, waiting(9, 9)) == 0


def test_a_first_token_is_forecast_behind_prompts_and_full_slots() -> None:
    """A prompt token takes 5 ms, and a step 50 ms for one sequence, 80 ms for four."""
    forecast = Backlog(COSTS, n_slots=4).forecast
    new = waiting(101, 10)
    alone = forecast([]).expect(new, {}, [])
    assert alone.first_token_s == alone.alone_s == pytest.approx(0.5 + 0.05)
    assert alone.end_s == alone.end_alone_s == pytest.approx(0.5 + 10 * 0.05)
    two = forecast([waiting(101, 10)] * 2).expect(new, {"": 2}, [])
    assert two.first_token_s == pytest.approx((2 * 0.5 + 0.5) * 1.5 + 0.07)
    assert two.end_s == pytest.approx(two.first_token_s + 9 * 0.07)
    full = forecast([waiting(1, 100)] * 4).expect(new, {"": 4}, [])
    assert full.wait_s == pytest.approx(4 * 100 * 0.02 / 4)
    assert full.first_token_s == pytest.approx(full.wait_s + 2 * 0.5 + 0.08)


def test_a_first_token_waits_for_one_prompt_of_a_client_that_has_many() -> None:
    backlog, new = Backlog(COSTS, n_slots=8), waiting(101, 10, "b")
    one = backlog.forecast([waiting(101, 1, "a")]).expect(new, {"a": 1}, [])
    many, arrived = [waiting(101, 1, "a")] * 5, [waiting(101, 1, "a")]
    behind = backlog.forecast(many).expect(new, {"a": 6}, arrived)
    crowded = max(1.0, behind.first_token_s / one.first_token_s)
    assert behind.wait_s == 0
    assert crowded < 2, "streams slow a prompt down, and five more of a client's prompts do not"
    own = backlog.forecast(many).expect(waiting(101, 10, "a"), {"a": 6}, arrived)
    assert own.first_token_s > 3 * behind.first_token_s


def test_what_is_cached_is_not_forecast_to_be_computed() -> None:
    new = waiting(101, 10)
    new.n_likely_cached = 80
    forecast = Backlog(COSTS, n_slots=4).forecast([])
    assert forecast.expect(new, {}, []).first_token_s == pytest.approx(20 * 0.005 + 0.05)


def test_a_sequence_in_the_background_waits_for_all_others() -> None:
    behind = waiting(101, 10)
    behind.is_behind = True
    forecast = Backlog(COSTS, n_slots=1).forecast([waiting(1, 100)] * 3)
    assert forecast.expect(behind, {"a": 3}, []).wait_s == pytest.approx(3 * 100 * 0.05)


def test_forecasts_learn_by_what_factor_they_are_wrong() -> None:
    errors = ForecastErrors()
    assert (errors.correction.bias, errors.correction.margin) == (1, 1)
    for _ in range(100):
        errors.learn(2.0, 3.0)
    assert errors.correction.bias == pytest.approx(1.5, rel=0.02)
    assert errors.close > 0.9
    for i in range(200):
        errors.learn(2.0, 3.0 * (0.5 if i % 2 else 2.0))
    assert errors.correction.margin == pytest.approx(4, rel=0.2)
    errors.learn(0.0, 1.0)
    assert errors.n == 300


def test_a_few_forecasts_show_by_what_factor_a_start_was_wrong() -> None:
    errors = ForecastErrors()
    for _ in range(3):
        errors.learn(2.0, 3.0)
    assert errors.correction.bias == pytest.approx(1.5**0.75)
    for _ in range(7):
        errors.learn(2.0, 3.0)
    assert errors.correction.bias == pytest.approx(1.5, rel=0.05)


def test_a_short_forecast_teaches_little_and_no_error_counts_without_end() -> None:
    errors = ForecastErrors()
    errors.learn(0.001, 0.1)
    assert errors.correction.bias == pytest.approx(1, abs=0.01)
    for _ in range(1000):
        errors.learn(1.0, 1000.0)
    assert errors.correction.bias == pytest.approx(4)


def refusal_behind(n: int) -> object:
    """What a request gets behind so many of a second each, if forecasts hardly exceed themselves twice."""
    backlog, others = Backlog(COSTS, n_slots=4), [waiting(1, 50, name=str(i)) for i in range(n)]
    policy = SlotPolicy(EngineOptions(4, 64, 1, max_waiting=99, max_first_token_s=20.0))
    for other in others:
        assert policy.accepts(other, backlog.forecast([]), []) == {}
    forecast = replace(backlog.forecast(others), first_token=Correction(1.0, 2.0))
    return policy.accepts(waiting(1, 50), forecast, [])


def test_who_is_refused_is_told_when_there_is_time() -> None:
    """Work is done at the forecast's pace, without its margin."""
    refusal = refusal_behind(24)
    assert isinstance(refusal, QueueFullError)
    assert refusal_behind(24 - refusal.retry_after_s) == {}
    assert isinstance(refusal_behind(24 - refusal.retry_after_s // 2), QueueFullError)
    later = refusal_behind(90)
    assert isinstance(later, QueueFullError)
    assert later.retry_after_s == 20, "by then, all who wait have begun"
