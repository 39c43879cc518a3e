"""Clients who take more than their share, or who are charged for nothing."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import sub
from typing import Any

from loadtests.hostile.attack import SHARED, Attack, Bars
from loadtests.hostile.scene import Scene, Shot
from loadtests.hostile.setups import (
    DEMO,
    LIMITED,
    LIMITED_REQUESTS,
    MANY,
    MAX_WAITING,
    METERED,
    METERED_TOKENS,
    N_SLOTS,
    TEXTS,
)

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
MOST_CHOICES, MOST_TEXTS, REFUSED = 32, 2048, 8
FIRST = -(2**31)
"""The priority that goes before all others."""
RATE_LIMIT, QUEUE_FULL = "rate_limit_exceeded", "queue_full"
SHARE = Bars(itl_factor=None, pause_s=None, memory_mib=None)
"""More rows in a batch take longer, which is nobody's fault; a first token must come soon all the same."""


def _long(n_tokens: int = 500, **fields: Any) -> bytes:
    body = {"prompt": "Once upon a time", "max_tokens": n_tokens, "ignore_eos": True} | fields
    return json.dumps(body).encode()


def _keep(scene: Scene, shot: Shot, at_once: int) -> None:
    """So many of these are always asked for; who is refused asks again."""

    def ask(_: int) -> None:
        while scene.left_s():
            if scene.post(shot.path, shot.body, shot.key).status != 200:
                scene.sleep(0.2)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(ask, range(at_once)))


def ordinary(scene: Scene) -> None:
    """An ordinary client: one request of 500 tokens after the other."""
    _keep(scene, Shot(COMPLETIONS, _long(), "mallory"), 1)


def _full_queue(scene: Scene) -> None:
    """As many requests as there are places, and a few more that are refused, and come back."""
    _take_all(scene, N_SLOTS + MAX_WAITING - 3 * MOST_CHOICES + REFUSED)


def _flood(scene: Scene) -> None:
    """Nearly twice as many requests as there are places: half are refused, and come back at once."""
    _take_all(scene, N_SLOTS + MAX_WAITING)


def _take_all(scene: Scene, n_single: int) -> None:
    texts = json.dumps({"input": [f"Text {i}" for i in range(MOST_TEXTS)]}).encode()
    with ThreadPoolExecutor(3) as pool:
        pool.submit(_keep, scene, Shot(COMPLETIONS, _long(n=MOST_CHOICES), "mallory"), 3)
        pool.submit(_keep, scene, Shot(EMBEDDINGS, texts, "mallory"), 1)
        pool.submit(_keep, scene, Shot(COMPLETIONS, _long(), "mallory"), n_single)


def _texts(scene: Scene) -> None:
    texts = json.dumps({"input": [f"Text {i} of many" for i in range(MOST_TEXTS)]}).encode()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_keep, scene, Shot(EMBEDDINGS, texts, "mallory"), 3)
        while scene.left_s():
            answer = scene.post(EMBEDDINGS, {"input": "One text"}, "alice")
            if answer.status == 429:
                scene.found("another key's only text is refused, as 2,048 of one key's wait")
            scene.sleep(0.3)


LEAST_SHARE = 0.35
"""Of the time for which a model wants the cores, when one other does, too."""


