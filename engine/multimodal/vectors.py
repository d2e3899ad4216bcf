"""Prompts of vectors: checked, and read from what a client sends."""

import base64
import binascii
import hashlib
import io
import pickle
import pickletools
import re
import zipfile
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from penstock.engine.errors import InvalidRequest
from penstock.engine.multimodal.inputs import DIGEST_BYTES, ProcessedPrompt, PromptEmbeds

MAX_PICKLE = 4096  # bytes of what describes a tensor beside its numbers, some 150
# What torch.load takes beyond these makes memory of any size, and such as holds what was in it before.
GLOBALS = re.compile(
    r"collections OrderedDict|torch (\w+Storage|Size)|torch\.serialization _get_layout"
    r"|torch\._utils _rebuild_(tensor_v2|parameter|sparse_tensor)"
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
UNREADABLE = (
    *(binascii.Error, zipfile.BadZipFile, pickle.UnpicklingError, SafetensorError),
    *(ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, RuntimeError, TypeError, ValueError),
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
    """Of a file that is no larger unpacked. Nothing in it is run: only tensors are made of its own bytes."""
    # Written anew, so that torch reads the parts that were checked, and finds no others.
    checked = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(checked, "w") as copy:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(entry.file_size for entry in entries) > len(data):
            raise ValueError("its parts are compressed")
        for entry in entries:
            part = archive.read(entry)
            if entry.filename.lower().endswith(".pkl"):
                _check_pickle(part)
            copy.writestr(entry.filename, part)
    checked.seek(0)
    with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        tensor: Any = torch.load(checked, map_location="cpu", weights_only=True)
    # A view may claim any size over a few bytes.
    if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.nbytes > len(data):
        raise ValueError("the tensor is larger than the file")
    return [tensor]


def _check_pickle(pickled: bytes) -> None:
    """Raises `ValueError` for what is not the pickle of a tensor."""
    if len(pickled) > MAX_PICKLE:
        raise ValueError("it holds more than a tensor")
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL" and not GLOBALS.fullmatch(str(argument)):
            raise ValueError(f"it holds {argument!s:.100}, which is no part of a tensor")
