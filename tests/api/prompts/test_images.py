"""Images over HTTP: one image token for each in the prompt, whichever API it comes through, and refusals with the part's path."""

import asyncio
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image

from penstock.engine.multimodal.inputs import LoadedImage, ProcessedPrompt
from penstock.engine.multimodal.processor import BlindImageProcessor
from penstock.engine.multimodal.vision import VisionTower
from penstock.engine.text.tokenizer import ContentTokenizer
from penstock.serving import images as subject
from penstock.serving import prompts
from penstock.serving.context import Places
from penstock.serving.images import Fetcher, load_images
from penstock.serving.options import ServerOptions
from penstock.serving.templates.rendering import ChatTemplate
from tests.api.batches.client import by_custom_id, finished, request_line, start_batch
from tests.api.bodies.mutations import mutated_bodies
from tests.api.responses.server import Api, serve
from tests.api.scripted import ADDED, MODEL, byte_tokenizer, client_of
from tests.api.threaded_server import ThreadedServer
from tests.images import data_url, image_file
from tests.tiny_multimodal import picture, tiny_multimodal_model, tiny_processor, write_multimodal_model

RED = data_url(image_file())
CHAT_PART = {"type": "image_url", "image_url": {"url": RED, "detail": "low"}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED.partition(",")[2]}}
INPUT_IMAGE = {"type": "input_image", "image_url": RED, "detail": "auto"}
PARTS = """{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{%
if p.type == 'image' %}<s><image></s>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}[assistant]"""
TOOLS = "{% if tools %}{{ tools[0].function.name }}{% endif %}"
PARTS_OF_USERS = PARTS.replace("m.content is string", "m.role == 'tool' or m.content is string")
STRINGS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
CALL = re.compile("<tool_call>.*?</tool_call>", re.DOTALL)
TEXT = {"type": "text", "text": "What is <image>?"}


SEEN: list[LoadedImage] = []


class Seeing(BlindImageProcessor):
    """Remembers what it was given last."""

    def prepare(self, token_ids: Any, images: Any, param: str | None = None) -> ProcessedPrompt:
        SEEN[:] = images
        return super().prepare(token_ids, images, param)


TOKENIZER = byte_tokenizer({**ADDED, "<image>": True})
[IMAGE_ID] = TOKENIZER.encode("<image>", add_special_tokens=False)


def look(scenario: Any, template: str = PARTS, **settings: Any) -> None:
    settings = {"content_tokenizer": ContentTokenizer(TOKENIZER)} | settings
    settings = {
        "image_processor": Seeing("<image>", IMAGE_ID, 2),
        "max_model_len": 2000,
        "chat_template": ChatTemplate(template),
    } | settings
    serve(scenario, {"tokenizer": TOKENIZER}, **settings)


async def prompt_of(api: Api, path: str, body: dict[str, Any]) -> str:
    status, answer = await api.call("POST", path, {"model": MODEL, "max_tokens": 10} | body)
    assert status == 200, answer
    return api.prompt


