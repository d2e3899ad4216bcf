"""What is served, by all of its names, as OpenAI's API has it; and the paths of models that are not."""

import time

from msgspec import UNSET, Struct, UnsetType

from penstock.serving.context import ModelDescription

_STARTED = int(time.time())


class ModelCard(Struct):
    """`state` is there where the server has several models; the length of the context is null before the first load of one."""

    id: str
    root: str
    max_model_len: int | None
    tasks: list[str]
    parent: str | None = None
    created: int = _STARTED
    object: str = "model"
    owned_by: str = "penstock"
    state: str | UnsetType = UNSET


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"
    models: tuple[()] = ()  # Codex wants the key, and goes by its own list where this one is empty


def model_card(model: ModelDescription) -> ModelCard:
    state = UNSET if model.state is None else model.state
    return ModelCard(model.name, model.root, model.max_model_len, list(model.tasks), model.parent, state=state)


POOLING_PATHS = ("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank", "/pooling", "/classify")
# Of OpenAI's API, for kinds of models that are not served.
NOT_SERVED = {
    "no audio is generated here: models that do are not served": ("/v1/audio/speech",),
    "no images are generated here: models that do are not served": (
        "/v1/images/generations",
        "/v1/images/edits",
        "/v1/images/variations",
    ),
}
SPOKEN = ("/v1/audio/transcriptions", "/v1/audio/translations")
NO_AUDIO = "no audio is read here: a server of a Whisper model does that, such as --model whisper-tiny.en"


class Health(Struct):
    status: str
