"""Bytes that are HTTP to some and not to others, and bodies that unpack to much."""

from __future__ import annotations

import itertools
import random
from functools import partial

from loadtests.hostile import bodies
from loadtests.hostile.attack import MOST_BODY_BYTES, Attack
from loadtests.hostile.scene import Scene, status_of

SEED = 20
HIDDEN = b"GET /v1/models?hidden HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
"""A request inside a body, which must not be answered."""
POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
_HOST = "Host: 127.0.0.1\r\nConnection: close\r\n"
CHUNKED = b"0\r\n\r\n"
BOTH = (
    b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n",
    b"Content-Length: %d\r\nTransfer-Encoding : chunked\r\n",
    b"Content-Length: %d\r\nTransfer-Encoding: xchunked\r\n",
    b"Content-Length: %d\r\nTransfer-Encoding:\x0bchunked\r\n",
    b"Content-Length: %d\r\nTransfer-Encoding: chunked, identity\r\n",
    b"Content-Length: %d\r\nTransfer-Encoding: identity, chunked\r\n",
    b"Content-Length: %d\r\nTransfer-Encoding: CHUNKED\r\nTransfer-Encoding: x\r\n",
    b"Content-Length: %d\r\n Transfer-Encoding: chunked\r\n",
    b"Content-Length: %d\r\nX: y\rTransfer-Encoding: chunked\r\n",
    b"Content-Length: %d\r\nX: y\nTransfer-Encoding: chunked\r\n",
    b"Content-Length: 5\r\nContent-Length: %d\r\n",
    b"Content-Length: %d\r\nContent-Length: 5\r\n",
    b"Content-Length: 5, %d\r\n",
)
"""Two ways to say where a body ends, which servers read differently. Source: RFC 9112, 6.3 and 11.2."""
LENGTHS = (b"-1", b"+5", b"0x5", b"5e0", b" 5 5", b"", b"9" * 40, b"5\x00", b"\xd9\xa5")
CHUNKS = (
    b"5;" + b"a" * 100_000 + b"\r\nhello\r\n0\r\n\r\n",
    b"0x5\r\nhello\r\n0\r\n\r\n",
    b"-5\r\nhello\r\n0\r\n\r\n",
    b"5\nhello\n0\n\n",
    b"ffffffffffffffff\r\nhello",
    b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n",
    b"0\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
)
ODD = (
    b"GET /health HTTP/1.0\r\n\r\n",
    b"GET /health HTTP/0.9\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: a\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" * 1000,
    b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET //evil.example/../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
    b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /%ff%fe%00?%ff HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: \xff\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"Cookie: a=b\r\n" * 20_000 + b"\r\n",
    b"GET /v1/live HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nRange: " + b"bytes=" + b"0-1," * 50_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 512,
    b"\r\n" * 100_000,
)
N_PIPELINED, N_NOISE = 2_000, 60


def _smuggled(scene: Scene) -> None:
    """Of each, at most one request may be answered: the hidden one is a part of the other's body."""
    body = CHUNKED + HIDDEN
    for both in BOTH:
        length = both % len(body) if b"%d" in both else both
        got = scene.raw(POST + _key(scene) + length + b"\r\n" + body, 0.5)
        _no_5xx(scene, got)
        if got.count(b"HTTP/1.1 ") > 1 or b'"object":"list"' in got:
            shown = both.split(b"\r\n")[-2].decode("latin1").strip()
            scene.found(f"a request hidden in a body is answered ({shown!a})")


def _framing(scene: Scene) -> None:
    for length in LENGTHS:
        sent = POST + b"Content-Length: " + length + b"\r\n\r\nhello" + HIDDEN
        _no_5xx(scene, scene.raw(sent, 0.4))
    for chunks in CHUNKS:
        _no_5xx(scene, scene.raw(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, 0.4))


def _odd(scene: Scene) -> None:
    for sent in ODD:
        _no_5xx(scene, scene.raw(sent, 0.3))
    rng = random.Random(SEED)
    for _ in range(N_NOISE):
        scene.raw(rng.randbytes(rng.randrange(1, 4000)) + b"\r\n\r\n", 0.02)


def _pipelined(scene: Scene) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    while scene.left_s() > 1:
        _no_5xx(scene, scene.raw(one * N_PIPELINED, 0.5))
        scene.raw(one * N_PIPELINED, 0.01)  # and does not wait for the answers


