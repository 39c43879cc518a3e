"""Connections and requests that are begun and not finished, and answers that nobody reads."""

from __future__ import annotations

import itertools
import json
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial

from loadtests.hostile.attack import ALONE, MOST_BODY_BYTES, Attack, Bars
from loadtests.hostile.scene import HELD, Scene, Shot, status_of

N_SLOW = 1000
N_LARGE = 64
N_READERS, N_VIEWERS, N_ASKERS = 40, 300, 32
HELD_MIB = 256
"""The most memory of all bodies that are being read: half of those."""
RECEIVE_BUFFER = 4096
_RESET = struct.pack("ii", 1, 0)
"""A connection that lingers for no time is reset: socket(7), `SO_LINGER`."""
_BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
N_HELD = 766
"""Of the 768 connections that a server with 1,024 files may have."""
N_NEWCOMERS = 10
LONG = b"x" * 70_000
_GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_PAGE = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_BEGUN = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
_CHUNKED = b"POST /health HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
OVERSIZED = (
    _BEGUN + b"X-Long: " + LONG + b"\r\n\r\n",
    _BEGUN + b"X-Short: a\r\n" * 10_000 + b"\r\n",
    b"GET /health?" + LONG + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    _CHUNKED + b"1\r\na\r\n0\r\nX-Late: " + LONG + b"\r\n\r\n",
)
REFUSED = (400, 414, 431)

Head = Callable[[Scene], bytes]


