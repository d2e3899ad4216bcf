"""Images of requests: found in messages in each API's form, fetched where the operator allows URLs, and decoded.

Formats and sizes are checked by a file's header, before anything is decoded. Images are fetched from public addresses only, and bounded in
bytes and time. aiohttp and Pillow are imported by the first request that needs them.
"""

import asyncio
import binascii
import hashlib
import io
import ipaddress
import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from penstock.engine.errors import InvalidRequest
from penstock.engine.multimodal.inputs import DIGEST_BYTES, LoadedImage
from penstock.serving.requests import ChatMessage, convert_at

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import AbstractResolver, ResolveResult
    from PIL.Image import Image
    from yarl import URL

MAX_IMAGES = 32  # in one request
DATA = "data:"
IMAGE_PART: Mapping[str, Any] = {"type": "image"}  # in the place of an image, as chat templates know it
READ_BY_ROLE = ("user", "tool")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_BYTES = 2**24  # of one file
MAX_PIXELS = 2**24  # of one image: 4096 by 4096
MAX_PIXELS_OF_ALL = 2**25  # of one request's: 100 MB
MAX_ASPECT_RATIO = 200  # image processors that scale the shorter side would make any size of a longer image
MAX_SCANS = 100  # of a progressive JPEG, each of which is decoded over the whole image: encoders write some ten
START_OF_SCAN = b"\xff\xda"
DATA_URL = re.compile(r"data:(?:[\w.+-]+/[\w.+-]+)?(?:;[\w-]+=[\w-]+)*;base64,")
SECONDS = 10.0  # for all images of a request
MAX_CONNECTIONS = 4  # of a request
MAX_LOOKUPS = 8  # of all requests
# All addresses of IPv6 on the public internet, and those among them that stand for one of IPv4, be it a private one: 6to4.
UNICAST, TRANSLATED = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("2002::/16")
# A name may take its server's time: the event loop's own threads, which requests need, do not wait for one.
_lookups = ThreadPoolExecutor(MAX_LOOKUPS, "image-lookup")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a request, and the path of its part: a URL, the file itself or, in the library, what a program has decoded."""

    given: "str | bytes | Image"
    path: str

    @property
    def url(self) -> str | None:
        """From where it is to be fetched; None where it is at hand."""
        return self.given if isinstance(self.given, str) and not self.given.startswith(DATA) else None

    @property
    def is_remote(self) -> bool:
        return self.url is not None

    @property
    def size(self) -> int:
        """How much of the request's body it is."""
        return len(self.given) if isinstance(self.given, str) else 0


class ImageUrl(Struct):
    """`detail` has no effect: the model's image processor decides on the resolution."""

    url: str
    detail: str | None = None


class ImageUrlPart(Struct):
    image_url: str | ImageUrl


def image_part(url: str, path: str) -> dict[str, Any]:
    """A part of a chat message for an image that another API has at `path`."""
    return {"type": "image", "source": ImageSource(url, path)}


