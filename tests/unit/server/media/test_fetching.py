"""Pictures that are named by URLs: from whom they are fetched, to which addresses, and how much of them."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from PIL import Image

from serve_app.apis.openai import preparation
from serve_app.base.errors import InvalidRequestError, PicturesWantedError
from serve_app.base.values.media import Picture
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.server.http.dependencies import Bodies
from serve_app.server.media.decoder import MediaDecoder
from serve_app.server.media.fetching import MAX_FILE_BYTES, Fetcher, is_public
from serve_app.server.model_registry import ModelInfo
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.doubles.api import InProcess

HERE = "127.0.0.1"
OK, MOVED = (
    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
    "HTTP/1.1 302 Found\r\nLocation: {}\r\n\r\n",
)


def red() -> bytes:
    """A picture."""
    made = io.BytesIO()
    Image.new("RGB", (8, 6), (255, 0, 0)).save(made, "PNG")
    return made.getvalue()


@dataclass
class Site:
    """A web server that answers with these bytes, by path; what it does not have, it keeps waiting."""

    port: int = 0
    answers: dict[str, bytes] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    open: set[asyncio.StreamWriter] = field(default_factory=set)

    def url(self, path: str, host: str = "pictures.example") -> str:
        return f"http://{host}:{self.port}{path}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.seen.append(head)
        path = head.split()[1]
        if path in self.answers:
            writer.write(self.answers[path])
            await writer.drain()
        else:
            await reader.read()
        writer.close()

    async def close(self) -> None:
        """End all connections: else the next collection of garbage finds some."""
        for writer in self.open:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def site(**answers: bytes) -> AsyncIterator[Site]:
    """One with these answers: `a` is at `/a`."""
    found = Site(answers={f"/{name}": answer for name, answer in answers.items()})
    server = await asyncio.start_server(found.answer, HERE, 0)
    found.port = server.sockets[0].getsockname()[1]
    async with server:
        try:
            yield found
        finally:
            await found.close()


class Names:
    """A name server that knows a few names, and counts."""

    def __init__(self, **addresses: Sequence[str]) -> None:
        self.asked: Counter[str] = Counter()
        self._addresses = {"pictures.example": [HERE]} | addresses

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked[host] += 1
        if host not in self._addresses:
            raise OSError("unknown")
        return self._addresses[host]


def fetcher(names: Names, *, hosts: Sequence[str] = ("*.example",), max_s: float = 30) -> Fetcher:
    """One that may reach this machine, and nothing else."""
    return Fetcher(hosts, resolve=names.resolve, may_reach=HERE.__eq__, max_s=max_s)


def wanted(*urls: str) -> PicturesWantedError:
    """What a worker says."""
    names = [f"Picture {i} of {len(urls)}" for i in range(1, len(urls) + 1)]
    return PicturesWantedError("messages", list(zip(urls, names, strict=True)))


def ok(data: bytes) -> bytes:
    return OK.format(len(data)).encode() + data


async def refusal(one: Fetcher, *urls: str) -> str:
    """Why these are not fetched."""
    with pytest.raises(InvalidRequestError) as caught:
        await one.fetch("client", wanted(*urls))
    assert caught.value.param == "messages"
    return caught.value.message


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("1.1.1.1", True),
        ("2606:4700:4700::1111", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("168.63.129.16", False),
        ("::ffff:168.63.129.16", False),
        ("100.100.100.200", False),
        ("192.0.0.192", False),
        ("fd00:ec2::254", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:1.1.1.1", True),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::", False),
    ],
)
def test_private_addresses_are_known(address: str, expected: bool) -> None:
    assert is_public(address) is expected


async def test_a_file_is_fetched_once_from_the_address_that_was_looked_at() -> None:
    names = Names()
    async with site(a=ok(b"abc")) as web:
        url = web.url("/a?b=c d#e")
        web.answers["/a?b=c%20d"] = ok(b"abc")
        assert await fetcher(names).fetch("client", wanted(url, url)) == {url: b"abc"}
        assert names.asked == {"pictures.example": 1}
        (head,) = web.seen
    assert f"host: pictures.example:{web.port}\r\n" in head.lower()
    assert "cookie" not in head.lower()


async def test_redirects_are_followed_to_allowed_hosts_only_and_not_for_ever() -> None:
    names = Names(**{"inner.example": ["10.0.0.1"]})
    async with site(a=ok(b"abc")) as web:
        moved = {
            "/relative": "/a",
            "/other": web.url("/a", "elsewhere.test"),
            "/inner": web.url("/a", "inner.example"),
            "/file": "file:///etc/passwd",
            "/round": "/round",
        }
        for path, target in moved.items():
            web.answers[path] = MOVED.format(target).encode()
        one = fetcher(names)
        assert await one.fetch("client", wanted(web.url("/relative"))) == {
            web.url("/relative"): b"abc"
        }
        assert "'elsewhere.test' is not among" in await refusal(one, web.url("/other"))
        assert "'inner.example' has an address that is not" in await refusal(one, web.url("/inner"))
        assert "not http(s)" in await refusal(one, web.url("/file"))
        assert "more than 3 times" in await refusal(one, web.url("/round"))
    assert sum("/round" in head for head in web.seen) == 4


async def test_private_and_unknown_hosts_are_refused_without_a_connection() -> None:
    names = Names(
        **{"inner.example": ["10.0.0.1"], "both.example": [HERE, "::1"], "none.example": []}
    )
    async with site() as web:
        one = fetcher(names)
        for host in ("inner.example", "both.example", "none.example"):
            said = await refusal(one, web.url("/a", host))
            assert said == f"Picture 1 of 1: the host {host!r} has an address that is not public."
        assert "is not known" in await refusal(one, web.url("/a", "unknown.example"))
        before = names.asked.copy()
        assert "is not among ingress.picture_hosts" in await refusal(one, "http://127.0.0.1/a")
        assert "is not among" in await refusal(one, "https://example/a")
        assert "user's name" in await refusal(one, "http://a:b@pictures.example/")
        assert (await refusal(one, web.url("/a"), "http://evil.test/")).startswith("Picture 2 of 2")
        assert names.asked == before
    assert web.seen == []


async def test_what_is_too_large_or_fails_is_refused_by_its_name() -> None:
    async with site(
        a=ok(b"abc"),
        large=OK.format(MAX_FILE_BYTES + 1).encode(),
        endless=b"HTTP/1.1 200 OK\r\n\r\n" + bytes(MAX_FILE_BYTES + 1),
        missing=b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        broken=b"nonsense\r\n\r\n",
        short=OK.format(10).encode() + b"abc",
    ) as web:
        one = fetcher(Names())
        for path in ("/large", "/endless"):
            assert f"more than {MAX_FILE_BYTES} bytes" in await refusal(one, web.url(path))
        said = await refusal(one, web.url("/a"), web.url("/missing"))
        assert said == "Picture 2 of 2: its server answered with status 404."
        for path in ("/broken", "/short"):
            assert "cannot be fetched (RemoteProtocolError)" in await refusal(one, web.url(path))
        hurried = fetcher(Names(), max_s=0.05)
        assert "not there within 0.05 s" in await refusal(hurried, web.url("/silent"))
    assert "cannot be fetched (ConnectError)" in await refusal(one, web.url("/a"))


async def test_a_body_is_read_again_with_its_files() -> None:
    models: Any = {
        "m": ModelInfo("m", 512, Tokenizer(BUILTIN_MODEL), media=MediaDecoder(sees=True))
    }
    async with site(a=ok(red())) as web:
        bodies = Bodies(InProcess(models), fetch=fetcher(Names()).fetch)
        parts = [{"type": "image_url", "image_url": {"url": web.url("/a")}}] * 2
        body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
        made = await bodies.work(preparation.chat, body[:9], body[9:])
        web.answers["/a"] = ok(b"<svg/>")
        with pytest.raises(InvalidRequestError, match="Picture 1 of 2: it is none of PNG"):
            await bodies.work(preparation.chat, body)
    seen = [one for one in made.generation.request.media if isinstance(one, Picture)]
    assert [one.pixels[:3] for one in seen] == [b"\xff\0\0"] * 2
    assert len(web.seen) == 2
