"""POST /v1/audio/transcriptions and /v1/audio/translations: the text of a recording, whole, as subtitles or streamed by segments."""

import difflib
from asyncio import Timeout
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, TypeVar

from aiohttp import web
from msgspec import Meta, Struct

from penstock.api.answers import EventStream, json_response
from penstock.api.requests import (
    ARRIVED,
    MODEL,
    REQUEST_METRICS,
    SPEECH,
    TIMER,
    Form,
    admit,
    check_model,
    key_of,
    receiving_form,
    set_deadline,
    within_deadline,
)
from penstock.api.routes import Route
from penstock.engine.errors import InvalidRequest
from penstock.engine.transcription.engine import SpeechTask, TranscriptionDelta
from penstock.serving import audio
from penstock.serving.audio import (
    MAX_PROMPT,
    MEDIA_TYPES,
    REFUSED,
    SpeechFields,
    TokenUsage,
    Transcript,
    Transcription,
    TranscriptionRequest,
    TranscriptionTimer,
    TranslationRequest,
    decode_audio,
    params_of,
)
from penstock.serving.context import JobQueue
from penstock.serving.endpoints.answers import encode_event
from penstock.serving.endpoints.bodies import check_fields, converted, ignored_fields_header, served_model
from penstock.serving.requests import FieldsWithoutEffect

Fields = TypeVar("Fields", bound=SpeechFields)


class TranscriptTextDelta(Struct, tag_field="type", tag="transcript.text.delta"):
    """A segment of the text."""

    delta: str


class TranscriptTextDone(Struct, tag_field="type", tag="transcript.text.done"):
    """The whole text, which is what the deltas come to."""

    text: str
    usage: TokenUsage


class TranscriptionForm(TranscriptionRequest, kw_only=True):
    """The form of a transcription."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]


class TranslationForm(TranslationRequest, kw_only=True):
    """The form of a translation."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]


class AudioForm(Form):
    """A form whose file is kept in memory."""

    def __init__(self, deadline: Timeout, max_bytes: int) -> None:
        super().__init__(deadline, max_field=4 * MAX_PROMPT)
        self.data = bytearray()
        self._max_bytes = max_bytes

    async def begin_file(self, filename: str) -> None:
        """Its name says nothing that its content does not."""

    async def write(self, data: bytes) -> None:
        self.data += data
        if len(self.data) > self._max_bytes:
            raise web.HTTPRequestEntityTooLarge(self._max_bytes, len(self.data))


async def create_transcription(http: web.Request) -> web.StreamResponse:
    """The text of a recording in its own language. With `stream`, a segment at a time."""
    return await _answer(http, TranscriptionRequest, "transcribe")


async def create_translation(http: web.Request) -> web.StreamResponse:
    """The text of a recording in English."""
    return await _answer(http, TranslationRequest, "translate")


async def _answer(http: web.Request, kind: type[SpeechFields], task: SpeechTask) -> web.StreamResponse:
    context = http.app[SPEECH]
    timer = http[TIMER] = TranscriptionTimer(http.app[REQUEST_METRICS], http[ARRIVED])
    admit(http, http.app[MODEL], timer)
    form, body, headers = await read_form(http, kind)
    timer.model = served_model(context, body.model)
    audio.check_fields(body)
    params = params_of(body, task)
    context.engine.check(params)
    async with within_deadline(http):
        # Outside of the event loop, and few at a time: what a file holds is known only when it has been decoded.
        samples_N = await context.workers.run(JobQueue.LONG, partial(decode_audio, bytes(form.data), "file"))
        form.data.clear()
        features_MT = await context.workers.run(JobQueue.LONG, partial(context.engine.model.features, samples_N))
        deltas = timer.watch(context.engine.transcribe(features_MT, params, priority=body.priority or 0))
        transcript = Transcript(context.engine, params, features_MT.shape[1])
        if isinstance(body, TranscriptionRequest) and body.stream:
            return await _stream(http, deltas, transcript, headers)
        async with aclosing(deltas):
            async for delta in deltas:
                transcript.add(delta)
    if body.response_format in MEDIA_TYPES:
        text, media_type = transcript.plain(body.response_format), MEDIA_TYPES[body.response_format]
        return web.Response(text=text, content_type=media_type, charset="utf-8", headers=headers)
    return json_response(transcript.json(is_verbose=body.response_format == "verbose_json"), headers=headers)


async def _stream(
    http: web.Request, deltas: AsyncGenerator[TranscriptionDelta, None], transcript: Transcript, headers: dict[str, str]
) -> web.StreamResponse:
    options = http.app[SPEECH].options
    async with aclosing(deltas):
        first = await anext(deltas)  # what is wrong before it has a status of its own
        stream = EventStream(
            http, keep_alive_seconds=options.keep_alive_interval, headers=headers, write_timeout_seconds=options.write_timeout
        )
        async with stream:
            await stream.send(_event(transcript.add(first)))
            async for delta in deltas:
                await stream.send(_event(transcript.add(delta)))
            await stream.send(encode_event(TranscriptTextDone(transcript.text, transcript.token_usage)))
    return stream.response


def _event(text: str) -> bytes:
    return encode_event(TranscriptTextDelta(text)) if text else b""


async def read_form(http: web.Request, kind: type[Fields]) -> tuple[AudioForm, Fields, dict[str, str]]:
    """The form, its fields as the endpoint's type, and the response headers that they call for. Raises as `read_body`."""
    options = http.app[SPEECH].options
    async with receiving_form(http) as deadline:
        form = AudioForm(deadline, options.max_body_size)
        await form.read(await http.multipart())
    given: dict[str, Any] = {name: value for name, value in (form.fields | form.lists).items() if value}
    if "timestamp_granularities" in given:  # as some clients name a list
        given.setdefault("timestamp_granularities[]", []).append(given.pop("timestamp_granularities"))
    known = set(kind.__struct_encode_fields__)
    ignored = []
    for name in [*given]:
        if name in FieldsWithoutEffect.__struct_fields__:
            del given[name]
        elif name in REFUSED:
            raise InvalidRequest(REFUSED[name], name.removesuffix("[]"))
        elif name not in known:
            if not options.allow_unknown_fields:
                nearest = difflib.get_close_matches(name[:100], known, n=1)
                hint = f"; did you mean `{nearest[0]}`?" if nearest else ""
                raise InvalidRequest(f"unknown field `{name[:100]}`{hint}", name)
            ignored.append(name)
            del given[name]
    body = converted(given, kind)
    check_model(http, body.model)
    check_fields(body, key_of(http), options)
    set_deadline(http, http[ARRIVED], body.timeout, options)
    return form, body, ignored_fields_header(tuple(ignored))


AUDIO_ROUTES = (
    Route(
        "POST",
        "/v1/audio/transcriptions",
        create_transcription,
        request=TranscriptionForm,
        response=Transcription,
        events=TranscriptTextDelta | TranscriptTextDone,
        request_media_type="multipart/form-data",
        is_admitted=True,
    ),
    Route(
        "POST",
        "/v1/audio/translations",
        create_translation,
        request=TranslationForm,
        response=Transcription,
        request_media_type="multipart/form-data",
        is_admitted=True,
    ),
)