def test_images_under_different_salts_are_different_images() -> None:
    async def scenario(api: Api) -> None:
        digests = []
        for salt in ("", "a", "b", "a"):
            body = {"messages": [{"role": "user", "content": [CHAT_PART]}]} | ({"cache_salt": salt} if salt else {})
            await prompt_of(api, "/chat/completions", body)
            digests += [image.digest for image in SEEN]
        assert len(set(digests)) == 3
        assert digests[1] == digests[3]

    look(scenario)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [(PARTS, "[user]A<s><image><image></s>B[assistant]"), (STRINGS, "[user]A<image><image>\nB[assistant]")],
)
def test_an_image_is_where_the_template_puts_it_in_every_api(template: str, prompt: str) -> None:
    texts = [{"type": "text", "text": text} for text in "AB"]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "A"}, INPUT_IMAGE, {"type": "input_text", "text": "B"}]}]

    async def scenario(api: Api) -> None:
        for path, body in (
            ("/chat/completions", {"messages": [{"role": "user", "content": [texts[0], CHAT_PART, texts[1]]}]}),
            ("/messages", {"messages": [{"role": "user", "content": [texts[0], BLOCK, texts[1]]}]}),
            ("/responses", {"input": items, "max_tokens": None}),
        ):
            assert await prompt_of(api, path, body) == prompt
            [seen] = SEEN
            assert (seen.image.mode, seen.image.size) == ("RGB", (4, 2))
        num_tokens = len(api.engine.requests[-1].prompt_token_ids)
        counted = await api.call("POST", "/messages/count_tokens", {"messages": [{"role": "user", "content": [texts[0], BLOCK, texts[1]]}]})
        assert counted == (200, {"input_tokens": num_tokens})
        _, tokens = await api.call("POST", "/responses/input_tokens", {"model": MODEL, "input": items})
        assert tokens["input_tokens"] == num_tokens

    look(scenario, template)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (PARTS, "[user]x[assistant][tool]Seen:<s><image><image></s>[user]y[assistant]"),
        (PARTS_OF_USERS, "[user]x[assistant][tool]Seen:[user]<s><image><image></s>y[assistant]"),
        (STRINGS, "[user]x[assistant][tool]Seen:<image><image>[user]y[assistant]"),
    ],
)
def test_an_image_in_a_tools_result_is_shown_where_the_template_can(template: str, prompt: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    use = [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "Seen:"}, BLOCK]}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Seen:"}, INPUT_IMAGE]}

    async def scenario(api: Api) -> None:
        user, after = ({"role": "user", "content": text} for text in "xy")
        for path, body in (
            (
                "/chat/completions",
                {
                    "messages": [
                        user,
                        {"role": "assistant", "tool_calls": [call]},
                        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "Seen:"}, CHAT_PART]},
                        after,
                    ]
                },
            ),
            (
                "/messages",
                {"messages": [user, {"role": "assistant", "content": use}, {"role": "user", "content": [result]}, after]},
            ),
            (
                "/responses",
                {
                    "input": [user, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, output, after],
                    "max_tokens": None,
                },
            ),
        ):
            assert CALL.sub("", await prompt_of(api, path, body)) == prompt

    look(scenario, TOOLS + template)


def test_text_that_looks_like_an_image_token_is_text() -> None:
    async def scenario(api: Api) -> None:
        body = {"messages": [{"role": "user", "content": [TEXT, CHAT_PART]}]}
        assert await prompt_of(api, "/chat/completions", body) == "[user]What is <image>?<s><image><image></s>[assistant]"
        assert api.engine.requests[-1].prompt_token_ids.count(IMAGE_ID) == 2

    look(scenario)


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [TEXT, *parts]}]}


