"""GGUF files: their header, checked as untrusted input, and their conversion into a directory that transformers loads."""

import functools
import hashlib
import logging
import mmap
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from penstock.engine.errors import ConfigurationError
from penstock.engine.system.cache import build_once, cache_directory
from penstock.engine.system.cpus import default_num_threads
from penstock.engine.system.process import making_model, progress_for_terminals

if TYPE_CHECKING:
    import gguf
    import tokenizers
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from penstock.engine.weights.quantization import StoredWeight

    _Converted: TypeAlias = tuple[PreTrainedModel, dict[str, StoredWeight]]

_T = TypeVar("_T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**21  # of all arrays together, which are read one by one; the largest vocabularies, with their merges, come to 1.3 million
MAX_NAME = 2**16 - 1
MAX_MODEL_NAME = 256
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a scalar, by the number of its type
_INTEGERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}
_STRING, _ARRAY = 8, 9
# None is larger than the largest dimension of a tensor.
_LENGTHS = frozenset({"embedding_length", "feed_forward_length", "vocab_size", "expert_count", "head_count", "head_count_kv", "key_length"})


class BrokenHeader(ValueError):
    """The message says what is wrong, and where."""


def check_gguf_header(path: Path) -> None:
    """Raises `BrokenHeader` where the file does not hold what its header says, or that says what no model is. Reads no weights."""
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise BrokenHeader("it is too short")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(data).run()


