"""Fetches the pictures that requests name by URLs: from hosts that the configuration allows, within bounds.

A name is resolved once, all of its addresses must be public, and the connection goes to one of these. So no
second answer of a name server leads anywhere else.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

from serve_app.base.errors import InvalidRequestError, PicturesWantedError
from serve_app.server.workers.fair_semaphore import FairSemaphore

if TYPE_CHECKING:
    import httpx2

MAX_FILE_BYTES, MAX_BYTES = 16 * 2**20, 32 * 2**20
"""The most bytes of one file, and of a request's files together."""
MAX_S = 10.0
"""Seconds for all of a request's pictures."""
MAX_REDIRECTS = 3
N_AT_ONCE, N_EACH = 8, 2
"""Requests whose pictures are fetched at once, and those of one client."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
# Addresses that lead on to IPv4's, of whatever kind.
_TUNNELS = tuple(
    map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
)
# Clouds' own services at addresses that look public: Azure's, Oracle's, and relays of 6to4.
_OF_CLOUDS = tuple(
    map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24"))
)
T = TypeVar("T")
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host's name, for connections to that port. Raises OSError."""


def is_public(address: str) -> bool:
    """Whether the address is one of the internet, and not of a private network, a cloud's own services or
    this machine."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return is_public(str(ip.ipv4_mapped))
    if any(ip in network for network in (*_TUNNELS, *_OF_CLOUDS)):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


class _FetchError(Exception): ...


class Fetcher:
    """Fetches files. Event loop only."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        resolve: Resolve | None = None,
        may_reach: Callable[[str], bool] = is_public,
        max_s: float = MAX_S,
    ) -> None:
        """`hosts` are names, `*.example` for all below one, `*` for all. Tests have their own `resolve`
        and `may_reach`."""
        self._hosts = [host.lower() for host in hosts]
        self._resolve = resolve or _addresses
        self._may_reach = may_reach
        self._max_s = max_s
        self._places = FairSemaphore(N_AT_ONCE, most_each=N_EACH)
        self._client: httpx2.AsyncClient | None = None

    async def fetch(self, client: str, missing: PicturesWantedError) -> dict[str, bytes]:
        """The files at the URLs, for this client. Raises InvalidRequestError that begins with the name of
        the picture that cannot be had."""
        files: dict[str, bytes] = {}
        url, name = missing.pictures[0]
        try:
            for url, name in missing.pictures:  # noqa: B007  # the messages name it
                self._check_url(url)  # at once, without a name server
            async with self._places.place(client), asyncio.timeout(self._max_s):
                for url, name in missing.pictures:  # noqa: B007
                    if url not in files:
                        room = MAX_BYTES - sum(map(len, files.values()))
                        files[url] = await self._file(url, min(room, MAX_FILE_BYTES))
        except _FetchError as failure:
            raise InvalidRequestError(f"{name}: {failure}.", missing.param) from None
        except TimeoutError:
            message = f"{name}: it was not there within {self._max_s:g} s."
            raise InvalidRequestError(message, missing.param) from None
        return files

    def _check_url(self, text: str) -> httpx2.URL:
        """Raises _FetchError for what is no URL of an allowed host."""
        import httpx2

        try:
            url = httpx2.URL(text)
        except httpx2.InvalidURL:
            raise _FetchError("its URL cannot be read") from None
        if url.scheme not in _PORTS or not url.host:
            raise _FetchError("its URL is not http(s)")
        if url.userinfo:
            raise _FetchError("its URL has a user's name or password in it")
        host = url.host.lower().rstrip(".")
        if not any(fnmatchcase(host, pattern) for pattern in self._hosts):
            raise _FetchError(f"the host {host[:100]!r} is not among ingress.picture_hosts")
        return url

    async def _file(self, text: str, max_bytes: int) -> bytes:
        """The content at a URL. Raises _FetchError."""
        import httpx2

        for _ in range(MAX_REDIRECTS + 1):
            url = self._check_url(text)
            request = await self._request(url)
            try:
                answer = await (await self._get_client()).send(request, stream=True)
                try:
                    if answer.status_code in _REDIRECTS and "location" in answer.headers:
                        text = str(url.join(answer.headers["location"]))
                        continue
                    return await _read_answer(answer, max_bytes)
                finally:
                    await answer.aclose()
            except httpx2.InvalidURL:
                raise _FetchError("it is redirected to something that is not a URL") from None
            except httpx2.HTTPError as error:
                raise _FetchError(f"it cannot be fetched ({type(error).__name__})") from None
        raise _FetchError(f"it is redirected more than {MAX_REDIRECTS} times")

    async def _request(self, url: httpx2.URL) -> httpx2.Request:
        """The request to an address of the host that is known to be public. Raises _FetchError."""
        import httpx2

        host, port = url.host, url.port or _PORTS[url.scheme]
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            raise _FetchError(f"the host {host[:100]!r} is not known") from None
        if not addresses or not all(map(self._may_reach, addresses)):
            raise _FetchError(f"the host {host[:100]!r} has an address that is not public")
        return httpx2.Request(
            "GET",
            url.copy_with(host=addresses[0], fragment=None),
            headers={
                "Host": url.netloc.decode("ascii"),
                "Accept": "image/*",
                "Accept-Encoding": "identity",
                "User-Agent": "corral",
                "Connection": "close",
            },
            # Certificates are checked against the name, too.
            extensions={
                "sni_hostname": url.raw_host.decode("ascii"),
                "timeout": httpx2.Timeout(self._max_s).as_dict(),
            },
        )

    async def _get_client(self) -> httpx2.AsyncClient:
        if self._client is None:
            self._client = await asyncio.to_thread(_new_client)
        return self._client


def _new_client() -> httpx2.AsyncClient:
    """Reading the certificates takes some hundredths of a second. No connection is used twice, since the
    pool tells connections apart by address, and not by name."""
    import httpx2

    return httpx2.AsyncClient(
        trust_env=False, follow_redirects=False, limits=httpx2.Limits(max_keepalive_connections=0)
    )


async def _read_answer(answer: httpx2.Response, max_bytes: int) -> bytes:
    if answer.status_code != 200:
        raise _FetchError(f"its server answered with status {answer.status_code}")
    too_large = _FetchError(
        f"it has more than {max_bytes} bytes, or all pictures together have too many"
    )
    with suppress(ValueError):
        if int(answer.headers.get("content-length", "0")) > max_bytes:
            raise too_large
    data = bytearray()
    async for piece in answer.aiter_raw():  # not decompressed: that could be a bomb
        data += piece
        if len(data) > max_bytes:
            raise too_large
    return bytes(data)


_THREADS = ThreadPoolExecutor(4, "corral-names")
"""The threads of the system's resolver, which may take long."""


async def _addresses(host: str, port: int) -> list[str]:
    infos: list[Any] = await asyncio.get_running_loop().run_in_executor(
        _THREADS, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return [str(address[0]).partition("%")[0] for *_, address in infos]
