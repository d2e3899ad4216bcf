import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from penstock.engine.errors import ConfigurationError, StartFailed
from penstock.engine.model.loader import load_model
from penstock.engine.system.cache import MANIFEST, build_once
from penstock.engine.weights import gguf as conversion
from penstock.engine.weights.gguf import (
    convert_gguf,
    converted_gguf,
)
from penstock.engine.weights.matrices import NumberedTensor, read_blocks, stored_rows
from penstock.engine.weights.packed import PackedWeight, pack
from penstock.engine.weights.quantization import quantized_layers, quantized_names, read_quantized

WRITABLE_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # by the library that the tests write files with

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD = 32, 4, 2, 2, 64
EXPERT_SIZE = 768  # transformers takes no other from the file
LETTERS = sorted(bytes_to_unicode().values())  # type: ignore[no-untyped-call]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, "ĠĠ", "Ġ1"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def write_gguf(
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    merges: Sequence[str] = ("Ġ Ġ", "Ġ 1"),
    num_experts: int = 0,
) -> dict[str, np.ndarray]:
    """A tiny random model with a byte-level vocabulary; gives back its tensors by their GGUF names."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(TOKENS), HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
            f"blk.{layer}.attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_up": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, FEED_FORWARD),
        }
    if num_experts:
        writer.add_key_length(HIDDEN // HEADS)
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(1)
        shapes = {name: shape for name, shape in shapes.items() if "ffn" not in name}
        for layer in range(LAYERS):
            shapes |= {f"blk.{layer}.attn_{part}_norm": (HIDDEN // HEADS,) for part in "qk"}
            shapes |= {f"blk.{layer}.ffn_{part}_exps": (num_experts, EXPERT_SIZE, HIDDEN) for part in ("gate", "up")}
            shapes |= {f"blk.{layer}.ffn_down_exps": (num_experts, HIDDEN, EXPERT_SIZE), f"blk.{layer}.ffn_gate_inp": (num_experts, HIDDEN)}
    tensors = {f"{name}.weight": random.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    for name in ["output_norm", *(f"blk.{layer}.{part}_norm" for layer in range(LAYERS) for part in ("attn", "ffn"))]:
        tensors[f"{name}.weight"] = np.ones(HIDDEN, dtype=np.float32)
    for name, tensor in tensors.items():
        stored = kind if tensor.ndim > 1 and "gate_inp" not in name else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_converted_directory_holds_the_weights_of_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf")
    capfd.readouterr()
    directory = converted_gguf(tmp_path / "tiny.gguf")
    assert capfd.readouterr().err == ""  # progress bars are for terminals
    weights = load_file(directory / "model.safetensors")
    assert weights["model.embed_tokens.weight"].dtype == torch.float32
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"].numpy(), tensors["token_embd.weight"])
    np.testing.assert_array_equal(weights["model.layers.1.mlp.down_proj.weight"].numpy(), tensors["blk.1.ffn_down.weight"])
    config = AutoConfig.from_pretrained(directory)
    assert (config.model_type, config.num_hidden_layers, config.num_key_value_heads) == ("llama", LAYERS, KV_HEADS)
    assert (directory / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_a_conversion_reads_the_file_once_and_leaves_the_library_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    class Reader(gguf.GGUFReader):
        def __init__(self, path: str) -> None:
            read.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    write_gguf(tmp_path / "tiny.gguf")
    converted_gguf(tmp_path / "tiny.gguf")
    assert read == [str(tmp_path / "tiny.gguf")]
    assert gguf.GGUFReader is Reader


def test_what_is_built_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "built"
    synced: list[tuple[int, bool]] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append((os.fstat(descriptor).st_ino, target.exists())))

    def build(directory: Path) -> None:
        (directory / "part").mkdir()
        (directory / "part" / "weights").write_bytes(b"1")

    build_once(target, build)
    before = {inode for inode, is_named in synced if not is_named}
    assert before == {path.stat().st_ino for path in (target, *target.rglob("*"))}
    assert {path.name for path in target.rglob("*")} == {"part", "weights", MANIFEST}
    assert synced[-1] == (tmp_path.stat().st_ino, True)


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Files may have 16 KiB: beyond that the system refuses to write, as it does where the disk is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_takes_no_more_is_one_line_and_leaves_nothing_behind(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    request.getfixturevalue("full_disk")
    with pytest.raises(ConfigurationError, match=r"cannot write the model cache .*tiny-.*os error.*; set PENSTOCK_CACHE"):
        converted_gguf(tmp_path / "tiny.gguf")
    assert [entry.name for entry in (tmp_path / "cache" / "models").iterdir() if entry.is_dir()] == []


def test_only_what_the_disk_refuses_is_the_operators_concern(tmp_path: Path) -> None:
    def fail(error: Exception) -> Callable[[Path], None]:
        def build(directory: Path) -> None:
            raise error

        return build

    for error in (OSError(28, "No space left on device"), Exception("No space left on device (os error 28)")):  # Python's, tokenizers'
        with pytest.raises(StartFailed, match="No space left on device"):
            build_once(tmp_path / "built", fail(error))
    with pytest.raises(ConfigurationError) as caught:
        build_once(tmp_path / "built", fail(PermissionError(13, "Permission denied")))
    assert type(caught.value) is ConfigurationError, "another start would not help"
    with pytest.raises(ZeroDivisionError):
        build_once(tmp_path / "built", fail(ZeroDivisionError()))


def test_a_conversion_says_what_it_does_and_that_it_happens_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    for num_lines in (4, 0):
        caplog.clear()
        with caplog.at_level("INFO", conversion.__name__):
            converted_gguf(tmp_path / "tiny.gguf")
        assert len(caplog.messages) == num_lines
        assert num_lines == 0 or "this happens once" in caplog.messages[0]


def test_tied_embeddings_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    directory = converted_gguf(tmp_path / "tiny.gguf")
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_plain_weights_keep_their_type(tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F16)
    directory = converted_gguf(tmp_path / "tiny.gguf")
    assert quantized_names(directory) == []
    weight = load_file(directory / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(weight, torch.from_numpy(tensors["blk.0.ffn_up.weight"]).half())


@pytest.mark.parametrize("name", WRITABLE_TYPES)
def test_matrices_of_few_bits_stay_what_they_are_in_the_file(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    write_gguf(tmp_path / "tiny.gguf", kind)
    directory = converted_gguf(tmp_path / "tiny.gguf")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    weights = dict(read_quantized(directory, torch.device("cpu")))
    assert len(weights) == 1 + 7 * LAYERS
    assert all("norm" in left for left in load_file(directory / "model.safetensors"))
    for ours, theirs in {"model.embed_tokens": "token_embd", "model.layers.1.mlp.down_proj": "blk.1.ffn_down"}.items():
        found = weights[f"{ours}.weight"]
        assert isinstance(found.packed, PackedWeight)
        assert (found.packed.type_name, found.source) == (name, name)
        assert torch.equal(found.packed.blocks, pack(read_blocks(stored[f"{theirs}.weight"])).blocks)
    # Of queries and keys, conversion puts the rows of a head in another order.
    expected = read_blocks(stored["blk.0.attn_k.weight"])
    rows = torch.arange(HIDDEN // HEADS * KV_HEADS).view(KV_HEADS, -1, 2).transpose(1, 2).flatten()
    keys = weights["model.layers.0.self_attn.k_proj.weight"].packed
    assert isinstance(keys, PackedWeight)
    assert torch.equal(keys.unpacked().codes_OI, expected.codes_OI[rows])


def test_rows_known_by_their_numbers_are_those_known_by_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_0)
    ways = ("_convert_names", "_convert_values")
    for left, unused in zip(ways, reversed(ways), strict=True):
        (tmp_path / left).mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(conversion, unused, lambda *_: None)
            convert_gguf(tmp_path / "tiny.gguf", tmp_path / left)
    by_names, by_values = ({name: weight.packed for name, weight in read_quantized(tmp_path / way, torch.device("cpu"))} for way in ways)
    assert by_names.keys() == by_values.keys()
    assert all(torch.equal(packed.get_buffer("blocks"), by_values[name].get_buffer("blocks")) for name, packed in by_names.items())
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / ways[0] / name).read_bytes() == (tmp_path / ways[1] / name).read_bytes()


@pytest.mark.parametrize("numbers", [[[4.0], [5.0], [6.0]], [[8.0], [9.0], [9.0]], [[9.0], [10.0], [8.5]], [[8.0, 9.0, 10.0]]])
def test_rows_that_are_not_one_whole_matrix_are_not_taken_for_one(tmp_path: Path, numbers: list[list[float]]) -> None:
    matrix = SimpleNamespace(data=np.zeros((3, 18)))
    tensors: list[Any] = [NumberedTensor(matrix, first) for first in (5, 8, 11)]  # type: ignore[arg-type]
    assert stored_rows(torch.tensor(numbers, dtype=torch.float64), tensors) is None


@pytest.mark.parametrize("name", WRITABLE_TYPES)
def test_a_model_of_few_bits_computes_what_transformers_makes_of_the_file(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[name])
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    loaded = load_model(converted_gguf(tmp_path / "tiny.gguf"), "float32", "cpu", quantization="none", attn_implementation="eager")
    token_ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(token_ids).logits, expected(token_ids).logits, rtol=1e-4, atol=1e-4)


def test_experts_of_few_bits_stay_what_they_are_in_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_0, "qwen3moe", num_experts=2)
    directory = converted_gguf(tmp_path / "tiny.gguf")
    assert not any("experts" in name for name in load_file(directory / "model.safetensors"))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    whole = read_blocks(SimpleNamespace(data=stored["blk.1.ffn_up_exps.weight"].data[1], tensor_type=gguf.GGMLQuantizationType.Q4_0))  # type: ignore[arg-type]
    weights = dict(read_quantized(directory, torch.device("cpu")))
    found = weights["model.layers.1.mlp.experts.1.up_proj.weight"].packed
    assert isinstance(found, PackedWeight)
    assert torch.equal(found.blocks, pack(whole).blocks)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    token_ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected_TV = expected(token_ids).logits[0]
        exact_TV = load_model(directory, "float32", "cpu", quantization="none", attn_implementation="eager").model(token_ids).logits[0]
        served = load_model(directory, "float32", "cpu", attn_implementation="eager").model
        served_TV = served(token_ids).logits[0]
    torch.testing.assert_close(exact_TV, expected_TV, rtol=0, atol=5e-3)  # the router's weights are kept in bfloat16
    assert quantized_layers(served)["Q4_0"] >= LAYERS * 2 * 3
    assert float(((served_TV - expected_TV).norm(dim=-1) / expected_TV.norm(dim=-1)).median()) < 0.05


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("ffn_up", None, r"lacks 1 of the model's weights: model\.layers\.0\.mlp\.up_proj\.weight"),
        ("ffn_up_exps", None, r"has blk\.0\.ffn_gate_exps\.weight, and blk\.0\.ffn_up_exps\.weight is missing"),
        ("ffn_gate_exps", (2, 256, HIDDEN), r"ffn_gate_exps\.weight has the shape \(32, 256, 2\), and blk\.0\.ffn_up_exps\.weight has"),
        ("ffn_down_exps", None, r"lacks 1 of the model's weights: model\.layers\.0\.mlp\.experts\.down_proj"),
    ],
)
def test_weights_that_are_missing_or_do_not_fit_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, ...] | None, said: str
) -> None:
    add_tensor = gguf.GGUFWriter.add_tensor

    def change(writer: gguf.GGUFWriter, own: str, tensor: np.ndarray, raw_dtype: gguf.GGMLQuantizationType) -> None:
        if own == f"blk.0.{name}.weight":
            if shape is None:
                return
            tensor = gguf.quantize(np.ones(shape, dtype=np.float32), raw_dtype)
        add_tensor(writer, own, tensor, raw_dtype=raw_dtype)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", change)
    num_experts = 2 * name.endswith("exps")
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_0, "qwen3moe" if num_experts else "llama", num_experts=num_experts)
    with pytest.raises(ConfigurationError, match=said):
        converted_gguf(tmp_path / "tiny.gguf")
    assert not list((tmp_path / "cache" / "models").glob("tiny-*"))


def test_each_digit_is_a_token_where_the_file_says_so(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    tokenizer = Tokenizer.from_file(str(converted_gguf(tmp_path / "tiny.gguf") / "tokenizer.json"))
    assert tokenizer.encode("a  11").tokens == ["a", "ĠĠ", "1", "1"]
    assert tokenizer.encode("<|im_end|>").ids == [2]


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    first = converted_gguf(path)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert converted_gguf(path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    write_gguf(path, gguf.GGMLQuantizationType.F16)
    assert converted_gguf(path) != first


def test_what_is_no_gguf_is_refused_by_name_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model at all" * 10)
    with pytest.raises(ConfigurationError, match=r"broken\.gguf is not a GGUF file"):
        converted_gguf(path)
    assert not [entry for entry in (tmp_path / "cache" / "models").iterdir() if entry.is_dir()]


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ConfigurationError, match=r"tiny\.gguf"):
        convert_gguf(path, tmp_path)


def test_code_that_other_files_of_the_directory_name_is_not_asked_about(tmp_path: Path, asked: list[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    own = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({"auto_map": own, "tokenizer_class": "Own", "model_type": "own"}), encoding="utf-8")
    (tmp_path / "own.py").write_text("open('marker', 'w')\n", encoding="utf-8")
    with suppress(ConfigurationError):
        converted_gguf(tmp_path / "tiny.gguf")
    assert asked == []


def test_a_tokenizer_that_cannot_be_is_refused_by_the_files_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", merges=["Ġ nowhere"])
    with pytest.raises(ConfigurationError, match=r"tiny\.gguf holds a 'llama' model that cannot be read: .*nowhere"):
        converted_gguf(tmp_path / "tiny.gguf")


def test_a_field_that_transformers_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.GGUFWriter, "add_context_length", lambda writer, value: writer.add_string("llama.context_length", "long"))
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigurationError, match=r"tiny\.gguf holds a 'llama' model that cannot be read: .*max_position_embeddings"):
        converted_gguf(tmp_path / "tiny.gguf")


def test_an_architecture_that_transformers_cannot_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    write_gguf(path, architecture="rwkv6")
    with pytest.raises(ConfigurationError, match="rwkv6"):
        convert_gguf(path, tmp_path)


def test_an_architecture_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    write_gguf(path, architecture="rwkv6")
    path.write_bytes(path.read_bytes().replace(b"rwkv6", b"\xffwkv6", 1))
    with pytest.raises(ConfigurationError, match=r"odd\.gguf is not a GGUF file"):
        convert_gguf(path, tmp_path)


def test_one_of_several_builders_builds_and_none_sees_half_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "models" / "one"
    builds: list[Path] = []
    seen: list[set[str]] = []

    def build(scratch: Path) -> None:
        builds.append(scratch)
        (scratch / "first").write_text("1")
        time.sleep(0.05)
        (scratch / "second").write_text("2")

    def run() -> None:
        seen.append({entry.name for entry in build_once(directory, build).iterdir()})

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert seen == [{"first", "second", MANIFEST}] * 8
    assert not builds[0].exists()


def test_a_build_that_fails_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "models" / "one"

    def fail(scratch: Path) -> None:
        (scratch / "half").write_text("")
        raise ConfigurationError("no")

    with pytest.raises(ConfigurationError, match="no"):
        build_once(directory, fail)
    assert not [entry for entry in directory.parent.iterdir() if entry.is_dir()]
    assert build_once(directory, lambda scratch: None).is_dir()


def test_what_a_killed_build_left_is_cleared_away(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "models" / "one"
    abandoned = directory.parent / ".one.killed"
    abandoned.mkdir(parents=True)
    (abandoned / "half").write_text("")
    build_once(directory, lambda scratch: None)
    assert not abandoned.exists()


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="PENSTOCK_CACHE"):
        build_once(tmp_path / "file" / "models" / "one", lambda scratch: None)


def test_default_model_directory_is_whole(default_model_dir: Path) -> None:
    config = json.loads((default_model_dir / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["dtype"]) == ("llama", 30, "bfloat16")
    assert "<|im_start|>" in (default_model_dir / "chat_template.jinja").read_text()
    weights = dict(read_quantized(default_model_dir, torch.device("meta")))
    assert weights.pop("model.embed_tokens.weight").packed.type_name == "Q8_0"
    assert {weight.packed.type_name for weight in weights.values()} == {"Q4_1"}
    assert len(weights) == 7 * 30