def content_of(pieces: Sequence[str | dict[str, Any]], joint: str) -> str | list[dict[str, Any]]:
    """The content of a chat message, from its texts and its image parts."""
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if len(texts) == len(pieces):
        return joint.join(texts)
    return [{"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in pieces]


def take_images(messages: Sequence[ChatMessage]) -> list[ImageSource]:
    """The images in their order. The messages have `IMAGE_PART` in the place of each. Raises `InvalidRequest`."""
    sources: list[ImageSource] = []
    for index, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        parts = []
        for place, part in enumerate(message.content):
            source = _source_of(part, f"messages[{index}].content[{place}]")
            if source is not None:
                if message.role not in READ_BY_ROLE:
                    raise InvalidRequest(f"`{source.path}` is an image in a message of the {message.role}", source.path)
                sources.append(source)
            parts.append(part if source is None else dict(IMAGE_PART))
        message.content = parts
    if len(sources) > MAX_IMAGES:
        raise InvalidRequest(f"a request may have {MAX_IMAGES} images, got {len(sources)}", sources[MAX_IMAGES].path)
    return sources


def _source_of(part: Mapping[str, Any], path: str) -> ImageSource | None:
    """None where the part is no image."""
    match part.get("type"):
        case "image_url" | "input_image":
            image_url = convert_at(part, ImageUrlPart, path).image_url
            return ImageSource(image_url if isinstance(image_url, str) else image_url.url, path)
        case "image_pil" if not isinstance(given := part.get("image_pil"), str | int | float | list | dict | None):
            return ImageSource(given, path)
        case "image" if isinstance(given := part.get("source"), ImageSource):
            return given
        case "image" | "image_pil":
            raise InvalidRequest(f"`{path}` holds no image: use a part `image_url`", path)
        case _:
            return None


class PixelBudget:
    """What a request's images may still have in pixels."""

    def __init__(self) -> None:
        self._left = MAX_PIXELS_OF_ALL

    def take(self, size: tuple[int, int], path: str) -> None:
        """Raises `InvalidRequest` for an image of this width and height that has too many."""
        width, height = size
        number = width * height
        if number > MAX_PIXELS:
            raise InvalidRequest(f"`{path}` is {width} by {height}: an image may have {MAX_PIXELS} pixels", path)
        if max(size) > MAX_ASPECT_RATIO * min(size):
            message = f"`{path}` is {width} by {height}: the longer side of an image may have {MAX_ASPECT_RATIO} times the shorter's pixels"
            raise InvalidRequest(message, path)
        self._left -= number
        if self._left < 0:
            raise InvalidRequest(f"the images of a request may have {MAX_PIXELS_OF_ALL} pixels together: `{path}` is beyond", path)


def load_images(sources: Sequence[ImageSource]) -> list[LoadedImage]:
    """Takes some 10 ms for each million pixels. Raises `InvalidRequest` with the path of one that cannot be read."""
    budget = PixelBudget()
    return [load_image(source, budget) for source in sources]


def load_image(source: ImageSource, budget: PixelBudget) -> LoadedImage:
    """In RGB, turned as its EXIF data says: as transformers' image processors are given images."""
    from PIL.Image import Image

    given = source.given
    if isinstance(given, Image):
        budget.take(given.size, source.path)
        return LoadedImage.of(as_rgb(given))
    data = bytes_of(given, source.path) if isinstance(given, str) else given
    if not isinstance(data, bytes):
        raise InvalidRequest(f"`{source.path}` must be an image of Pillow's, got {type(data).__name__}", source.path)
    digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
    return LoadedImage(digest, decode(data, source.path, budget))


def bytes_of(url: str, path: str) -> bytes:
    """Of a data URL."""
    start = DATA_URL.match(url)
    if start is None:
        raise InvalidRequest(f"`{path}` must be a URL such as `data:image/png;base64,...`", path)
    if (len(url) - start.end()) * 3 // 4 > MAX_BYTES + 2:
        raise InvalidRequest(f"`{path}` is larger than {MAX_BYTES} bytes", path)
    try:
        return binascii.a2b_base64(url[start.end() :], strict_mode=True)
    except ValueError as error:  # for what is not ASCII as well
        raise InvalidRequest(f"`{path}` is not valid base64: {error}", path) from None


def decode(data: bytes, path: str, budget: PixelBudget) -> "Image":
    """Of an animated GIF the first frame, and of a JPEG with other views (MPO), such as phones write, the first; animations are refused."""
    from PIL import Image, ImageOps

    try:
        opened = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception:  # Pillow raises many kinds of exceptions for damaged files, and for too many pixels
        raise InvalidRequest(f"`{path}` is no image in one of the formats {', '.join(FORMATS)}, or is damaged", path) from None
    with opened:
        budget.take(opened.size, path)
        if opened.format not in ("GIF", "MPO") and getattr(opened, "is_animated", False):
            raise InvalidRequest(f"`{path}` is animated", path)
        if opened.format in ("JPEG", "MPO") and data.count(START_OF_SCAN) > MAX_SCANS:
            raise InvalidRequest(f"`{path}` has more than {MAX_SCANS} scans", path)
        try:
            return as_rgb(ImageOps.exif_transpose(opened))
        except Exception as error:  # likewise, while it decodes
            raise InvalidRequest(f"`{path}` cannot be decoded: {str(error)[:200]}", path) from None


def as_rgb(image: "Image") -> "Image":
    """Of 16 bits the upper 8: Pillow would make white of whatever has any of these."""
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 256).convert("L")
    return image.convert("RGB")


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


class Resolver:
    """aiohttp's `AbstractResolver`, which looks names up in threads of its own."""

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> "list[ResolveResult]":
        look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        found = await asyncio.get_running_loop().run_in_executor(_lookups, look_up)
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            {"hostname": host, "host": str(address[0]), "port": port, "family": kind, "proto": protocol, "flags": flags}
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
        import aiohttp

        urls = [self._checked(source) if source.is_remote else None for source in sources]
        connector = aiohttp.TCPConnector(
            limit=MAX_CONNECTIONS,
            resolver=cast("AbstractResolver", Resolver()),
            use_dns_cache=False,
            socket_factory=self._socket,
            ssl=self.tls,
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

    def _checked(self, source: ImageSource) -> "URL":
        from yarl import URL

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

    async def _fetched(self, session: "aiohttp.ClientSession", source: ImageSource, url: "URL", left: "_Budget") -> ImageSource:
        # Errors do not reveal the host's answer: a client could explore the server's network with it.
        import aiohttp

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
