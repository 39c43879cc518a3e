"""What the load tests' users do: the same for the same seed, and as it is said."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from itertools import pairwise

import pytest

from serve_app.cli.measure.users import (
    KINDS,
    MOST_TURNS,
    QUESTION,
    TOKENS_PER_WORD,
    Ask,
    Lengths,
    Setting,
    kind_of,
    parse_mix,
    prose,
    user,
)

SETTING = Setting(n_ctx=2048, think_s=5.0)
ANSWER = "fifty words of an answer " * 10


def asks(kind: str, n: int, seed: int = 1, setting: Setting = SETTING) -> list[Ask]:
    """The first requests of a user who always gets the same answer."""
    someone = user(kind, seed, 7, setting)
    return [next(someone), *(someone.send(ANSWER) for _ in range(n - 1))]


def text(ask: Ask) -> str:
    if "prompt" in ask.body:
        return str(ask.body["prompt"])
    return " ".join(message["content"] for message in ask.body["messages"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_everything(kind: str) -> None:
    assert asks(kind, 30) == asks(kind, 30)
    assert asks(kind, 30) != asks(kind, 30, seed=2)


@pytest.mark.parametrize("kind", KINDS)
def test_users_do_not_share_their_dice(kind: str) -> None:
    one, other = user(kind, 1, 0, SETTING), user(kind, 1, 1, SETTING)
    first = next(one)
    next(other)
    assert first == next(user(kind, 1, 0, SETTING))
    assert one.send("x") != other.send("x")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_ctx", [1024, 2048, 8192])
def test_every_request_fits_and_is_a_stream_with_usage(kind: str, n_ctx: int) -> None:
    for ask in asks(kind, 200, setting=Setting(n_ctx, 5.0)):
        n_words = len(text(ask).split())
        assert n_words * TOKENS_PER_WORD + ask.body["max_tokens"] <= n_ctx
        assert ask.body["stream"] is True
        assert ask.body["stream_options"] == {"include_usage": True}


def test_lengths_are_log_normal_and_cut_off() -> None:
    rng = random.Random(3)
    lengths = Lengths(median=100, spread=0.5, low=30, high=300)
    drawn = sorted(lengths.draw(rng) for _ in range(4000))
    assert drawn[0] >= 30
    assert drawn[-1] == 300
    assert drawn[2000] == pytest.approx(100, rel=0.05)
    assert drawn[int(4000 * 0.841)] == pytest.approx(100 * 2.718**0.5, rel=0.08)  # a deviation up
    assert lengths.draw(rng, most=10) == 30


def test_prose_has_so_many_words() -> None:
    assert [len(prose(random.Random(0), n).split()) for n in (0, 1, 9, 10, 11, 100)] == [
        *(0, 1, 9, 10, 11, 100)
    ]


def test_a_conversation_grows_with_its_answers_and_then_another_begins() -> None:
    turns = [len(ask.body["messages"]) for ask in asks("chat", 300, setting=Setting(32768, 5.0))]
    assert turns[0] == 2
    assert all(after in (before + 2, 2) for before, after in pairwise(turns))
    assert max(turns) <= 2 * MOST_TURNS + 2
    assert turns.count(2) > 30
    second = next(ask for ask in asks("chat", 50) if len(ask.body["messages"]) == 4)
    assert second.body["messages"][2] == {"role": "assistant", "content": ANSWER}


def test_a_full_context_drops_the_oldest_turns() -> None:
    counts = [len(ask.body["messages"]) for ask in asks("chat", 200, setting=Setting(1024, 5.0))]
    assert 4 <= max(counts) < 2 * MOST_TURNS


def test_readers_think_about_as_long_as_they_should() -> None:
    pauses = sorted(ask.think_s for ask in asks("rag", 1000))
    assert pauses[500] == pytest.approx(5.0, rel=0.15)
    assert pauses[-1] <= 25.0


def test_rag_prompts_are_long_and_answers_short() -> None:
    found = asks("rag", 300)
    lengths = sorted(len(text(ask).split()) for ask in found)
    assert 350 < lengths[150] < 600
    assert max(ask.body["max_tokens"] for ask in found) <= 64


def test_agents_share_their_tools_and_want_json() -> None:
    found = asks("agent", 50)
    assert len({ask.body["messages"][0]["content"] for ask in found}) == 1
    assert all(ask.body["response_format"] == {"type": "json_object"} for ask in found)


def test_code_is_typed_on_and_what_was_asked_is_taken_back() -> None:
    found = asks("code", 100)
    assert all(ask.leave_after_s is not None and ask.think_s < 0.5 for ask in found)
    longer = [text(b).startswith(text(a)) for a, b in pairwise(found)]
    assert 20 < sum(longer) < 90


def test_batches_do_not_wait_and_others_keep_their_manners() -> None:
    assert {ask.think_s for ask in asks("batch", 20)} == {0.0}
    assert {ask.read_pause_s for ask in asks("slow", 20)} == {0.25}
    left = [ask.leave_after_s for ask in asks("vanish", 50)]
    assert all(after is not None and 0 <= after <= 3 for after in left)


def test_the_mix_is_kept_exactly_and_evenly() -> None:
    mix = parse_mix("chat=6,rag=3,batch=1")
    kinds = [kind_of(i, mix) for i in range(30)]
    assert Counter(kinds) == {"chat": 18, "rag": 9, "batch": 3}
    assert Counter(kinds[:5])["chat"] == 3
    assert QUESTION.low < QUESTION.median < QUESTION.high


@pytest.mark.parametrize("wrong", ["", "chat", "chat=0", "chat=x", "nobody=1", "chat=1,chat=2"])
def test_a_wrong_mix_is_refused(wrong: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected KIND=WEIGHT"):
        parse_mix(wrong)
