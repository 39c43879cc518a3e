"""Attacks of many kinds, beside batches of another key, which must not take twice as long as alone."""

from __future__ import annotations

import base64
import gzip
import itertools
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from loadtests.hostile.attack import MIB, MOST_BODY_BYTES, Attack, Bars
from loadtests.hostile.attacks.batch import (
    BATCHES,
    CHAT,
    ENDED,
    FILES,
    FORM,
    begun,
    form,
    line,
    one_stored,
    uploaded,
)
from loadtests.hostile.attacks.hold import crowd, head
from loadtests.hostile.scene import HELD, Answer, Scene

COMPLETIONS, RESPONSES, EMBEDDINGS = "/v1/completions", "/v1/responses", "/v1/embeddings"
N_LINES, N_PARTS, N_INPUTS, N_SOCKETS, N_AT_ONCE, SIDE = 4, 20_000, 10_000, 200, 4, 4000
TOO_MANY = 429
SPARE_S = 1.0
"""A batch takes so much longer now and then: batches are looked for only so often, and who asks has what
others leave of the processors."""


def _batch_s(scene: Scene) -> float | None:
    """The seconds that another key's small batch takes; None if the attack ends before."""
    start = time.monotonic()
    lines = b"".join(line(number, max_tokens=8) for number in range(N_LINES))
    batch = begun(scene, uploaded(scene, lines, "alice"), "alice")
    if batch is None:
        if scene.left_s():
            scene.found("another key's file or batch is refused")
        return None
    while scene.left_s():
        read = scene.get(f"{BATCHES}/{batch}", "alice").json()
        if read is not None and read["status"] in ENDED:
            if read["status"] != "completed":
                scene.found(f"another key's batch has {read['status']}")
            return time.monotonic() - start
        scene.sleep(0.1)
    return None


def _beside_a_batch(scene: Scene, act: Callable[[Scene], None]) -> None:
    """The attack, beside batches of another key."""
    alone_s = _batch_s(scene)
    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(act, scene)
        while scene.left_s() and alone_s is not None:
            beside_s = _batch_s(scene)
            if beside_s is not None and beside_s > 2 * alone_s + SPARE_S:
                scene.found(f"another key's batch took {beside_s:.1f} s, and {alone_s:.1f} s alone")
        attack.result()


def _always(scene: Scene, once: Callable[[int], object], at_once: int = N_AT_ONCE) -> None:
    """Do it again and again. Who has asked too often asks more slowly: refusals alone show little."""
    numbers = itertools.count()

    def ask(_: int) -> None:
        while scene.left_s():
            answer = once(next(numbers))
            if isinstance(answer, Answer) and answer.status == TOO_MANY:
                scene.sleep(1.0)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(ask, range(at_once)))


def _tiny_chunks(scene: Scene) -> None:
    """Bodies in chunks of a byte, each with a long extension."""
    lines = head(scene, COMPLETIONS, 0, "mallory").replace(
        b"Content-Length: 0", b"Transfer-Encoding: chunked"
    )
    body = b"".join(b"1;" + b"x" * 200 + b"\r\n \r\n" for _ in range(5000))
    _always(scene, lambda _: scene.raw(lines + body, 2.0))


