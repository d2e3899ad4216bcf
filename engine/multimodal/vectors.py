"""Prompts of vectors: checked, and read from what a client sends."""

import base64
import binascii
import hashlib
import io
import pickle
import zipfile
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from penstock.engine.errors import InvalidRequest
from penstock.engine.multimodal.inputs import DIGEST_BYTES, ProcessedPrompt, PromptEmbeds

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
UNREADABLE = (
    *(binascii.Error, zipfile.BadZipFile, pickle.UnpicklingError, SafetensorError),
    *(AttributeError, EOFError, ImportError, LookupError, RuntimeError, TypeError, ValueError),
)


def prompt_of_vectors(vectors: Any, hidden_size: int, param: str) -> ProcessedPrompt:
    """A prompt of vectors [T, H] alone, whose ids are all placeholders. Raises `InvalidRequest` for any other tensor."""
    check_vectors(vectors, hidden_size, param)
    vectors_TH = vectors.detach().cpu().contiguous()
    return ProcessedPrompt([0] * len(vectors_TH), (embeds_at(range(len(vectors_TH)), vectors_TH),))


def check_vectors(vectors: Any, hidden_size: int, param: str) -> None:
    """Raises `InvalidRequest` for what is not a tensor [T, H] of finite numbers."""
    if not isinstance(vectors, Tensor):
        raise InvalidRequest(f"`{param}` must be a tensor [tokens, {hidden_size}], got {type(vectors).__name__}", param)
    if vectors.layout != torch.strided or vectors.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise InvalidRequest(f"`{param}` must be a dense tensor of {names}, got {vectors.layout} and {vectors.dtype}", param)
    if vectors.dim() != 2 or vectors.shape[1] != hidden_size or not len(vectors):
        raise InvalidRequest(f"`{param}` must have the shape [tokens, {hidden_size}], got {list(vectors.shape)}", param)
    if not vectors.isfinite().all():
        raise InvalidRequest(f"`{param}` holds what is not a finite number", param)


def embeds_at(positions: range | list[int], vectors_NH: Tensor) -> PromptEmbeds:
    """These contiguous vectors at these positions of a prompt."""
    digest = hashlib.blake2b(f"{vectors_NH.dtype}".encode(), digest_size=DIGEST_BYTES)
    digest.update(vectors_NH.view(torch.uint8).numpy().data)
    return PromptEmbeds(positions, digest.digest(), vectors_NH)


def decoded_vectors(text: str, param: str) -> Tensor:
    """The one tensor of a file of safetensors, or of torch.save's, in base64. Raises `InvalidRequest`."""
    try:
        data = base64.b64decode(text, validate=True)
        tensors = _saved_by_torch(data) if data.startswith(b"PK") else list(load_safetensors(data).values())
    except UNREADABLE as error:
        message = f"`{param}` must be the base64 of a tensor, as safetensors or torch.save write it: {error!s:.200}"
        raise InvalidRequest(message, param) from None
    if len(tensors) != 1 or not isinstance(tensors[0], Tensor):
        raise InvalidRequest(f"`{param}` must hold one tensor", param)
    return tensors[0]


def _saved_by_torch(data: bytes) -> list[Any]:
    """Of a file that is no larger unpacked. Nothing in it is run: only tensors are made."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(data) for entry in archive.infolist()):
            raise ValueError("its parts are compressed")
    with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        tensor: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    # A view may claim any size over a few bytes.
    if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.nbytes > len(data):
        raise ValueError("the tensor is larger than the file")
    return [tensor]