def _crumbs(scene: Scene, most: int = 1) -> None:
    """Whole requests whose bodies come in chunks of so many bytes at most."""
    body = b'{"prompt": "%s", "max_tokens": 1}' % (b"word " * 2_000)
    parts = (body[i : i + most] for i in range(0, len(body), most))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + CHUNKED
    head = POST + _key(scene) + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    while scene.left_s() > 1:
        _no_5xx(scene, scene.raw(head + chunks, 1.0))


def _packed(scene: Scene) -> None:
    bomb = bodies.gzip_bomb()
    for coding in ("gzip", "deflate", "br", "zstd", "gzip, gzip"):
        answer = scene.post("/v1/completions", bomb, **{"Content-Encoding": coding})
        if answer.status == 200 or answer.status >= 500:
            scene.found(f"a body packed with {coding} gets {answer.status}")


def _keys(scene: Scene) -> None:
    """Each of these is another client for whoever reads only one of its headers."""
    good = scene.headers("mallory")["Authorization"]
    for number in itertools.cycle(range(1000)):
        if not scene.left_s():
            return
        pretended = f"Bearer sk-pretended-{number:012d}"
        for lines in (
            f"Authorization: {pretended}\r\nAuthorization: {good}",
            f"Authorization: {good}\r\nAuthorization: {pretended}",
            f"Authorization: BearerX{good[7:]}",
            f"Authorization: {pretended} {good}",
            f"X-Api-Key: {number}\r\nX-Api-Key: {good[7:]}",
        ):
            got = scene.raw(f"GET /v1/models HTTP/1.1\r\n{_HOST}{lines}\r\n\r\n".encode())
            if status_of(got) == 200:
                scene.found(f"{lines.splitlines()[0][:24]}... counts as a key")


def _line_breaks(scene: Scene) -> None:
    forged = "a\n2026-01-01 ERROR corral: forged\x1b[2J\r\n\u2028"
    while scene.left_s():
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
            answer = scene.post(path, {forged: 1, "prompt": "a", "max_tokens": 1})
            if answer.status >= 500:
                scene.found(f"{path} gets {answer.status}")
        _no_5xx(scene, scene.raw(b"GET /a%0aERROR%1b[2J HTTP/1.1\r\n" + _HOST.encode() + b"\r\n"))


def _key(scene: Scene) -> bytes:
    return "".join(f"{k}: {v}\r\n" for k, v in scene.headers("mallory").items()).encode()


def _no_5xx(scene: Scene, got: bytes) -> None:
    for line in got.split(b"\r\n"):
        if line.startswith(b"HTTP/1.1 5") and not line.startswith(b"HTTP/1.1 505"):
            scene.found(f"odd bytes get {line[9:40].decode(errors='replace')}")


_CRUMBS = Attack(
    name="crumbs",
    family="smuggle",
    what="Bodies of 10,000 chunks of a byte each.",
    expects="Read like the same bodies in one chunk.",
    act=_crumbs,
    beside=partial(_crumbs, most=MOST_BODY_BYTES),
)
_OTHERS = tuple(
    Attack(
        name=name,
        family="smuggle",
        what=what,
        expects=expects,
        act=partial(act),
        is_short=name == "hidden requests",
    )
    for name, what, expects, act in (
        (
            "hidden requests",
            "Content-Length and Transfer-Encoding that contradict each other, and a request in the body.",
            "One answer at most, or a closed connection.",
            _smuggled,
        ),
        (
            "framing",
            "Lengths and chunks that are none.",
            "A 400, or a closed connection.",
            _framing,
        ),
        (
            "odd requests",
            "Other protocols and versions, headers of a megabyte, 50,000 headers, upgrades, noise.",
            "No 5xx, and nothing that others notice.",
            _odd,
        ),
        (
            "pseudo keys",
            "Two keys in headers of one kind, words that only begin with Bearer, and keys with blanks.",
            "One rule for the proxy and the server: 400 or 401.",
            _keys,
        ),
        (
            "names with line breaks",
            "Names of fields, paths and headers with line breaks and terminals' commands.",
            "No 5xx. Lines of the log stay whole.",
            _line_breaks,
        ),
        (
            "pipelines",
            "2,000 requests on a connection at once.",
            "Others notice nothing.",
            _pipelined,
        ),
        (
            "packed bodies",
            "512 MiB of blanks, packed to 500 KB.",
            "Not unpacked, or within bounds.",
            _packed,
        ),
    )
)
ATTACKS = (*_OTHERS, _CRUMBS)