def gguf_name(path: Path) -> str | None:
    """What the file calls its model, read no further than to there. None where it does not say, or cannot be read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            name = _Walk(data).find_string(b"general.name").decode().strip()
    except (OSError, ValueError, struct.error):
        return None
    return name if name.isprintable() and 0 < len(name) <= MAX_MODEL_NAME else None


class _Walk:
    """Goes through the header once, from its beginning to its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._place = len(MAGIC)
        self._order = "<"
        self._integers: dict[str, int] = {}
        self._num_elements = 0
        self._largest_dimension = 0

    def run(self) -> None:
        num_tensors, num_fields = self._begin()
        self._read_fields(num_fields)
        self._read_tensors(num_tensors)
        self._check_lengths(num_tensors)

    def find_string(self, name: bytes) -> bytes:
        """The text of a field; b"" without one of this name and type."""
        _, num_fields = self._begin()
        for _ in range(num_fields):
            found, kind = self._string("the name of a field", MAX_NAME), self._integer("I")
            if (found, kind) == (name, _STRING):
                return self._string("the name of the model", MAX_NAME)
            self._skip(kind, found)
        return b""

    def _begin(self) -> tuple[int, int]:
        """The numbers of tensors and of fields."""
        if self._data[: self._place] != MAGIC:
            raise BrokenHeader("it does not begin with GGUF")
        (version,) = struct.unpack_from("<I", self._data, self._place)
        if version & 0xFFFF == 0:
            self._order = ">"
        version = self._integer("I")
        if version not in VERSIONS:
            raise BrokenHeader(f"its version is {version}, not one of {VERSIONS}")
        return self._integer("Q"), self._integer("Q")

    def _take(self, num_bytes: int, what: str) -> int:
        """Skips so many bytes, and returns where they begin."""
        start = self._place
        if num_bytes > len(self._data) - start:
            raise BrokenHeader(f"{what} at byte {start} would take {num_bytes} bytes, and the file has {len(self._data)}")
        self._place += num_bytes
        return start

    def _integer(self, code: str) -> int:
        start = self._take(struct.calcsize(code), "a number")
        return int(struct.unpack_from(self._order + code, self._data, start)[0])

    def _string(self, what: str, limit: int | None = None) -> bytes:
        num_bytes = self._integer("Q")
        if limit is not None and num_bytes > limit:
            raise BrokenHeader(f"{what} at byte {self._place} has {num_bytes} bytes")
        start = self._take(num_bytes, what)
        return self._data[start : self._place]

    def _read_fields(self, number: int) -> None:
        names: set[bytes] = set()
        for _ in range(number):
            name = self._string("the name of a field", MAX_NAME)
            if name in names:
                raise BrokenHeader(f"the field {name[:80].decode(errors='replace')!r} is there twice")
            names.add(name)
            kind = self._integer("I")
            if kind in _INTEGERS:
                self._integers[name.decode(errors="replace")] = self._integer(_INTEGERS[kind])
            else:
                self._skip(kind, name)

    def _skip(self, kind: int, name: bytes) -> None:
        what = f"the field {name[:80].decode(errors='replace')!r}"
        if kind == _STRING:
            self._string(what)
        elif kind == _ARRAY:
            kind, number = self._integer("I"), self._integer("Q")
            self._num_elements += number
            if self._num_elements > MAX_ELEMENTS:
                raise BrokenHeader(f"{what} brings the elements of its arrays to {self._num_elements}")
            if kind == _STRING:
                for _ in range(number):
                    self._string(what)
            else:
                self._take(number * self._size(kind, what), what)
        else:
            self._take(self._size(kind, what), what)

    def _size(self, kind: int, what: str) -> int:
        if kind not in _SIZES:
            raise BrokenHeader(f"{what} has the unknown type {kind}")
        return _SIZES[kind]

    def _read_tensors(self, number: int) -> None:
        names: set[bytes] = set()
        ends = []
        for _ in range(number):
            name = self._string("the name of a tensor", MAX_NAME)
            what = f"the tensor {name[:80].decode(errors='replace')!r}"
            if name in names:
                raise BrokenHeader(f"{what} is there twice")
            names.add(name)
            num_dimensions = self._integer("I")
            if num_dimensions > MAX_DIMENSIONS:
                raise BrokenHeader(f"{what} has {num_dimensions} dimensions")
            dimensions = [self._integer("Q") for _ in range(num_dimensions)]
            num_bytes = _num_bytes(self._integer("I"), dimensions, what)
            ends.append((self._integer("Q") + num_bytes, what))
            self._largest_dimension = max(self._largest_dimension, *dimensions, 0)
        alignment = self._integers.get("general.alignment", 32)
        if alignment <= 0 or alignment & (alignment - 1):
            raise BrokenHeader(f"its alignment is {alignment}, not a power of two")
        begin = -(-self._place // alignment) * alignment
        for end, what in ends:
            if begin + end > len(self._data):
                raise BrokenHeader(f"{what} would end at byte {begin + end}, and the file has {len(self._data)}")

    def _check_lengths(self, num_tensors: int) -> None:
        # Models are built by these numbers before a weight is read.
        for name, value in self._integers.items():
            last = name.rpartition(".")[2]
            if last == "block_count" and value > num_tensors:
                raise BrokenHeader(f"`{name}` is {value}, and there are {num_tensors} tensors")
            if last in _LENGTHS and value > self._largest_dimension:
                raise BrokenHeader(f"`{name}` is {value}, and no tensor's dimension is larger than {self._largest_dimension}")


def _num_bytes(kind: int, dimensions: list[int], what: str) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise BrokenHeader(f"{what} has the unknown type {kind}") from None
    num_elements = 1
    for dimension in dimensions:
        num_elements *= dimension
    if num_elements % block:
        raise BrokenHeader(f"{what} has {num_elements} elements, not whole blocks of {block}")
    return num_elements // block * num_bytes


# Part of every converted directory's name: raised whenever a conversion comes out differently.
CONVERSION_VERSION = 6

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
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as transformers_logging

    # This bar alone does not go by transformers' own switch.
    modeling_gguf_pytorch_utils.tqdm = transformers_logging.tqdm  # type: ignore[attr-defined]
    with _read_once(), progress_for_terminals():
        _convert(gguf_file, directory)


@contextmanager
def _read_once() -> Iterator[None]:
    # transformers reads the file for the config, the tokenizer and the weights, 2 s each time, and makes a table of names for each module.
    import gguf
    from transformers import modeling_gguf_pytorch_utils

    class PlainReader(gguf.GGUFReader):
        """Reads a header in a tenth of the time: of a vocabulary of 300,000 words, each would be two slices of a memmap, hence memmaps.

        Strings in arrays are bytes, which `ReaderField.contents` does not take.
        """

        @property  # type: ignore[override]
        def data(self) -> "np.ndarray[Any, Any]":
            return self._data

        @data.setter
        def data(self, mapped: "np.ndarray[Any, Any]") -> None:
            self._data = mapped.view(np.ndarray)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[gguf.GGUFValueType]]:
            array, string = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING
            start = orig_offs + _ARRAY_HEADER.size
            if raw_type != array or self.byte_order == "S":
                return super()._get_field_parts(orig_offs, raw_type)
            element_type, count = _ARRAY_HEADER.unpack(self.data[orig_offs:start].tobytes())
            elements: list[Any]
            if element_type == string:
                elements, end = _strings(self.data, start, count)
            elif element_type in _SIZES:
                end = start + count * _SIZES[element_type]
                kind = gguf.GGUFValueType(element_type)
                elements = [*self.data[start:end].view(self.gguf_scalar_to_np[kind])[:, None]]
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            types = [array, gguf.GGUFValueType(element_type)] if count else [array]
            return end - orig_offs, [element_type, count, *elements], [*range(2, count + 2)], types

    parse_value: Any = modeling_gguf_pytorch_utils._gguf_parse_value  # type: ignore[attr-defined]

    def parse_plain(value: Any, types: Any) -> Any:
        return value.decode() if isinstance(value, bytes) else parse_value(value, types)

    patches: list[tuple[Any, str, Any]] = [
        (gguf, "GGUFReader", functools.cache(PlainReader)),
        (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        (modeling_gguf_pytorch_utils, "_gguf_parse_value", parse_plain),
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in patches]
    for module, name, value in patches:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


# Of an array in a header: the type of its elements and their number. Each string in it follows its length.
_ARRAY_HEADER = struct.Struct("<IQ")
_LENGTH = struct.Struct("<Q")


def _strings(data: "np.ndarray[Any, Any]", start: int, count: int) -> tuple[list[bytes], int]:
    """So many strings from `start` on, and where they end."""
    view, strings = data.data, []
    for _ in range(count):
        first = start + _LENGTH.size
        (length,) = _LENGTH.unpack_from(view, start)
        start = first + length
        strings.append(bytes(view[first:start]))
    return strings, start


def _convert(gguf_file: Path, directory: Path) -> None:
    header = _Header.read(gguf_file)
    from transformers import AutoConfig, AutoTokenizer

    from penstock.engine.weights.matrices import take_quantized_experts
    from penstock.engine.weights.quantization import write_quantized

    folder, name = gguf_file.parent, gguf_file.name
    try:
        logger.info("Reading the tokenizer of %s", name)
        config = AutoConfig.from_pretrained(folder, gguf_file=name, local_files_only=True, trust_remote_code=False)
        config._name_or_path = ""
        tokenizer = AutoTokenizer.from_pretrained(
            folder,
            gguf_file=name,
            config=config,
            local_files_only=True,
            trust_remote_code=False,  # without it, transformers asks on the terminal
        )
        logger.info("Reading the weights of %s", name)
        converted = _convert_names(gguf_file, config, header) or _convert_values(gguf_file, config, header)
    except MemoryError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigurationError(f"{name} holds a {header.architecture!r} model that cannot be read: {error}") from error
    _split_digits(tokenizer.backend_tokenizer, header.pre_tokenizer)
    logger.info("Writing the weights of %s as safetensors", name)
    model, matrices = converted
    matrices |= take_quantized_experts(model, header.tensors)
    if matrices:
        write_quantized(directory, matrices)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _convert_values(gguf_file: Path, config: "PreTrainedConfig", header: "_Header") -> "_Converted":
    """By transformers, with all weights as plain numbers in memory, in which the file's matrices are then recognised."""
    from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

    from penstock.engine.weights.matrices import take_quantized_matrices

    with making_model:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent,
            gguf_file=gguf_file.name,
            config=config,
            local_files_only=True,
            quantization_config=GgufConfig(dequantize=True),
            dtype=header.dtype,
            output_loading_info=True,
        )
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):  # transformers fills these with random numbers
        raise ValueError(f"it lacks {len(missing)} of the model's weights: {', '.join(missing[:3])}")
    setattr(model, "hf_quantizer", None)  # noqa: B010  # save_pretrained goes by it, though the weights are plain now
    return model, take_quantized_matrices(model, header.tensors)


