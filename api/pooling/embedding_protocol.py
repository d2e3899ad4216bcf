"""Requests and responses of /v1/embeddings."""

from msgspec import Struct

from penstock.api.common_protocol import Int32
from penstock.api.pooling.pooling_protocol import EncodingFormat, InputFields, PoolingUsage


class EmbeddingRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    encoding_format: EncodingFormat | None = None
    dimensions: Int32 | None = None
    normalize: bool | None = None


class Embedding(Struct):
    """`embedding` is a list of numbers, or base64 of their little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingResponse(Struct):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage
    object: str = "list"
