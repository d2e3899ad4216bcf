"""Requests and responses of /v1/score."""

from msgspec import Struct

from penstock.api.pooling.pooling_protocol import PoolingFields, PoolingUsage

Texts = str | list[str]


class ScoreRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """The two sides under one of the four pairs of names that vLLM has for them."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class ScoreEntry(Struct):
    index: int
    score: float
    object: str = "score"


class ScoreResponse(Struct):
    id: str
    created: int
    model: str
    data: list[ScoreEntry]
    usage: PoolingUsage
    object: str = "list"
