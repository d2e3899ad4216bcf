"""Images of requests: what is decoded, what is refused before it is, and where images may be fetched from."""

import asyncio
import io
import random
import socket
import ssl
import struct
import threading
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from penstock.engine.errors import InvalidRequest
from penstock.serving import images
from penstock.serving.images import Fetcher, ImageSource, is_public, load_images
from tests.images import BLUE, RED, data_url, frames, image_file

PATH = "messages[0].content[1]"


def load(given: Any, path: str = PATH) -> Image.Image:
    [loaded] = load_images([ImageSource(given, path)])
    return loaded.image


def refusal(*given: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        load_images([ImageSource(each, PATH) for each in given])
    assert caught.value.param == PATH
    assert PATH in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_images_of_four_formats_are_decoded(format: str) -> None:
    image = load(data_url(image_file(format)))
    assert (image.mode, image.size) == ("RGB", (4, 2))
    pixel = image.getpixel((1, 1))
    assert isinstance(pixel, tuple)
    assert all(abs(value - wanted) < 16 for value, wanted in zip(pixel, RED, strict=True))


def test_an_image_is_turned_as_its_camera_says() -> None:
    turned = Image.new("RGB", (4, 2), RED)
    turned.putpixel((0, 0), BLUE)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    image = load(file.getvalue())
    assert image.size == (2, 4)
    assert image.getpixel((1, 0)) == BLUE


def test_images_are_told_apart_by_their_files() -> None:
    red, again, blue = load_images([ImageSource(each, PATH) for each in (image_file(), image_file(), image_file(color=BLUE))])
    assert red.digest == again.digest != blue.digest


def test_a_program_may_give_decoded_images() -> None:
    assert load(Image.new("L", (3, 3))).mode == "RGB"
    assert "must be an image of Pillow's" in refusal(object())


def test_of_an_animated_gif_the_first_frame_is_read_and_others_are_refused() -> None:
    assert load(frames("GIF")).getpixel((0, 0)) == RED
    assert "animated" in refusal(frames("WEBP"))
    assert "animated" in refusal(frames("PNG"))


def bomb(width: int, height: int) -> bytes:
    """The header of a PNG of this size, and little more."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(4097, 4096), (2**31 - 1, 2**31 - 1), (65_500, 2)])
def test_an_image_with_too_many_pixels_is_refused_by_its_header(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 2**16)
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    refusal(bomb(*size))


@pytest.mark.parametrize("size", [(1, 201), (402, 2)])
def test_an_image_that_a_processor_would_make_huge_is_refused(size: tuple[int, int]) -> None:
    assert "200 times" in refusal(image_file(size=size))
    assert load(image_file(size=(1, 200))).size == (1, 200)


def test_a_jpeg_with_too_many_scans_is_refused_before_it_is_decoded() -> None:
    file = image_file("JPEG", progressive=True)
    scan = file[file.rindex(b"\xff\xda") : -2]
    assert "scans" in refusal(file[:-2] + 100 * scan + file[-2:])
    load(file[:-2] + 10 * scan + file[-2:])


def test_of_a_jpeg_with_several_views_the_first_is_read() -> None:
    pixel = load(frames("MPO")).getpixel((0, 0))
    assert isinstance(pixel, tuple)
    assert pixel[0] > 240 > 16 > pixel[2]


@pytest.mark.parametrize(("value", "seen"), [(0, 0), (256, 1), (32768, 128), (65535, 255)])
def test_16_bits_of_grey_become_8(value: int, seen: int) -> None:
    file = io.BytesIO()
    Image.new("I;16", (2, 2), value).save(file, "PNG")
    assert load(file.getvalue()).getpixel((0, 0)) == (seen, seen, seen)


def test_all_images_of_a_request_share_a_bound_on_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS_OF_ALL", 20)
    assert "20 pixels together" in refusal(image_file(), image_file(), image_file())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (b"", "no image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image"),
        (image_file("BMP"), "no image"),
        (image_file("TIFF"), "no image"),
        (image_file(size=(64, 64))[:-30], "cannot be decoded"),
        (image_file("JPEG", size=(64, 64))[:-20], "cannot be decoded"),
        ("file:///etc/passwd", "must be a URL such as"),
        ("data:image/png,abc", "must be a URL such as"),
        ("data:image/png;base64,####", "not valid base64"),
        ("data:image/png;base64,é", "not valid base64"),
        ("data:image/png;base64,QUJ", "not valid base64"),
    ],
)
def test_what_is_no_image_is_refused_with_its_path(given: Any, said: str) -> None:
    assert said in refusal(given)


def test_a_file_that_is_too_large_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    assert "larger than 100 bytes" in refusal(data_url(bytes(103)))
    assert "no image" in refusal(data_url(bytes(100)))


def test_every_cut_of_a_file_is_an_image_or_a_refusal() -> None:
    for format in ("PNG", "JPEG", "WEBP", "GIF"):
        file = image_file(format, size=(16, 16))
        for end in range(0, len(file), 7):
            with suppress(InvalidRequest):
                load(file[:end])


def test_a_file_with_damage_anywhere_is_an_image_or_a_refusal() -> None:
    rng = random.Random(6)
    num_refused = 0
    for format in ("PNG", "JPEG", "WEBP", "GIF"):
        file = image_file(format, size=(16, 16))
        for _ in range(150):
            damaged = bytearray(file)
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(file))] = rng.randrange(256)
            try:
                assert load(bytes(damaged)).mode == "RGB"
            except InvalidRequest:
                num_refused += 1
    assert num_refused > 100


NOT_PUBLIC = """
127.0.0.1 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 224.0.0.1 255.255.255.255
::1 :: fe80::1%eth0 fc00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::a00:1 2002:a00:1:: fec0::1 ::127.0.0.1 ::ffff:0:127.0.0.1
"""


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_addresses_that_are_not_public_are_never_connected_to(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1"])
def test_public_addresses_are(address: str) -> None:
    assert is_public(address)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def fetched(
    handler: Handler,
    url: str = "http://127.0.0.1:{port}/image",
    *,
    budget: int = 2**20,
    served_by: ssl.SSLContext | None = None,
    **options: Any,
) -> bytes:
    """What a server at this machine gives to a fetcher that is allowed to connect to it."""

    async def run() -> bytes:
        app = web.Application()
        app.router.add_get("/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=served_by)
            await site.start()
            _, port = runner.addresses[0]
            fetcher = Fetcher(budget, **{"scheme": "http", "is_allowed": lambda _: True, **options})
            [source] = await fetcher.fetch([ImageSource(url.format(port=port), PATH)])
        finally:
            await runner.cleanup()
        assert isinstance(source.given, bytes)
        return source.given

    return asyncio.run(run())


async def give(request: web.Request) -> web.Response:
    return web.Response(body=b"image")


async def refuse(request: web.Request) -> web.Response:
    pytest.fail("the server was asked")


def test_an_image_is_fetched() -> None:
    assert fetched(give) == b"image"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://[::1]:{port}/", "http://images.example:{port}/"]
)
def test_nothing_is_asked_of_an_address_that_is_not_public(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name is: that is resolved once, and the socket connects to what was checked."""

    def resolve(host: str, port: int, *_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(InvalidRequest, match="public address"):
        fetched(refuse, url, is_allowed=is_public)


@pytest.mark.parametrize("url", ["http://x.example/", "ftp://x.example/", "https://user:key@x.example/", "https://", "//x", "https://[::1"])
def test_only_plain_urls_of_https_are_fetched(url: str) -> None:
    with pytest.raises(InvalidRequest, match="must be a data URL") as caught:
        asyncio.run(Fetcher(100).fetch([ImageSource(url, PATH)]))
    assert caught.value.param == PATH


@pytest.mark.parametrize("url", ["https://127.0.0.1/", "https://localhost/", "https://[::1]:8443/", "https://[::ffff:10.0.0.1]/"])
def test_nor_does_a_connection_of_tls_begin(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", lambda *_: pytest.fail("connected"))
    with pytest.raises(InvalidRequest, match="public address"):
        asyncio.run(Fetcher(100).fetch([ImageSource(url, PATH)]))


def fetched_by_tls(port_of: str, **options: Any) -> bytes:
    """From a server whose certificate is for images.example."""
    certificate = Path(__file__).parent / "images.example.pem"
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate)
    return fetched(give, f"https://{port_of}:{{port}}/image", served_by=server, scheme="https", **options)


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(Path(__file__).parent / "images.example.pem"))


def at_this_machine(host: str, port: int, *_: object, **__: object) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


def test_an_image_is_fetched_over_https(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", at_this_machine)
    assert fetched_by_tls("images.example", tls=trusting()) == b"image"


@pytest.mark.parametrize(("host", "is_trusted"), [("images.example", False), ("other.example", True)])
def test_a_certificate_that_does_not_vouch_for_the_host_is_refused(host: str, is_trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", at_this_machine)
    with pytest.raises(InvalidRequest, match="cannot be fetched") as caught:
        fetched_by_tls(host, tls=trusting() if is_trusted else True)
    assert caught.value.param == PATH


async def redirect(request: web.Request) -> web.Response:
    if request.path == "/image":
        raise web.HTTPFound("/other")
    return await refuse(request)


async def compress(request: web.Request) -> web.Response:
    return web.Response(body=b"image", headers={"Content-Encoding": "gzip"})


async def flood(request: web.Request) -> web.Response:
    return web.Response(body=bytes(2000))


@pytest.mark.parametrize(("handler", "said"), [(redirect, "redirects"), (compress, "not answered"), (flood, "larger than")])
def test_other_answers_are_refused(handler: Handler, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        fetched(handler, budget=1000)
    assert caught.value.param == PATH


def test_names_that_take_long_do_not_take_the_threads_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def resolve(*_: object, **__: object) -> list[Any]:
        is_over.wait(30)
        return []

    async def run() -> None:
        fetches = [asyncio.create_task(Fetcher(100).fetch([ImageSource(f"https://{n}.example/", PATH)])) for n in range(40)]
        await asyncio.sleep(0.05)
        try:
            assert await asyncio.wait_for(asyncio.to_thread(int), 5) == 0
        finally:
            is_over.set()
            await asyncio.gather(*fetches, return_exceptions=True)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    asyncio.run(run())


def test_a_host_that_does_not_answer_in_time_is_given_up() -> None:
    async def wait(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    with pytest.raises(InvalidRequest, match="did not arrive"):
        fetched(wait, seconds=0.05)
