"""Images that requests name by URL, fetched where the operator allows it: from public addresses only, and bounded in bytes and time."""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from penstock.engine.errors import InvalidRequest
from penstock.serving.images.content import ImageSource
from penstock.serving.images.decoding import MAX_BYTES

SECONDS = 10.0  # for all images of a request
MAX_CONNECTIONS = 4  # of a request
MAX_LOOKUPS = 8  # of all requests
# All addresses of IPv6 on the public internet, and those among them that stand for one of IPv4, be it a private one: 6to4.
UNICAST, TRANSLATED = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("2002::/16")
# A name may take its server's time: the event loop's own threads, which requests need, do not wait for one.
_lookups = ThreadPoolExecutor(MAX_LOOKUPS, "image-lookup")


class PrivateAddress(OSError):
    """What a host's name stands for is not on the public internet."""


def is_public(host: str) -> bool:
    """Whether an IP address is none of a private network, this machine, a link or a group."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address not in UNICAST or address in TRANSLATED:
            return False
    return address.is_global and not address.is_multicast


class Resolver(AbstractResolver):
    """Looks names up in threads of its own."""

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[ResolveResult]:
        look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        found = await asyncio.get_running_loop().run_in_executor(_lookups, look_up)
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(hostname=host, host=str(address[0]), port=port, family=kind, proto=protocol, flags=flags)
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """The threads are those of all requests."""


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Fetches over `scheme` from the addresses that are allowed, `budget` bytes in all.

    The address is checked where the socket is made that connects to it: whatever a name resolves to at another time does not matter.
    """

    budget: int
    scheme: str = "https"
    is_allowed: Callable[[str], bool] = is_public
    seconds: float = SECONDS
    tls: ssl.SSLContext | bool = True  # True: of the system's certificates

    async def fetch(self, sources: Sequence[ImageSource]) -> list[ImageSource]:
        """The same images, with the files in the place of URLs. Raises `InvalidRequest`."""
        urls = [self._checked(source) if source.is_remote else None for source in sources]
        connector = aiohttp.TCPConnector(
            limit=MAX_CONNECTIONS, resolver=Resolver(), use_dns_cache=False, socket_factory=self._socket, ssl=self.tls
        )
        left = _Budget(self.budget)
        async with aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False
        ) as session:
            tasks = [
                asyncio.ensure_future(self._fetched(session, source, url, left))
                for source, url in zip(sources, urls, strict=True)
                if url is not None
            ]
            try:
                async with asyncio.timeout(self.seconds):
                    files = iter(await asyncio.gather(*tasks))
            except TimeoutError:
                late = next(source for source in sources if source.is_remote)
                raise InvalidRequest(f"`{late.path}`: the images did not arrive within {self.seconds:g} seconds", late.path) from None
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return [source if url is None else next(files) for source, url in zip(sources, urls, strict=True)]

    def _checked(self, source: ImageSource) -> URL:
        assert isinstance(source.given, str)
        try:
            url = URL(source.given)
            is_plain = url.scheme == self.scheme and url.host is not None and url.user is None and url.password is None
        except ValueError:
            is_plain = False
        if not is_plain:
            raise InvalidRequest(f"`{source.path}` must be a data URL, or one of {self.scheme} without a user's name", source.path)
        return url

    def _socket(self, address: Any) -> socket.socket:
        family, kind, protocol, _, (host, *_) = address
        if not self.is_allowed(host):
            raise PrivateAddress("not a public address")
        return socket.socket(family, kind, protocol)

    async def _fetched(self, session: aiohttp.ClientSession, source: ImageSource, url: URL, left: "_Budget") -> ImageSource:
        """Says nothing of what the host answered: a client could explore the server's network with that."""
        try:
            async with session.get(url, allow_redirects=False, headers={"Accept-Encoding": "identity"}) as response:
                if response.status != 200 or response.headers.get("Content-Encoding", "identity") != "identity":
                    raise InvalidRequest(f"`{source.path}` was not answered with an image; redirects are not followed", source.path)
                data = bytearray()
                async for chunk in response.content.iter_any():
                    data += chunk
                    left.take(len(chunk))
                    if len(data) > MAX_BYTES or left.is_exceeded:
                        message = f"`{source.path}` is larger than {MAX_BYTES} bytes, or all images are larger than {self.budget}"
                        raise InvalidRequest(message, source.path)
        except InvalidRequest:
            raise
        except (aiohttp.ClientError, OSError, ValueError):
            raise InvalidRequest(
                f"`{source.path}` cannot be fetched: its host cannot be reached at a public address", source.path
            ) from None
        return replace(source, given=bytes(data))


class _Budget:
    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def take(self, num_bytes: int) -> None:
        self._left -= num_bytes

    @property
    def is_exceeded(self) -> bool:
        return self._left < 0
