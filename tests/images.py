"""Images for tests, as files and as data URLs."""

import base64
import io
from typing import Any

from PIL import Image

RED, BLUE = (255, 0, 0), (0, 0, 255)


def image_file(format: str = "PNG", size: tuple[int, int] = (4, 2), color: tuple[int, int, int] = RED, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, format, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def frames(format: str) -> bytes:
    """An animation: a red frame, and a blue one."""
    return image_file(format, save_all=True, append_images=[Image.new("RGB", (4, 2), BLUE)])
