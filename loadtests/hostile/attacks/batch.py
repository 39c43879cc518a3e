"""Files, batches and kept responses, which outlast the requests that made them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from loadtests.hostile.attack import Attack, Bars
from loadtests.hostile.attacks.hold import crowd, drip, head
from loadtests.hostile.scene import HELD, Scene

CHAT, FILES, BATCHES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/files",
    "/v1/batches",
    "/v1/responses",
)
N_FILES, N_BATCHES, N_SLOW, N_READERS, N_SEEKERS = 4, 120, 16, 40, 16
DEPTH, LARGE_BYTES = 300, 4_000_000
DONE_S = 10.0
"""The longest time that another key's batch of one line may take."""
RECEIVE_BUFFER = 4096
_BOUNDARY = "corral-hostile"
FORM = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}
ENDED = ("completed", "failed", "expired", "cancelled")


def line(number: int, **fields: Any) -> bytes:
    """A line of a batch's file: a chat of one word."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | fields
    entry = {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}
    return json.dumps(entry).encode() + b"\n"


def nested() -> bytes:
    """A line with brackets in brackets."""
    return (
        b'{"custom_id": "a", "method": "POST", "url": "'
        + CHAT.encode()
        + b'", "body": '
        + (b"[" * DEPTH + b"]" * DEPTH + b"}\n")
    )


def form(content: bytes) -> bytes:
    """The body of an upload."""
    purpose = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = (
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    )
    return purpose.encode() + file.encode() + content + f"\r\n--{_BOUNDARY}--\r\n".encode()


def uploaded(scene: Scene, content: bytes, key: str = "mallory") -> str | None:
    """The id of a new file; None if it is refused."""
    answer = scene.request("POST", FILES, form(content), key, FORM)
    return answer.json()["id"] if answer.status == 200 else None


def begun(scene: Scene, file_id: str | None, key: str = "mallory") -> str | None:
    """The id of a new batch; None if it is refused."""
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    answer = scene.post(BATCHES, body, key)
    return answer.json()["id"] if answer.status == 200 else None


def _others_are_done(scene: Scene) -> None:
    """Another key's batch of one line, while it lasts."""
    while scene.left_s() > DONE_S:
        batch, began = begun(scene, uploaded(scene, line(0), "alice"), "alice"), time.monotonic()
        if batch is None:
            scene.found("another key's file or batch is refused")
            return
        while scene.get(f"{BATCHES}/{batch}", "alice").json()["status"] not in ENDED:
            if time.monotonic() - began > DONE_S:
                scene.found(f"another key's batch of one line takes more than {DONE_S:.0f} s")
                return
            scene.sleep(0.3)


def _nested_lines(scene: Scene) -> None:
    for _ in range(N_FILES):
        begun(scene, uploaded(scene, nested() * 20))
    _others_are_done(scene)


def _flood(scene: Scene) -> None:
    lines = b"".join(line(number, max_tokens=64) for number in range(500))
    file_id = uploaded(scene, lines)
    for _ in range(N_BATCHES):
        if scene.left_s() > DONE_S + 5:
            begun(scene, file_id)
            scene.get(BATCHES)
    _others_are_done(scene)


def _slow_uploads(scene: Scene) -> None:
    with ThreadPoolExecutor(1) as pool:
        beginning = form(b"a" * 5000)[:300]
        first = head(scene, FILES, 6000, "mallory").replace(
            b"application/json", FORM["Content-Type"].encode()
        )
        with crowd(scene, N_SLOW, first + beginning) as wires:
            pool.submit(drip, scene, wires, b" ")
            while scene.left_s() > 1:
                if uploaded(scene, line(0), "alice") is None and scene.left_s():
                    scene.found("another key cannot upload a file")
                    return
                scene.sleep(0.5)


def _slow_readers(scene: Scene) -> None:
    """A large file that many connections get, and none reads."""
    file_id = uploaded(scene, line(0, metadata={"a": "a" * LARGE_BYTES}))
    first = head(scene, f"{FILES}/{file_id}/content", 0, "mallory").replace(b"POST", b"GET", 1)
    with crowd(scene, N_READERS, first, RECEIVE_BUFFER) as wires:
        scene.sleep(scene.left_s() - 1)
        scene.note(HELD, len(wires))


def one_stored(scene: Scene) -> None:
    """A response that is kept: the first one starts the process that keeps them."""
    scene.post(RESPONSES, {"input": "the fox", "max_output_tokens": 1})
    scene.sleep(scene.left_s())


def _stored(scene: Scene) -> None:
    """A response with a long input, which is asked for all the time."""
    body = {"input": "the fox " * 300, "background": True, "max_output_tokens": 2000}
    answer = scene.post(RESPONSES, body)
    if answer.status != 200:
        scene.found(f"a response in the background gets {answer.status}")
        return
    path = f"{RESPONSES}/{answer.json()['id']}"

    def ask(number: int) -> None:
        while scene.left_s():
            scene.get(f"{path}/input_items" if number % 2 else path)

    with ThreadPoolExecutor(N_SEEKERS) as pool:
        list(pool.map(ask, range(N_SEEKERS)))


_Act = Callable[[Scene], None]
_BESIDE = {"kept responses": one_stored}
_KINDS: tuple[tuple[str, str, str, float, _Act, Bars], ...] = (
    (
        "nested lines",
        f"{N_FILES} files whose lines have {DEPTH} brackets in each other.",
        f"Each line fails. Another key's batch of one line takes less than {DONE_S:.0f} s.",
        30.0,
        _nested_lines,
        Bars(),
    ),
    (
        "batch flood",
        f"{N_BATCHES} batches of 500 lines, and lists of all of them.",
        f"Keys take turns: another key's batch of one line takes less than {DONE_S:.0f} s.",
        50.0,
        _flood,
        Bars(itl_factor=2.0, ttft_factor=2.0),  # lines in the background fill the batches
    ),
    (
        "slow uploads",
        f"{N_SLOW} uploads, a byte a second.",
        "Another key's uploads are taken.",
        20.0,
        _slow_uploads,
        Bars(),
    ),
    (
        "unread files",
        f"{N_READERS} connections that get a file of {LARGE_BYTES // 10**6} MB and read nothing.",
        "Memory stays within bounds.",
        12.0,
        _slow_readers,
        Bars(),
    ),
    (
        "kept responses",
        f"{N_SEEKERS} clients who get a kept response all the time.",
        "Honest users notice nothing.",
        12.0,
        _stored,
        Bars(itl_factor=2.0),
    ),
)
ATTACKS = tuple(
    Attack(
        name=name,
        family="batch",
        what=what,
        expects=expects,
        act=partial(act),
        beside=_BESIDE.get(name),
        seconds=seconds,
        least_s=min(seconds, 18.0),
        bars=bars,
        is_short=name == "nested lines",
    )
    for name, what, expects, seconds, act, bars in _KINDS
)