def url(given: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": given}}


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/chat/completions", user(url("data:image/png;base64,AAAA")), "messages[0].content[1]", "no image in one of the formats"),
        ("/chat/completions", user(url(data_url(image_file(size=(64, 64))[:-30]))), "messages[0].content[1]", "cannot be decoded"),
        ("/chat/completions", user(url("https://x.example/a.png")), "messages[0].content[1]", "--allow-image-urls"),
        ("/chat/completions", user(url("file:///etc/passwd")), "messages[0].content[1]", "must be a data URL"),
        ("/chat/completions", user(url(7)), "messages[0].content[1].image_url.url", "Expected `str`, got `int`"),
        ("/chat/completions", user({"type": "video_url"}), "messages[0].content[1]", "and images by models that take them"),
        (
            "/chat/completions",
            user({"type": "input_audio", "input_audio": {}}),
            "messages[0].content[1]",
            "only text can be read",
        ),
        ("/chat/completions", user({"type": "image"}), "messages[0].content[1]", "holds no image"),
        ("/chat/completions", user({"type": "image", "source": {"given": "x", "path": "y"}}), "messages[0].content[1]", "holds no image"),
        ("/chat/completions", user({"type": "image_pil", "image_pil": "x"}), "messages[0].content[1]", "holds no image"),
        (
            "/chat/completions",
            {"messages": [{"role": "system", "content": [CHAT_PART]}]},
            "messages[0].content[0]",
            "message of the system",
        ),
        ("/chat/completions", user(CHAT_PART, CHAT_PART, CHAT_PART), "messages[0].content[3]", "2 images, got 3"),
        (
            "/responses",
            {"input": [{"role": "user", "content": [INPUT_IMAGE | {"image_url": "data:,x"}]}]},
            "input[0].content[0]",
            "URL such as",
        ),
        (
            "/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].image_url",
            "",
        ),
        ("/responses", {"input": [{"role": "system", "content": [INPUT_IMAGE]}]}, "input[0].content[0]", "only text can be read there"),
        (
            "/messages",
            user(BLOCK | {"source": {"type": "file", "file_id": "x"}}) | {"max_tokens": 5},
            None,
            "messages[0].content[1].source.type",
        ),
        ("/messages", user(BLOCK | {"source": {"type": "url", "url": "http://x/"}}) | {"max_tokens": 5}, None, "messages[0].content[1]"),
    ],
)
def test_refusals_name_the_part(path: str, body: dict[str, Any], param: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MAX_IMAGES", 2)

    async def scenario(api: Api) -> None:
        status, answer = await api.call("POST", path, {"model": MODEL} | body)
        assert (status, answer["error"].get("param")) == (400, param), answer
        assert said in answer["error"]["message"]

    look(scenario)


def test_a_text_model_takes_no_images() -> None:
    async def scenario(api: Api) -> None:
        for path, body, at in (
            ("/chat/completions", user(CHAT_PART), "messages[0].content[1]"),
            ("/messages", user(BLOCK) | {"max_tokens": 5}, "messages[0].content[1]"),
            ("/messages/count_tokens", user(BLOCK), "messages[0].content[1]"),
            ("/responses", {"input": [{"role": "user", "content": [INPUT_IMAGE]}]}, "input[0].content[0]"),
        ):
            status, answer = await api.call("POST", path, {"model": MODEL} | body)
            assert (status, answer["error"]["message"]) == (400, f"`{at}` is an image, and `{MODEL}` takes no images")

    serve(scenario)


def test_an_image_token_without_an_image_is_refused_where_special_tokens_in_messages_are_read() -> None:
    async def scenario(api: Api) -> None:
        status, answer = await api.call("POST", "/chat/completions", {"model": MODEL} | user(CHAT_PART))
        assert (status, answer["error"]["param"]) == (400, "messages[0].content[1]")
        assert "2 image tokens for 1 images" in answer["error"]["message"]

    look(scenario, content_tokenizer=None)


def test_images_are_fetched_where_the_operator_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def give(request: web.Request) -> web.Response:
        return web.Response(body=image_file("JPEG", (8, 6)))

    async def scenario(api: Api) -> None:
        app = web.Application()
        app.router.add_get("/image", give)
        async with TestServer(app) as images:
            body = {"model": MODEL} | user(url(str(images.make_url("/image"))))
            refused = [await api.call("POST", "/chat/completions", body)]
            monkeypatch.setattr(prompts, "Fetcher", partial(Fetcher, scheme="http"))
            refused.append(await api.call("POST", "/chat/completions", body))
            assert [(status, answer["error"]["param"]) for status, answer in refused] == [(400, "messages[0].content[1]")] * 2
            assert "public address" in refused[1][1]["error"]["message"]
            monkeypatch.setattr(prompts, "Fetcher", partial(Fetcher, scheme="http", is_allowed=lambda _: True))
            assert (await api.call("POST", "/chat/completions", body))[0] == 200
            assert SEEN[0].image.size == (8, 6)

    look(scenario, options=ServerOptions(keep_alive_interval=0, allow_image_urls=True))


def test_images_are_fetched_for_so_many_requests_at_a_time_and_others_wait_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    num_fetching, most, is_open = 0, 0, asyncio.Event()

    class Waiting(Fetcher):
        async def fetch(self, sources: Any) -> Any:
            nonlocal num_fetching, most
            num_fetching += 1
            most = max(most, num_fetching)
            await is_open.wait()
            num_fetching -= 1
            return [replace(source, given=image_file()) for source in sources]

    monkeypatch.setattr(prompts, "Fetcher", Waiting)

    async def scenario(api: Api) -> None:
        api.server.context.image_fetches = Places("fetch images", 2, 3)
        body = {"model": MODEL, "max_tokens": 5} | user(url("https://images.example/a.png"))
        asked = [asyncio.create_task(api.call("POST", "/chat/completions", body)) for _ in range(6)]
        finished, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        [refused] = [task.result() for task in finished]
        assert refused[0] == 503
        assert "too many requests wait to fetch images" in refused[1]["error"]["message"]
        is_open.set()
        assert sorted([status for status, _ in await asyncio.gather(*asked)]) == [200] * 5 + [503]
        assert most == 2

    look(scenario, options=ServerOptions(keep_alive_interval=0, allow_image_urls=True))


def test_lines_of_a_batch_have_images(tmp_path: Path) -> None:
    async def scenario(api: Api) -> None:
        async with client_of(api.server.base_url) as client:
            lines = [
                request_line("seen", messages=user(CHAT_PART)["messages"]),
                request_line("broken", messages=user(url("data:image/png;base64,AAAA"))["messages"]),
            ]
            done = await finished(client, await start_batch(client, lines))
            answers, errors = await by_custom_id(client, done.output_file_id), await by_custom_id(client, done.error_file_id)
        assert answers["seen"]["response"]["status_code"] == 200
        assert "<s><image><image></s>" in api.prompt
        assert errors["broken"]["response"]["body"]["error"]["param"] == "messages[0].content[1]"

    look(scenario, options=ServerOptions(keep_alive_interval=0, files_dir=str(tmp_path)))


def test_images_are_fetched_once_for_however_many_tries_a_truncation_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    num_fetched = 0

    async def give(request: web.Request) -> web.Response:
        nonlocal num_fetched
        num_fetched += 1
        return web.Response(body=image_file())

    async def scenario(api: Api) -> None:
        app = web.Application()
        app.router.add_get("/image", give)
        async with TestServer(app) as images:
            monkeypatch.setattr(prompts, "Fetcher", partial(Fetcher, scheme="http", is_allowed=lambda _: True))
            turns = [{"role": role, "content": "a" * 200} for role in ("user", "assistant") * 8]
            image = {"type": "input_image", "image_url": str(images.make_url("/image"))}
            body = {"input": [*turns, {"role": "user", "content": [image]}], "truncation": "auto", "max_output_tokens": 20}
            for path in ("/responses", "/responses/input_tokens"):
                assert (await api.call("POST", path, {"model": MODEL} | body))[0] == 200
            assert num_fetched == 2

    look(scenario, options=ServerOptions(keep_alive_interval=0, allow_image_urls=True))


def test_a_stored_response_keeps_its_images() -> None:
    async def scenario(api: Api) -> None:
        first = await api.create(input=[{"role": "user", "content": [INPUT_IMAGE]}])
        await api.create(input="And?", previous_response_id=first["id"])
        assert api.prompt == "[user]<s><image><image></s>[assistant]Hello there.[user]And?[assistant]"
        _, items = await api.call("GET", f"/responses/{first['id']}/input_items")
        assert items["data"][0]["content"] == [INPUT_IMAGE]

    look(scenario)


def test_nothing_is_decoded_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, loops = load_images, list[bool]()

    def watched(sources: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            loops.append(False)
        return decode(sources)

    monkeypatch.setattr(prompts, "load_images", watched)

    async def scenario(api: Api) -> None:
        for path in ("/chat/completions", "/messages", "/messages/count_tokens"):
            assert (await api.call("POST", path, {"model": MODEL, "max_tokens": 5} | user(CHAT_PART if "chat" in path else BLOCK)))[
                0
            ] == 200

    look(scenario)
    assert loops == [False] * 3


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServer]:
    directory = write_multimodal_model(tmp_path_factory.mktemp("idefics3"), "idefics3")
    flags = "--served-model-name seeing --dtype float32 --kv-cache-memory 16MiB --device cpu --compile off"
    served = ThreadedServer(["--model", str(directory), *flags.split()])
    yield served
    served.close()


def png(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return data_url(file.getvalue())


def by_transformers(prompt: str, *images: Image.Image) -> str:
    processor, model = tiny_processor("idefics3"), tiny_multimodal_model("idefics3")
    inputs = processor(text=[prompt], images=list(images), return_tensors="pt")
    with torch.inference_mode():
        token_ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]  # type: ignore[operator]
    said: str = processor.tokenizer.decode(token_ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


def test_a_model_sees_the_same_through_every_api_as_in_transformers(seeing: ThreadedServer) -> None:
    fields = {"model": "seeing", "temperature": 0}
    prompt = "<|im_start|>user\nIn <image> and <image><|im_end|>\n<|im_start|>assistant\n"
    texts = ["In ", " and "]

    async def ask(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
        async with http.post(f"{seeing.url}/{path}", json=fields | body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def scenario() -> None:
        async with aiohttp.ClientSession() as http:
            for images in ([picture(0), picture(1, 40, 16)], [picture(2), picture(0)]):
                urls = [png(image) for image in images]
                parts: list[Any] = [
                    part for text, given in zip(texts, urls, strict=True) for part in ({"type": "text", "text": text}, url(given))
                ]
                chat = await ask(http, "chat/completions", {"messages": [{"role": "user", "content": parts}], "max_tokens": 8})
                said = chat["choices"][0]["message"]["content"]
                assert said == by_transformers(prompt, *images)
                items = [
                    {"type": "input_image", "image_url": p["image_url"]["url"]} if "image_url" in p else p | {"type": "input_text"}
                    for p in parts
                ]
                response = await ask(http, "responses", {"input": [{"role": "user", "content": items}], "max_output_tokens": 8})
                assert response["output"][0]["content"][0]["text"] == said
                assert response["usage"]["input_tokens_details"]["cached_tokens"] > 32, "the prefix cache knows images by what they show"
                source = [{"type": "base64", "media_type": "image/png", "data": given.partition(",")[2]} for given in urls]
                blocks = [{"type": "image", "source": source.pop(0)} if "image_url" in part else part for part in parts]
                message = await ask(http, "messages", {"messages": [{"role": "user", "content": blocks}], "max_tokens": 8})
                assert message["content"][0]["text"] == said

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_image_that_breaks_the_vision_tower_is_a_500_and_its_neighbour_is_answered(
    seeing: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = VisionTower.encode

    def failing(self: VisionTower, pixels: dict[str, torch.Tensor]) -> torch.Tensor:
        if float(pixels["pixel_values"].std()) == 0.0:  # of a single colour
            raise RuntimeError("a defect")
        return encode(self, pixels)

    monkeypatch.setattr(VisionTower, "encode", failing)

    async def ask(http: aiohttp.ClientSession, image: Image.Image) -> tuple[int, Any]:
        content = [{"type": "text", "text": "In "}, url(png(image))]
        body = {"model": "seeing", "temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": content}]}
        async with http.post(f"{seeing.url}/chat/completions", json=body) as response:
            return response.status, await response.json()

    async def scenario() -> None:
        async with aiohttp.ClientSession() as http:
            images = [picture(0), Image.new("RGB", (16, 16), "white")]
            (status, answer), (failed, error) = await asyncio.gather(*(ask(http, image) for image in images))
            prompt = "<|im_start|>user\nIn <image><|im_end|>\n<|im_start|>assistant\n"
            assert (status, answer["choices"][0]["message"]["content"]) == (200, by_transformers(prompt, images[0]))
            assert failed == 500
            assert "vision tower" in error["error"]["message"]

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize(
    ("path", "whole"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": [TEXT, CHAT_PART]}], "max_tokens": 5}),
        ("/messages", {"messages": [{"role": "user", "content": [TEXT, BLOCK]}], "max_tokens": 5}),
        ("/responses", {"input": [{"role": "user", "content": [INPUT_IMAGE]}], "max_output_tokens": 5}),
    ],
)
def test_mutated_images_are_answered_or_refused(path: str, whole: dict[str, Any]) -> None:
    statuses = []

    async def scenario(api: Api) -> None:
        for body in mutated_bodies({"model": MODEL} | whole, 100, seed=4):
            async with api.http.post(api.server.base_url + path, data=body) as response:
                statuses.append(response.status)
                assert response.status in (200, 400, 404), (body, await response.text())

    look(scenario)
    assert len(set(statuses)) > 1