def head(scene: Scene, path: str, n_bytes: int, key: str | None) -> bytes:
    """The lines before a body of so many bytes."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: 127.0.0.1:{scene.port}",
        "Content-Type: application/json",
        f"Content-Length: {n_bytes}",
        *(f"{name}: {value}" for name, value in scene.headers(key).items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


@contextmanager
def crowd(
    scene: Scene, n: int, first: bytes, receive_buffer: int = 0
) -> Iterator[list[socket.socket]]:
    """So many connections, or as many as the server takes, on each of which this was sent."""
    with ExitStack() as stack:
        made: list[socket.socket] = []
        for _ in range(n):
            if not scene.left_s():
                break
            try:
                wire = stack.enter_context(scene.connect())
                if receive_buffer:
                    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
                wire.settimeout(min(2.0, max(0.1, scene.left_s())))
                wire.sendall(first)
                wire.setblocking(False)
            except OSError:
                scene.count(0)
                continue
            made.append(wire)
        yield made


def drip(scene: Scene, wires: list[socket.socket], drop: bytes) -> None:
    """A byte a second on each, until the attack is over; whoever is answered is counted."""
    held = list(wires)
    while scene.left_s() and held:
        held = [wire for wire in held if _still_held(scene, wire, drop)]
        scene.sleep(1.0)
    scene.note(HELD, len(held))


def _still_held(scene: Scene, wire: socket.socket, drop: bytes) -> bool:
    """Send this; False if the server has answered, or closed."""
    try:
        wire.send(drop)
        answer = wire.recv(65536)
    except BlockingIOError:
        return True
    except OSError:
        answer = b""
    scene.count(status_of(answer))
    return False


def _slow_bodies(scene: Scene, path: str, key: str | None) -> None:
    with crowd(scene, N_SLOW, head(scene, path, 5000, key) + b" ") as wires:
        drip(scene, wires, b" ")


def _slow_heads(scene: Scene) -> None:
    first = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{scene.port}\r\nX-Slow: ".encode()
    with crowd(scene, N_SLOW, first) as wires:
        drip(scene, wires, b"a")


def _silent(scene: Scene) -> None:
    with crowd(scene, N_SLOW, b"") as wires:
        scene.sleep(scene.left_s() - 1)
        scene.note(HELD, len(wires))


def _large_bodies(scene: Scene) -> None:
    """All but the last byte, and then nothing."""
    filling = head(scene, "/v1/completions", MOST_BODY_BYTES, "mallory")
    sent = filling + b" " * (MOST_BODY_BYTES - 1)
    with crowd(scene, N_LARGE, sent) as wires:
        scene.sleep(scene.left_s() - 1)
        scene.note(HELD, sum(not _is_answered(wire) for wire in wires))


def _is_answered(wire: socket.socket) -> bool:
    """Whether the server has answered, or closed."""
    try:
        wire.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _half_closed(scene: Scene) -> None:
    """Requests of which the second half never comes, as the client has closed its side."""
    first = head(scene, "/v1/completions", 5000, "mallory") + b" "
    with crowd(scene, N_SLOW, first) as wires:
        for wire in wires:
            with suppress(OSError):
                wire.shutdown(socket.SHUT_WR)
        scene.sleep(scene.left_s() - 1)


_STREAM = json.dumps(
    {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True, "logprobs": 5}
).encode()


def _readers(scene: Scene) -> None:
    """Long streams that are read."""
    scene.fire([Shot("/v1/completions", _STREAM, "mallory")] * N_READERS, at_once=N_READERS)


def _slow_readers(scene: Scene) -> None:
    """Long streams of which nobody reads a byte."""
    first = head(scene, "/v1/completions", len(_STREAM), "mallory") + _STREAM
    with crowd(scene, N_READERS, first, RECEIVE_BUFFER) as wires:
        scene.sleep(scene.left_s() - 1)
        scene.note(HELD, len(wires))


def _come_and_go(scene: Scene) -> None:
    """Requests whose clients leave at once, one after the other."""
    first = head(scene, "/v1/completions", len(_BODY), "mallory") + _BODY
    while scene.left_s():
        with crowd(scene, 50, first):
            pass


def _cut_streams(scene: Scene) -> None:
    """Streams that are all cut at once when they run, again and again."""
    body = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    sent = json.dumps(body).encode()
    first = head(scene, "/v1/completions", len(sent), "mallory") + sent
    while scene.left_s():
        with crowd(scene, N_READERS, first) as wires:
            scene.sleep(0.5)
            for wire in wires:
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def _viewers(scene: Scene) -> None:
    """Many watch what the server does, and read none of it."""
    asked = f"GET /v1/live HTTP/1.1\r\nHost: 127.0.0.1:{scene.port}\r\n"
    shown = "".join(f"{name}: {value}\r\n" for name, value in scene.headers("mallory").items())
    with crowd(scene, N_VIEWERS, f"{asked}{shown}\r\n".encode(), RECEIVE_BUFFER) as wires:
        scene.sleep(scene.left_s() - 1)
        scene.note(HELD, len(wires))


def _askers(scene: Scene) -> None:
    """Many ask all replicas for their statistics, all the time."""
    paths = ("/v1/stats", "/metrics", "/slots", "/props") * (N_ASKERS // 4)
    _always(scene, [partial(scene.get, path) for path in paths])


def _seekers(scene: Scene) -> None:
    """Many look for requests that never were, each for another one, all the time."""
    numbers = itertools.count()
    _always(scene, [lambda: scene.get(f"/v1/requests/cmpl-{next(numbers)}")] * N_ASKERS)


def _guessers(scene: Scene) -> None:
    """Many try keys that are none, all the time."""
    numbers = itertools.count()

    def guess() -> None:
        header = {"Authorization": f"Bearer sk-guess-{next(numbers)}"}
        scene.post("/v1/completions", _BODY, None, **header)

    _always(scene, [guess] * N_ASKERS)


def _always(scene: Scene, asking: Sequence[Callable[[], object]]) -> None:
    """Each of these again and again, at the same time."""

    def ask(once: Callable[[], object]) -> None:
        while scene.left_s():
            once()

    with ThreadPoolExecutor(len(asking)) as pool:
        list(pool.map(ask, asking))


def _hold(scene: Scene, first: bytes, receive_buffer: int = 0) -> None:
    with crowd(scene, N_HELD, first, receive_buffer) as wires:
        while scene.left_s() > 1:
            for _ in range(N_NEWCOMERS):
                answer = scene.get("/v1/models", "alice")
                if answer.status != 200:
                    scene.found(f"a newcomer with a key gets {answer.status or 'no answer'}")
            scene.sleep(1.0)
        scene.note(HELD, len(wires))


def _refused_uploads(scene: Scene) -> None:
    """Bodies that are refused before they come, of which the rest never does."""
    first = head(scene, "/v1/completions", 9 * 2**20, None)
    _hold(scene, first.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n") + b" ")


def _oversized(scene: Scene) -> None:
    for sent in OVERSIZED:
        if (status := status_of(scene.raw(sent))) not in REFUSED:
            scene.found(
                f"{sent[:12].decode()} with {len(sent)} bytes of head gets {status or 'cut'}"
            )


_CROWD = Bars(ttft_factor=None, pause_s=1.0)
"""Requests that come in one moment are answered in turn, and all come from one address here."""
_IN = "Ten newcomers with a key are all answered, again and again."
_ALONE = tuple(
    Attack(
        name=name,
        family="connections",
        what=what,
        expects=expects,
        act=act,
        bars=_CROWD,
        server=ALONE,
        is_short=name == "idle connections",
    )
    for name, what, expects, act in (
        (
            "idle connections",
            "766 clients without a key that ask for /health once and keep their connections.",
            _IN,
            partial(_hold, first=_GET),
        ),
        ("kept and silent", "766 connections that say nothing.", _IN, partial(_hold, first=b"")),
        ("kept half heads", "766 heads that do not end.", _IN, partial(_hold, first=_BEGUN)),
        (
            "unread pages",
            "766 clients that ask for the page ten times, and read nothing.",
            _IN,
            partial(_hold, first=_PAGE * 10, receive_buffer=4096),
        ),
        (
            "refused uploads",
            "766 bodies that are refused, and of which the rest does not come.",
            _IN,
            _refused_uploads,
        ),
        (
            "long heads",
            "Headers, addresses and trailers of 70,000 bytes and more in one write.",
            "431, or 400.",
            _oversized,
        ),
    )
)
_BUSY = Bars(itl_factor=1.5)
"""Loopback's other end takes a share of the same cores."""
_NOTHING = "Honest users notice nothing: what is being read has a bound, in number and in bytes."
_SLOW = tuple(
    Attack(
        name=name,
        family="hold",
        what=what,
        expects=_NOTHING,
        act=act,
        seconds=15.0,
        bars=bars,
        is_short=name == "slow bodies",
    )
    for name, what, act, bars in (
        (
            "slow bodies",
            "1,000 POSTs with a key, a byte a second.",
            partial(_slow_bodies, path="/v1/completions", key="mallory"),
            _CROWD,
        ),
        (
            "slow bodies without a key",
            "1,000 POSTs without a key, a byte a second.",
            partial(_slow_bodies, path="/v1/completions", key=None),
            _CROWD,
        ),
        (
            "slow bodies for /health",
            "1,000 POSTs to /health, which needs no key, a byte a second.",
            partial(_slow_bodies, path="/health", key=None),
            _CROWD,
        ),
        ("slow headers", "1,000 requests whose headers do not end.", _slow_heads, _CROWD),
        ("silent connections", "1,000 connections on which nothing is sent.", _silent, _CROWD),
        (
            "large bodies",
            f"{N_LARGE} bodies of 8 MiB, but for their last byte.",
            _large_bodies,
            Bars(memory_mib=HELD_MIB),
        ),
        ("half-closed", "1,000 bodies that end in the middle, half-closed.", _half_closed, _CROWD),
        (
            "come and go",
            "50 clients who leave as soon as they have asked, again and again.",
            _come_and_go,
            replace(_CROWD, itl_factor=2.0),
        ),
        (
            "cut streams",
            f"{N_READERS} streams that run and are all reset at once, again and again.",
            _cut_streams,
            Bars(itl_factor=2.0),
        ),
        ("viewers", f"{N_VIEWERS} viewers of /v1/live who read nothing.", _viewers, Bars()),
        (
            "askers",
            f"{N_ASKERS} clients who ask for statistics, slots and metrics all the time.",
            _askers,
            _BUSY,
        ),
        (
            "seekers",
            f"{N_ASKERS} clients who look for requests that never were, all the time.",
            _seekers,
            _BUSY,
        ),
        (
            "guessers",
            f"{N_ASKERS} clients who try keys that are none, all the time.",
            _guessers,
            _BUSY,
        ),
    )
)
_UNREAD = Attack(
    name="slow readers",
    family="hold",
    what=f"{N_READERS} streams of 3,000 tokens of which nobody reads a byte.",
    expects="Honest users notice no more than of as many streams that are read.",
    act=_slow_readers,
    seconds=15.0,
    bars=_BUSY,
    beside=_readers,
)
ATTACKS = (*_SLOW, _UNREAD, *_ALONE)
