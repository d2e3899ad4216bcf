"""Requests and responses of /v1/rerank, as Jina and as Cohere have them."""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.api.pooling.pooling_protocol import PoolingFields, PoolingUsage


class RerankDocument(Struct, forbid_unknown_fields=True):
    text: str


class RerankRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """`top_n` None or 0: all of them. `max_tokens_per_doc` is Cohere's: documents are cut to so many tokens."""

    query: str | RerankDocument
    documents: list[str | RerankDocument]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class RerankResult(Struct):
    """`index` is the document's place in the request."""

    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class ApiVersion(Struct):
    version: str


class BilledTokens(Struct):
    input_tokens: int
    output_tokens: int = 0


class RerankMeta(Struct):
    """Cohere's place for the version and the usage."""

    api_version: ApiVersion
    tokens: BilledTokens


class RerankResponse(Struct):
    """Jina's fields; Cohere's are the same but for `meta`. The best document comes first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage
    meta: RerankMeta | UnsetType = UNSET
    object: str = "list"
