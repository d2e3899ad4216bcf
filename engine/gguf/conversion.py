"""A GGUF file turned into a safetensors directory, once; afterwards the model loads in about a second."""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engine.cache_directory import cache_directory
from penstock.engine.errors import ConfigurationError
from penstock.engine.gguf.header import check_gguf_header
from penstock.engine.model_cache import build_once

if TYPE_CHECKING:
    import gguf
    import tokenizers
    import torch

# Part of every converted directory's name: raised whenever a conversion comes out differently.
CONVERSION_VERSION = 3

logger = logging.getLogger(__name__)


def converted_gguf(gguf_file: Path, *, verify: bool = False) -> Path:
    """The cached safetensors directory of a GGUF file, made now if it is not there or damaged; `verify` as of `build_once`.

    The file is recognised by its path, size and modification time: hashing gigabytes at each start would take longer than loading.
    """
    gguf_file = gguf_file.resolve()
    status = gguf_file.stat()
    identity = hashlib.sha256(f"{gguf_file}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:16]
    directory = cache_directory() / "models" / f"{gguf_file.stem}-{identity}-v{CONVERSION_VERSION}"

    def build(scratch: Path) -> None:
        logger.info("Converting %s (%.0f MB) to safetensors in %s; this happens once", gguf_file.name, status.st_size / 1e6, directory)
        convert_gguf(gguf_file, scratch)

    return build_once(directory, build, verify=verify)


def convert_gguf(gguf_file: Path, directory: Path) -> None:
    """Writes config, weights, tokenizer and chat template of `gguf_file` into `directory`, as `from_pretrained` reads them.

    Quantized matrices stay in few bits, in a file of their own (`quantization.py`). Other quantized weights come out as bfloat16: rounding
    to it is far below the error that quantization made. F16 and F32 files keep their type.
    Raises `ConfigurationError` where the file or its architecture cannot be read.
    """
    header = _Header.read(gguf_file)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

    from penstock.engine.gguf.matrices import take_quantized_matrices
    from penstock.engine.quantization import write_quantized

    folder, name = gguf_file.parent, gguf_file.name
    try:
        logger.info("Reading the tokenizer of %s", name)
        config = AutoConfig.from_pretrained(folder, gguf_file=name, local_files_only=True)
        config._name_or_path = ""
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, config=config, local_files_only=True)
        logger.info("Reading the weights of %s", name)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            config=config,
            local_files_only=True,
            quantization_config=GgufConfig(dequantize=True),
            dtype=header.dtype,
        )
    except MemoryError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigurationError(f"{name} holds a {header.architecture!r} model that cannot be read: {error}") from error
    _split_digits(tokenizer.backend_tokenizer, header.pre_tokenizer)
    setattr(model, "hf_quantizer", None)  # noqa: B010  # save_pretrained goes by it, though the weights are plain now
    logger.info("Writing the weights of %s as safetensors", name)
    matrices = take_quantized_matrices(model, header.tensors)
    if matrices:
        write_quantized(directory, matrices)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


# What `tokenizer.ggml.pre` says where each digit is a word of its own and all else is split as GPT-2 does; transformers leaves it out.
_DIGIT_SPLITTING = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})


def _split_digits(tokenizer: "tokenizers.Tokenizer", pre_tokenizer: str) -> None:
    if pre_tokenizer in _DIGIT_SPLITTING:
        from tokenizers import pre_tokenizers

        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


@dataclass(frozen=True, slots=True)
class _Header:
    """What conversion goes by: the architecture and pre-tokenizer by llama.cpp's names, the type to store plain weights in, the tensors."""

    architecture: str
    pre_tokenizer: str
    dtype: "torch.dtype"
    tensors: "list[gguf.ReaderTensor]"

    @classmethod
    def read(cls, gguf_file: Path) -> "_Header":
        import torch
        from gguf import GGMLQuantizationType, GGUFReader

        try:
            check_gguf_header(gguf_file)
            reader = GGUFReader(gguf_file)
            names = ("general.architecture", "tokenizer.ggml.pre", "split.count")
            fields: list[Any] = [None if field is None else field.contents() for field in map(reader.get_field, names)]
        except (ValueError, LookupError, TypeError, ArithmeticError, OSError) as error:
            raise ConfigurationError(f"{gguf_file} is not a GGUF file that can be read: {error}") from error
        architecture, pre_tokenizer, num_parts = fields
        if num_parts not in (None, 0, 1):
            raise ConfigurationError(f"{gguf_file.name} is one part of a split GGUF: merge the parts with llama.cpp's `gguf-split --merge`")
        kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
        if kinds == {GGMLQuantizationType.F32}:
            dtype = torch.float32
        else:
            dtype = torch.float16 if kinds <= {GGMLQuantizationType.F16, GGMLQuantizationType.F32} else torch.bfloat16
        return cls(str(architecture), str(pre_tokenizer), dtype, reader.tensors)
