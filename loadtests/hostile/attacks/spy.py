"""One key's attempts to learn another's prompts, and the longest silence of a stream."""

from __future__ import annotations

import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from typing import Any

from loadtests.hostile.attack import Attack, Bars
from loadtests.hostile.scene import JSON, Scene, Shot
from loadtests.hostile.setups import N_SLOTS
from serve_app.cli.measure.users import WORDS

COMPLETIONS = "/v1/completions"
PROMPT_WORDS = 600
TRIALS = 6
TELLING = 0.7
"""Times to the first token that another's prompt makes shorter than this share tell that it was there."""
SILENCE_S, PING_S = 15.0, 1
SLACK_S = 1.0
BUSY_TOKENS = 1200
"""A request behind such streams waits longer than SILENCE_S, and less than queues allow."""
LONG_S, SHORT_S = 40.0, 14.0
NONE = Bars(ttft_factor=None, itl_factor=None, pause_s=None, memory_mib=None)
_QUIET = Bars(ttft_factor=None, itl_factor=None)


def secret(rng: random.Random) -> str:
    """A prompt that nobody else has."""
    return " ".join(rng.choices(WORDS, k=PROMPT_WORDS))


def _ask(scene: Scene, prompt: str, key: str, **fields: Any) -> tuple[int, float]:
    """The cached tokens, and the seconds to the only token."""
    answer = scene.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1, **fields}, key)
    usage = (answer.json() or {}).get("usage") or {} if answer.status == 200 else {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return cached, answer.seconds


def _counted(scene: Scene) -> None:
    rng = random.Random(time.time_ns())
    for _ in range(TRIALS):
        prompt = secret(rng)
        _ask(scene, prompt, "alice")
        cached, _ = _ask(scene, prompt, "bob")
        if cached:
            scene.found(f"cached_tokens tells another key {cached} tokens of a prompt")
        if not _ask(scene, prompt, "alice")[0] and scene.left_s():
            scene.found("a key's own prompt is not cached: this shows nothing")


def _timed(scene: Scene) -> None:
    rng = random.Random(time.time_ns())
    shares = []
    for _ in range(TRIALS):
        known, fresh = secret(rng), secret(rng)
        _ask(scene, known, "alice")
        fresh_s = _ask(scene, fresh, "bob")[1]
        shares.append(_ask(scene, known, "bob")[1] / fresh_s)
        if not scene.left_s():
            break
    share = statistics.median(shares)
    if share < TELLING:
        scene.found(
            f"a prompt that another key has sent takes {share:.2f} times as long as a new one"
        )


def _salted(scene: Scene) -> None:
    rng = random.Random(time.time_ns())
    prompt = secret(rng)
    answer = scene.post(
        COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "cache_salt": "a"}, "alice"
    )
    if answer.status != 200:
        scene.found(f"cache_salt is refused: {answer.status}")
        return
    if _ask(scene, prompt, "alice", cache_salt="b")[0] or _ask(scene, prompt, "alice")[0]:
        scene.found("a prompt with a cache_salt is found with another one, or with none")
    if not _ask(scene, prompt, "alice", cache_salt="a")[0]:
        scene.found("a prompt with a cache_salt is not found with the same one")


def _silence(scene: Scene, ping_s: int | None, bar_s: float) -> None:
    """All slots are busy with the key's own streams; how long does its next one hear nothing?"""
    long = {"prompt": "a", "max_tokens": BUSY_TOKENS, "ignore_eos": True}
    busy = Shot(COMPLETIONS, json.dumps(long).encode(), "mallory")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(scene.fire, [busy] * N_SLOTS, N_SLOTS)
        scene.sleep(1.0)
        asked = {"prompt": secret(random.Random(1)), "max_tokens": 4, "stream": True}
        if ping_s is not None:
            asked["sse_ping_interval"] = ping_s
        waited_s = longest_silence(scene, json.dumps(asked).encode(), 0.8 * scene.left_s())
    if waited_s is None:
        scene.found("the stream that should wait is refused: this shows nothing")
    elif waited_s > bar_s:
        scene.found(f"{waited_s:.1f} s without a byte, while a stream waits for its first token")


def longest_silence(scene: Scene, body: bytes, watch_s: float) -> float | None:
    """The longest time without a byte of this stream, from sending it to its end, or as long as it is
    watched; None if it is refused."""
    begin = last = time.monotonic()
    longest = 0.0
    with (
        suppress(OSError, HTTPException),
        scene.opened("POST", COMPLETIONS, body, "mallory", JSON) as got,
    ):
        scene.count(got.status)
        if got.status != 200:
            return None
        while True:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            if now - begin > watch_s or not got.read1(4096):
                return longest
    return max(longest, time.monotonic() - last)


ATTACKS = (
    Attack(
        name="a byte at least every 15 s",
        family="silence",
        what="A stream that waits behind its own client's others.",
        expects="Headers at once, and a comment when nothing was sent for 15 s.",
        act=partial(_silence, ping_s=None, bar_s=SILENCE_S + SLACK_S),
        seconds=LONG_S,
        bars=_QUIET,
    ),
    Attack(
        name="sse_ping_interval: 1",
        family="silence",
        what="The same, with sse_ping_interval: 1.",
        expects="Headers at once, and a comment when nothing was sent for a second.",
        act=partial(_silence, ping_s=PING_S, bar_s=PING_S + SLACK_S),
        seconds=SHORT_S,
        bars=_QUIET,
        is_short=True,
    ),
    Attack(
        name="cached_tokens",
        family="spy",
        what="One key sends another's prompt, and looks at cached_tokens.",
        expects="Prefixes are shared within a key's cache_group only.",
        act=_counted,
        bars=NONE,
        is_short=True,
    ),
    Attack(
        name="time to the first token",
        family="spy",
        what="One key sends another's prompt, and a new one, and compares how long they take.",
        expects="Both take as long.",
        act=_timed,
        bars=NONE,
    ),
    Attack(
        name="cache_salt",
        family="spy",
        what="One key's prompts with different cache_salt.",
        expects="They do not find each other's prefixes.",
        act=_salted,
        bars=NONE,
    ),
)
