"""Connections without a key that hold all that a server may have, and heads that are too long."""

from __future__ import annotations

from functools import partial

from loadtests.hostile.attack import ALONE, Attack
from loadtests.hostile.attacks.hold import crowd, head
from loadtests.hostile.scene import HELD, Scene, status_of

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


_IN = "Ten newcomers with a key are all answered, again and again."
ATTACKS = tuple(
    Attack(
        name=name,
        family="connections",
        what=what,
        expects=expects,
        act=act,
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