def _texts_beside(scene: Scene, at_once: int = 4) -> None:
    """Texts for another model, which has the cores in turns with the one that honest users talk to."""
    texts = {"model": TEXTS, "input": [f"Text {i} of many" for i in range(MOST_TEXTS // 8)]}
    before = _turns(scene)
    _keep(scene, Shot(EMBEDDINGS, json.dumps(texts).encode(), "mallory"), at_once)
    had_s, waited_s = map(sub, _turns(scene), before)
    if had_s < LEAST_SHARE * (had_s + waited_s):
        scene.found(f"chats had the cores for {had_s:.1f} s, and waited {waited_s:.1f} s for them")


def _turns(scene: Scene) -> tuple[float, float]:
    """Seconds for which the model of honest users had the cores, and waited for them."""
    models = scene.get("/v1/stats", "alice").json()["models"]
    (timing,) = (one["replicas"][0]["engine"]["timing"] for one in models if one["id"] == DEMO)
    return timing["turn_s"], timing["turn_wait_s"]


def _first(scene: Scene) -> None:
    _keep(scene, Shot(COMPLETIONS, _long(priority=FIRST), "mallory"), 3 * N_SLOTS)


def _many_users(scene: Scene) -> None:
    with ThreadPoolExecutor(len(MANY)) as pool:
        for user in MANY:
            pool.submit(_keep, scene, Shot(COMPLETIONS, _long(user=user), "mallory"), 2)


def _many_keys(scene: Scene) -> None:
    each = 1 + (N_SLOTS + MAX_WAITING) // len(MANY)
    with ThreadPoolExecutor(len(MANY)) as pool:
        for key in MANY:
            pool.submit(_keep, scene, Shot(COMPLETIONS, _long(), key), each)


def _long_prompts(scene: Scene, at_once: int = 2 * N_SLOTS) -> None:
    """Prompts that fill a slot, of which no two begin alike, and one token is wanted."""
    _always_new(scene, at_once, lambda number: {"prompt": f"{number} " + "a b " * 950})


def _salts(scene: Scene, at_once: int = N_SLOTS) -> None:
    """Each request begins a cache group of its own."""
    text = "word " * 300
    _always_new(scene, at_once, lambda number: {"prompt": text, "cache_salt": f"salt {number}"})


def _always_new(scene: Scene, at_once: int, fields: Callable[[int], dict[str, Any]]) -> None:
    """So many requests at a time, each with the fields of its number."""
    numbers = itertools.count()

    def ask(_: int) -> None:
        while scene.left_s():
            body = {"max_tokens": 1} | fields(next(numbers))
            if scene.post(COMPLETIONS, body, "mallory").status != 200:
                scene.sleep(0.2)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(ask, range(at_once)))


def _choices(scene: Scene) -> None:
    answer = scene.post(COMPLETIONS, _long(8, n=LIMITED_REQUESTS + 1), LIMITED)
    if answer.status == 200:
        found = f"a key with {LIMITED_REQUESTS} requests at once has {LIMITED_REQUESTS + 1} answers"
        scene.found(f"{found} computed at once by n")


_PACE_S = 0.05
"""One request in so long is within what the proxy lets each key send in a second."""


def _charged(scene: Scene) -> None:
    """Requests that are refused for what they say, and then one that is right."""
    words = " ".join(["word"] * (METERED_TOKENS // 20))
    wrong: tuple[dict[str, Any], ...] = (
        {"regex": "(", "max_tokens": 1},
        {"grammar": "root ::= nothing", "max_tokens": 1},
        {"json_schema": {"$ref": "#/nowhere"}, "max_tokens": 1},
        {"max_tokens": 1, "prompt": words * 100},
        {"max_tokens": 1, "n": MOST_CHOICES + 1},
    )
    for _ in range(12):
        for fields in wrong:
            answer = scene.post(COMPLETIONS, {"prompt": words, **fields}, METERED[0])
            if answer.code == RATE_LIMIT:
                scene.found("requests that were refused as wrong use up tokens_per_minute")
                return
            scene.sleep(_PACE_S)
    _is_served(scene, METERED[0], "requests that were refused as wrong use up tokens_per_minute")


def _charged_in_queue(scene: Scene) -> None:
    """Requests of which a full queue refuses most. An attack may be made three times in a minute, so each
    time at most a third of the budget is computed."""
    body = json.dumps({"prompt": "word " * (METERED_TOKENS // 100), "max_tokens": 1}).encode()
    answers: Counter[str] = Counter()
    used = 0

    def ask(_: int) -> None:
        nonlocal used
        while scene.left_s() > 1 and used < METERED_TOKENS // 5 and not answers["used up"]:
            answer = scene.post(COMPLETIONS, body, METERED[1])
            if answer.status == 200:
                used += answer.json()["usage"]["total_tokens"]
            answers["used up" if b"used up" in answer.body else answer.code] += 1
            scene.sleep(_PACE_S)

    with ThreadPoolExecutor(1) as filling, ThreadPoolExecutor(N_SLOTS) as asking:
        filling.submit(_many_keys, scene)
        scene.sleep(1.0)
        list(asking.map(ask, range(N_SLOTS)))
    if answers["used up"]:
        scene.found(f"tokens_per_minute are used up by refusals: {used} were computed")
    if not answers[QUEUE_FULL]:
        scene.found(f"the queue was never full for this key: {dict(answers)}")


def _is_served(scene: Scene, key: str, problem: str) -> None:
    answer = scene.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, key)
    if answer.code == RATE_LIMIT:
        scene.found(problem)


_FAIR = (
    "One request at a time is never refused, and gets its first token as soon as beside one client."
)
_MANY = Bars(ttft_factor=None, itl_factor=None, pause_s=None, memory_mib=None)
"""Sixteen clients more have their shares."""
ATTACKS = (
    Attack(
        name="full queue",
        family="starve",
        what="One key's three requests of 32 answers each, 2,048 texts to embed, and a full queue.",
        expects=_FAIR,
        act=_full_queue,
        seconds=40.0,
        bars=SHARE,
        beside=ordinary,
    ),
    Attack(
        name="flood",
        family="starve",
        what="The same, and a hundred requests more that are refused and come back five times a second.",
        expects=_FAIR,
        act=_flood,
        seconds=20.0,
        bars=SHARE,
        beside=ordinary,
        is_short=True,
    ),
    Attack(
        name="texts",
        family="starve",
        what="Three times 2,048 texts to embed, by one key, while another embeds one at a time.",
        expects="Embeddings have clients, too: one text of another key is not refused.",
        act=_texts,
        bars=SHARE,
        beside=ordinary,
    ),
    Attack(
        name="texts for another model",
        family="starve",
        what="Always four times 256 texts, by one key, for another model on the same cores.",
        expects="The models take turns: chats have the cores for half of the time, and wait no longer than "
        "beside one client of the other model.",
        act=_texts_beside,
        server=SHARED,
        beside=partial(_texts_beside, at_once=1),
        is_short=True,
    ),
    Attack(
        name="priority",
        family="starve",
        what=f"24 requests at once with priority {FIRST}, by a key that no entry allows that.",
        expects=_FAIR,
        act=_first,
        bars=SHARE,
        beside=ordinary,
    ),
    Attack(
        name="many users",
        family="starve",
        what="One key that names 16 users, with two requests of each.",
        expects="With keys, clients are keys.",
        act=_many_users,
        bars=SHARE,
        beside=ordinary,
    ),
    Attack(
        name="many keys",
        family="starve",
        what="16 keys that fill the queue together.",
        expects="Whoever has one request at a time is not refused.",
        act=_many_keys,
        bars=_MANY,
    ),
    Attack(
        name="long prompts",
        family="starve",
        what=f"{2 * N_SLOTS} prompts at a time that fill a slot each, all by one key.",
        expects=_FAIR,
        act=_long_prompts,
        bars=SHARE,
        beside=partial(_long_prompts, at_once=1),
    ),
    Attack(
        name="salts",
        family="starve",
        what="Prompts of 300 words, each with a cache_salt of its own.",
        expects=_FAIR + " Memory stays within what tiers may have.",
        act=_salts,
        bars=Bars(itl_factor=None, pause_s=None),
        beside=partial(_salts, at_once=1),
    ),
    Attack(
        name="answers as one",
        family="starve",
        what=f"n: {LIMITED_REQUESTS + 1} by a key with max_concurrent_requests: {LIMITED_REQUESTS}.",
        expects="n counts n: 429.",
        act=_choices,
    ),
    Attack(
        name="refused as wrong",
        family="charge",
        what="60 requests that are wrong, by a key with tokens_per_minute.",
        expects="They cost nothing.",
        act=_charged,
        is_short=True,
    ),
    Attack(
        name="refused by the queue",
        family="charge",
        what="Requests that find the queue full, by a key with tokens_per_minute.",
        expects="They cost nothing.",
        act=_charged_in_queue,
        bars=_MANY,
    ),
)
