"""From the bytes of an image to its pixels: formats and sizes are checked by its header, before anything is decoded."""

import binascii
import hashlib
import io
import re
from collections.abc import Sequence

from PIL import Image, ImageOps

from penstock.engine.errors import InvalidRequest
from penstock.engine.multimodal.inputs import DIGEST_BYTES, LoadedImage
from penstock.serving.images.content import ImageSource

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_BYTES = 2**24  # of one file
MAX_PIXELS = 2**24  # of one image: 4096 by 4096
MAX_PIXELS_OF_ALL = 2**25  # of one request's: 100 MB
MAX_ASPECT_RATIO = 200  # image processors that scale the shorter side would make any size of a longer image
MAX_SCANS = 100  # of a progressive JPEG, each of which is decoded over the whole image: encoders write some ten
START_OF_SCAN = b"\xff\xda"
DATA_URL = re.compile(r"data:(?:[\w.+-]+/[\w.+-]+)?(?:;[\w-]+=[\w-]+)*;base64,")


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
    given = source.given
    if isinstance(given, Image.Image):
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


def decode(data: bytes, path: str, budget: PixelBudget) -> Image.Image:
    """Of an animated GIF the first frame, and of a JPEG with other views (MPO), such as phones write, the first; animations are refused."""
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


def as_rgb(image: Image.Image) -> Image.Image:
    """Of 16 bits the upper 8: Pillow would make white of whatever has any of these."""
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 256).convert("L")
    return image.convert("RGB")