def _websockets(scene: Scene) -> None:
    """Connections that want to become web sockets, on each route."""
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    while scene.left_s():
        for path in (CHAT, "/v1/live", "/health", "/"):
            ask = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{scene.port}\r\n{upgrade}{key}\r\n"
            with crowd(scene, N_SOCKETS // 4, ask.encode()) as wires:
                scene.sleep(0.5)
                scene.note(HELD, len(wires))


def _compressed(scene: Scene) -> None:
    """Bodies of some kilobytes that are 8 MiB, or more, when they are inflated."""
    packed = [
        gzip.compress(b'{"prompt": "' + b" " * n + b'", "max_tokens": 1}')
        for n in (MOST_BODY_BYTES // 16, MOST_BODY_BYTES - 100, 64 * MOST_BODY_BYTES)
    ]
    headers = {"Content-Encoding": "gzip"}
    _always(scene, lambda n: scene.post(COMPLETIONS, packed[n % len(packed)], **headers))


def _many_parts(scene: Scene) -> None:
    """Uploads of thousands of parts."""
    boundary = FORM["Content-Type"].partition("=")[2]
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="a{{}}"\r\n\r\nb\r\n'
    body = "".join(part.format(number) for number in range(N_PARTS)).encode() + form(line(0))
    _always(scene, lambda _: scene.request("POST", FILES, body, "mallory", FORM))


def _chains(scene: Scene) -> None:
    """Responses that go on from each other, hundreds deep, and pages of their conversations."""

    def chain(_: int) -> None:
        before: dict[str, Any] = {}
        while scene.left_s():
            body = {"input": "the fox", "max_output_tokens": 1} | before
            answer = scene.post(RESPONSES, body)
            if answer.status != 200:
                return
            name = answer.json()["id"]
            before = {"previous_response_id": name}
            scene.get(f"{RESPONSES}/{name}/input_items?limit=100")

    _always(scene, chain)


def _strange_files(scene: Scene) -> None:
    """Batches over another key's files, over answers of batches, and over files that are gone."""
    theirs, gone = uploaded(scene, line(0), "bob"), uploaded(scene, line(0))
    scene.request("DELETE", f"{FILES}/{gone}", None, "mallory", {})

    def ask(number: int) -> None:
        own = begun(scene, uploaded(scene, line(number)))
        read = scene.get(f"{BATCHES}/{own}").json() if own else None
        made = (read or {}).get("output_file_id") or own
        for file_id in (theirs, gone, made, f"../{theirs}", "file-"):
            if begun(scene, file_id) and file_id in (theirs, gone):
                scene.found("a batch over a file that is not the key's is taken")

    _always(scene, ask, 2)


def _everything(scene: Scene) -> None:
    """A grammar, penalties, log-probabilities, stops and 32 answers in one request."""
    body = {
        "prompt": "the fox of the hill " * 100,
        "max_tokens": 64,
        "n": 32,
        "logprobs": 5,
        "regex": "(the |a |of |fox |hill )*",
        "repeat_penalty": 1.2,
        "repeat_last_n": -1,
        "dry_multiplier": 1,
        "dry_penalty_last_n": -1,
        "stop": [f"the end {number}" for number in range(200)],
        "stream": True,
    }
    _always(scene, lambda _: scene.post(COMPLETIONS, body), 2)


def _picture(side: int) -> str:
    """A PNG whose pixels take long to unpack."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 1)  # interlaced
    pixels = zlib.compress(bytes(3 * side * side + 8 * side), 9)
    data = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _slow_pictures(scene: Scene) -> None:
    """Pictures of 16 million pixels in some kilobytes."""
    parts = [{"type": "image_url", "image_url": {"url": _picture(SIDE)}} for _ in range(4)]
    content = [{"type": "text", "text": "What is it?"}, *parts]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    _always(scene, lambda _: scene.post(CHAT, body))


def _many_inputs(scene: Scene) -> None:
    """Thousands of texts to embed and to rank, more than a request may have, and as many as it may."""
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        (EMBEDDINGS, {"input": ["a"] * N_INPUTS}),
        (EMBEDDINGS, {"input": ["the fox"] * 64}),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * N_INPUTS}),
        ("/tokenize", {"content": "the fox " * 10_000, "with_pieces": True}),
        ("/apply-template", {"messages": [{"role": "user", "content": "a"}] * N_INPUTS}),
    )
    _always(scene, lambda n: scene.post(*bodies[n % len(bodies)]))


def _operators(scene: Scene) -> None:
    """What only operators may do, all the time."""
    slots = [
        f"/slots/{slot}?action={act}" for slot in range(4) for act in ("save", "restore", "erase")
    ]
    asks: tuple[tuple[str, Any], ...] = (
        *((path, {"filename": "../../a"}) for path in slots),
        ("/lora-adapters", [{"id": 0, "scale": 1.0}]),
        ("/models/load", {"model": "corral-demo"}),
        ("/models/unload", {"model": "corral-demo"}),
        ("/props", {"default_generation_settings": {}}),
    )

    def ask(number: int) -> None:
        if scene.post(*asks[number % len(asks)]).status == 200:
            scene.found(f"{asks[number % len(asks)][0]} is done for an ordinary key")

    _always(scene, ask)


def _short_streams(scene: Scene) -> None:
    """Streams of one token, as many as the key gets, without a pause."""
    body = {"prompt": "a", "max_tokens": 1, "stream": True}
    _always(scene, lambda n: scene.post(COMPLETIONS, body | {"prompt": f"{n}"}), 32)


_MORE_ROWS = Bars(itl_factor=2.0)  # the attacker's own answers are rows of every batch
_PICTURE_MIB = 12 * SIDE**2 / MIB
_WORKERS_MIB = 2 * 32
"""The memory that a worker may take to decode a picture, and that the two workers for larger bodies may
take, as docs/security.md says."""
_KINDS: dict[str, Callable[[Scene], None]] = {
    "tiny chunks": _tiny_chunks,
    "web sockets": _websockets,
    "compressed bodies": _compressed,
    "many parts": _many_parts,
    "chains of responses": _chains,
    "strange files": _strange_files,
    "slow pictures": _slow_pictures,
    "many inputs": _many_inputs,
    "operators' routes": _operators,
    "everything at once": _everything,
    "short streams": _short_streams,
}
_BARS = {
    "chains of responses": _MORE_ROWS,
    "strange files": _MORE_ROWS,
    "slow pictures": replace(_MORE_ROWS, memory_mib=80 + _PICTURE_MIB),
    "many inputs": replace(_MORE_ROWS, memory_mib=80 + _WORKERS_MIB),
}
_FILLING = {"everything at once": 16, "short streams": 32}
"""Attacks that fill the slots, with the answers that the client asks for at once."""


def _filling(scene: Scene, at_once: int) -> None:
    """An ordinary client who asks for as many answers at once."""
    body = {"prompt": "the fox of the hill " * 100, "max_tokens": 64, "ignore_eos": True}
    _always(scene, lambda _: scene.post(COMPLETIONS, body), at_once)


def _beside(name: str) -> Callable[[Scene], None] | None:
    if name in _FILLING:
        return partial(_filling, at_once=_FILLING[name])
    return one_stored if name == "chains of responses" else None


def _attacks() -> Iterator[Attack]:
    for name, act in _KINDS.items():
        assert act.__doc__ is not None
        yield Attack(
            name=name,
            family="mixed",
            what=act.__doc__,
            expects="Honest users notice little. Another key's batch takes less than twice as long.",
            act=partial(_beside_a_batch, act=act),
            beside=_beside(name),
            seconds=15.0,
            bars=_BARS.get(name, Bars()),
            is_short=name == "chains of responses",
        )


ATTACKS = tuple(_attacks())
