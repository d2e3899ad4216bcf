"""Images in conversations: the parts that hold them in each API are taken out of the messages, which are rendered with image tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.engine.errors import InvalidRequest
from penstock.engine.multimodal.inputs import ProcessedPrompt
from penstock.serving.context import JobQueue, ServerContext, queue_for, rendering_queue
from penstock.serving.requests import ChatCompletionRequest, ChatMessage, convert_at

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGES = 32  # in one request
DATA = "data:"
IMAGE_PART: Mapping[str, Any] = {"type": "image"}  # in the place of an image, as chat templates know it
READ_BY_ROLE = ("user", "tool")


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


async def read_images(
    context: ServerContext, body: ChatCompletionRequest, size: int, fetched: dict[str, bytes] | None = None
) -> tuple[list[ImageSource], JobQueue]:
    """The images of a conversation of `size` characters, fetched where they are URLs, and where the rest of it is prepared.

    What is in `fetched`, by URL, is not fetched again, and what is fetched is added. Raises `InvalidRequest`.
    """
    queue = rendering_queue(size, body.chat_template)
    if not any(isinstance(message.content, list) for message in body.messages):
        return [], queue
    images = await context.workers.run(queue_for(size), lambda: take_images(body.messages))
    if not images:
        return [], queue
    context.require_images(images[0].path)
    queue = rendering_queue(size - sum(image.size for image in images), body.chat_template)
    known = {} if fetched is None else fetched
    images = [image if image.url is None else replace(image, given=known.get(image.url, image.url)) for image in images]
    remote = [image for image in images if image.is_remote]
    if remote and not context.options.allow_image_urls:
        message = f"`{remote[0].path}` must be a data URL: this server was started without --allow-image-urls"
        raise InvalidRequest(message, remote[0].path)
    if remote:
        from penstock.serving.images.fetching import Fetcher

        async with context.image_fetches.place():
            files = await Fetcher(context.options.max_body_size).fetch(images)
        known.update(
            {image.url: file.given for image, file in zip(images, files, strict=True) if image.url and isinstance(file.given, bytes)}
        )
        images = files
    return images, JobQueue.LONG if queue is JobQueue.SHORT else queue


def image_token_for(context: ServerContext, images: Sequence[ImageSource]) -> str | None:
    """What the prompt has for each of these images."""
    return context.require_images(images[0].path).image_token if images else None


def with_images(context: ServerContext, token_ids: list[int], images: Sequence[ImageSource], salt: str = "") -> ProcessedPrompt:
    """The prompt with what the model sees of its images, which is remembered for prompts with the same salt. Raises `InvalidRequest`."""
    if not images:
        return ProcessedPrompt(token_ids, ())
    from penstock.serving.images.decoding import load_images  # imports Pillow

    path = images[0].path
    loaded = [image.salted(salt) for image in load_images(images)]
    return context.require_images(path).prepare(token_ids, loaded, path)
