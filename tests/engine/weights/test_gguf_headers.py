"""Headers of GGUF files, as untrusted input: what is wrong with one, and what is read from a sound one."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import modeling_gguf_pytorch_utils

from penstock.engine.errors import ConfigurationError
from penstock.engine.model.store import model_name
from penstock.engine.weights import gguf as conversion
from penstock.engine.weights.gguf import MAX_ELEMENTS, MAX_MODEL_NAME, BrokenHeader, check_gguf_header, convert_gguf, gguf_name
from tests.engine.weights.test_gguf import write_gguf

HUGE = 2**62
UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9
F32, Q8_0 = 0, 8


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dimensions: list[int], kind: int = F32, offset: int = 0, num_dimensions: int | None = None) -> bytes:
    count = len(dimensions) if num_dimensions is None else num_dimensions
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", count, *dimensions, kind, offset)


def header(fields: list[bytes], tensors: list[bytes], *, num_fields: int | None = None, num_tensors: int | None = None) -> bytes:
    counts = len(tensors) if num_tensors is None else num_tensors, len(fields) if num_fields is None else num_fields
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(fields) + b"".join(tensors)


SOUND = header([field("a.block_count", UINT32, struct.pack("<I", 1))], [tensor("w", [4, 2])]) + bytes(64)


def array(kind: int, number: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, number) + content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "too short"),
        (b"GGML" + SOUND[4:], "GGUF"),
        (SOUND.replace(struct.pack("<I", 3), struct.pack("<I", 9), 1), "version"),
        (header([], [], num_fields=HUGE) + bytes(16), "twice|would take"),
        (header([], [], num_tensors=HUGE) + bytes(64), "twice|would take"),
        (header([struct.pack("<Q", HUGE)], []), f"{HUGE} bytes"),
        (header([field("a", STRING, struct.pack("<Q", HUGE))], []), f"{HUGE} bytes"),
        (header([field("a", ARRAY, array(UINT8, HUGE))], []), "elements"),
        (header([field("a", ARRAY, array(STRING, MAX_ELEMENTS))], []) + bytes(1000), "a number at byte"),
        (header([field("a", ARRAY, array(ARRAY, 1, array(UINT8, 1)))], []), "unknown type 9"),
        (header([field("a", 77, b"")], []), "unknown type 77"),
        (header([field("a", UINT8, b"1")] * 2, []), "twice"),
        (header([], [tensor("w", [4])] * 2) + bytes(64), "twice"),
        (header([], [tensor("w", [], num_dimensions=2**31)]) + bytes(64), "dimensions"),
        (header([], [tensor("w", [2**32, 2**32])]) + bytes(64), "would end"),
        (header([], [tensor("w", [4], offset=HUGE)]) + bytes(64), "would end"),
        (header([], [tensor("w", [4], kind=999)]) + bytes(64), "unknown type 999"),
        (header([], [tensor("w", [33], kind=Q8_0)]) + bytes(64), "blocks of 32"),
        (header([field("general.alignment", UINT32, struct.pack("<I", 0))], []), "alignment"),
        (header([field("a.block_count", UINT32, struct.pack("<I", 2**31))], [tensor("w", [4])]) + bytes(64), "a.block_count"),
        (header([field("a.embedding_length", UINT32, struct.pack("<I", 2**31))], [tensor("w", [4])]) + bytes(64), "embedding_length"),
    ],
)
def test_a_broken_header_is_refused_with_what_is_wrong(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(BrokenHeader, match=said):
        check_gguf_header(path)
    with pytest.raises(ConfigurationError, match="is not a GGUF file that can be read"):
        convert_gguf(path, tmp_path / "out")


def test_a_sound_header_passes_in_either_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "sound.gguf"
    path.write_bytes(SOUND)
    check_gguf_header(path)
    swapped = b"GGUF" + struct.pack(">IQQ", 3, 1, 0) + struct.pack(">Q", 1) + b"w" + struct.pack(">IQQIQ", 2, 4, 2, F32, 0)
    path.write_bytes(swapped + bytes(96))
    check_gguf_header(path)
    path.write_bytes(swapped)
    with pytest.raises(BrokenHeader, match="would end"):
        check_gguf_header(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    check_gguf_header(path)
    return path


DAMAGES: dict[str, Callable[[bytes, int], bytes]] = {
    "cut": lambda content, place: content[:place],
    "flipped": lambda content, place: content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :],
    "grown": lambda content, place: content[:place] + b"\xff" * 8 + content[place + 8 :],
}


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(sorted(DAMAGES)), place=st.integers(0, 7999))
def test_whatever_byte_is_wrong_a_header_is_refused_or_read(whole: Path, tmp_path: Path, kind: str, place: int) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(DAMAGES[kind](whole.read_bytes(), place))
    assert len(refusal(path)) < 300
    assert len(gguf_name(path) or "") <= MAX_MODEL_NAME


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (
            [field("general.architecture", STRING, text("llama")), field("general.name", STRING, text("Tiny 1B Instruct"))],
            "Tiny 1B Instruct",
        ),
        (
            [field("a", ARRAY, array(STRING, 1, text("b"))), field("c", UINT32, bytes(4)), field("general.name", STRING, text(" Tiny "))],
            "Tiny",
        ),
        ([field("a", UINT32, bytes(4))], None),
        ([field("general.name", STRING, text(" "))], None),
        ([field("general.name", STRING, text("two\nlines"))], None),
        ([field("general.name", STRING, text("long" * 1000))], None),
        ([field("general.name", UINT32, bytes(4))], None),
        ([field("general.name", STRING, struct.pack("<Q", 2) + b"\xff\xfe")], None),
        ([field("general.name", STRING, struct.pack("<Q", HUGE))], None),
    ],
)
def test_a_model_is_called_what_its_file_calls_it(tmp_path: Path, fields: list[bytes], name: str | None) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(fields, []))
    assert gguf_name(path) == name
    assert model_name(str(path)) == (name or "model")


def refusal(path: Path) -> str:
    try:
        check_gguf_header(path)
    except BrokenHeader as error:
        return str(error)
    return ""


def parsed(field: gguf.ReaderField) -> list[Any]:
    """By transformers."""
    parse: Any = getattr(modeling_gguf_pytorch_utils, "_gguf_parse_value")  # noqa: B009
    return [parse(field.parts[index], field.types) for index in field.data]


def test_arrays_of_every_type_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    """All elements at a time, where the library makes an object for each."""
    path = tmp_path / "fields.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    arrays = {"texts": ["", "a", "\u00e9\u4e16"], "floats": [0.5, -1e30], "integers": [-1, 2**31 - 1, 0], "flags": [True, False]}
    for name, values in arrays.items():
        writer.add_key_value(name, values, gguf.GGUFValueType.ARRAY)
    for kind in (value for value in gguf.GGUFValueType if value.name.startswith(("INT", "UINT", "FLOAT"))):
        writer.add_key_value(f"of {kind.name}", [1, 0, 100], gguf.GGUFValueType.ARRAY, sub_type=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = {name: field for name, field in gguf.GGUFReader(path).fields.items() if not name.startswith("GGUF.")}
    with conversion._read_once():
        fields = gguf.GGUFReader(path).fields
        values = {name: parsed(fields[name]) for name in expected}
    assert len(expected) > 10
    for name, field in expected.items():
        assert fields[name].types == field.types, name
        assert values[name] == parsed(field), name


@pytest.mark.parametrize("name", ["general.architecture", "tokenizer.ggml.pre"])
def test_a_name_that_is_a_list_of_names_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "lists.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].pop(name, None)
    writer.add_key_value(name, ["llama", "qwen2"], gguf.GGUFValueType.ARRAY)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigurationError, match=r"lists\.gguf is not a GGUF file that can be read"):
        convert_gguf(path, tmp_path / "out")