def _convert_names(gguf_file: Path, config: "PreTrainedConfig", header: "_Header") -> "_Converted | None":
    """By transformers, with one column of row numbers in place of each quantized matrix: nothing is dequantized, and rows that come out in
    another order are known by their numbers. Half of the time and memory of `_convert_values`.

    None where anything but whole rows of one matrix comes out, as where columns are cut or values change.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from penstock.engine.weights.matrices import numbered_rows, stored_rows
    from penstock.engine.weights.quantization import leave_out

    with making_model, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=header.dtype)  # type: ignore[no-untyped-call]
    try:
        with numbered_rows(header.tensors) as tensors:
            loaded = load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=model)["tensors"]  # type: ignore[no-untyped-call]
        layers = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Embedding)}
        numbers = {name: loaded.pop(name) for name in [name for name, tensor in loaded.items() if tensor.dtype == torch.float64]}
        if not layers.issuperset(numbers):
            return None
        found = _in_threads(lambda numbers_O1: stored_rows(numbers_O1, tensors), numbers.values())
        matrices = {name: weight for name, weight in zip(numbers, found, strict=True) if weight is not None}
        if len(matrices) < len(numbers):
            return None
        leave_out(model, matrices)
        plain = {name: tensor.to(header.dtype) for name, tensor in loaded.items()}
        plain |= {target: plain[source] for target, source in model.all_tied_weights_keys.items() if source in plain}
        missing = model.load_state_dict(plain, strict=False, assign=True)
    except (ConfigurationError, ValueError, LookupError, RuntimeError, TypeError) as error:
        logger.debug("%s is converted by its values: %s", gguf_file.name, error)
        return None
    return None if missing.unexpected_keys or missing.missing_keys else (model, matrices)


def _in_threads(function: "Callable[[torch.Tensor], _T]", tensors: "Iterable[torch.Tensor]") -> "list[_T]":
    """Several at a time: each takes many short operations, which torch does not divide among its own threads."""
    import torch

    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(default_num_threads(), initializer=torch.set_num_threads, initargs=(1,)) as threads:
            return list(threads.map(function, tensors))
    finally:
        torch.set_num_threads(num_threads)  # of threads that begin later as well


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
            reader = GGUFReader(str(gguf_file))
            names = ("general.architecture", "tokenizer.ggml.pre", "split.count")
            fields: list[Any] = [None if field is None else field.contents() for field in map(reader.get_field, names)]
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError) as error:
            raise ConfigurationError(f"{gguf_file} is not a GGUF file that can be read: {error}") from error
        architecture, pre_tokenizer, num_parts = fields
        if num_parts not in (None, 0, 1):
            raise ConfigurationError(f"{gguf_file.name} is one part of a split GGUF: merge the parts with llama.cpp's `gguf-split --merge`")
        _check_experts(gguf_file.name, reader.tensors)
        kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
        if kinds == {GGMLQuantizationType.F32}:
            dtype = torch.float32
        else:
            dtype = torch.float16 if kinds <= {GGMLQuantizationType.F16, GGMLQuantizationType.F32} else torch.bfloat16
        return cls(str(architecture), str(pre_tokenizer), dtype, reader.tensors)


def _check_experts(file_name: str, tensors: "list[gguf.ReaderTensor]") -> None:
    """Raises `ConfigurationError` where `ffn_gate_exps` and `ffn_up_exps` of a layer are not of one shape.

    transformers puts both into one tensor, which has the shape for them that comes first, and zeros for one that is missing.
    """
    shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in tensors}
    for name in filter(re.compile(r"blk\.\d+\.ffn_(gate|up)_exps\.weight").fullmatch, shapes):
        other = name.replace("ffn_gate", "ffn_up") if "ffn_gate" in name else name.replace("ffn_up", "ffn_gate")
        if other not in shapes:
            raise ConfigurationError(f"{file_name} has {name}, and {other} is missing")
        if shapes[other] != shapes[name]:
            raise ConfigurationError(f"{file_name}: {name} has the shape {shapes[name]}, and {other} has {shapes[other]}")
