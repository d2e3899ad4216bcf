"""Nothing that a request, a model's files or another process brings is run as code."""

import ast
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.build import image_processor
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.loader import load_model
from penstock.engine.text.tokenizer import Tokenizer
from tests.llm.model_directory import write_model
from tests.tiny_multimodal import write_multimodal_model

ROOT = Path(__file__).parents[3]
PRODUCT = [
    path for folder in ("api", "cli", "engine", "llm", "plugins", "serving") for path in sorted((ROOT / folder).rglob("*.py"))
] + sorted(ROOT.glob("*.py"))
# What these take from `pickle`: jobs for the server's own child processes, which answer in MessagePack, and the name of an exception.
PICKLE_USERS = {
    "engine/system/sandbox.py": {"dumps", "loads"},
    "engine/multimodal/vectors.py": {"UnpicklingError"},
    "engine/weights/openai_whisper.py": {"UnpicklingError"},
}
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "yaml.load", "yaml.full_load", "yaml.unsafe_load"}
WORDS = re.compile(r"\b(pickle|torch\.load|yaml|{})\b|(?<!\.)\b({})\(".format("|".join(UNSAFE_MODULES), "|".join(UNSAFE_CALLS)))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def dotted(node: ast.expr) -> str:
    """`name`, or `name.attribute`; empty for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_no_module_reads_a_format_that_can_hold_code() -> None:
    assert len(PRODUCT) > 150
    for path in PRODUCT:
        name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if not WORDS.search(source):
            continue
        tree = ast.parse(source)
        modules = set(imported(tree))
        assert not modules & UNSAFE_MODULES, name
        assert "pickle" not in modules or name in PICKLE_USERS, name
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and dotted(node).startswith("pickle."):
                assert node.attr in PICKLE_USERS[name], f"{name}:{node.lineno}"
            elif isinstance(node, ast.Call):
                assert dotted(node.func) not in UNSAFE_CALLS, f"{name}:{node.lineno}"
                assert dotted(node.func) != "torch.load" or "weights_only=True" in ast.unparse(node), f"{name}:{node.lineno}"


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "consolidated.00.pth"])
def test_a_model_of_pickled_weights_is_refused_and_nothing_of_it_runs(tmp_path: Path, name: str) -> None:
    directory, marker = write_model(tmp_path / "model"), tmp_path / "marker"
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(pickle.dumps({"weight": Planted(marker)}))
    with pytest.raises(ConfigurationError):
        load_model(directory)
    assert not marker.exists()


def planted(directory: Path, file: str, **fields: Any) -> Path:
    """Names code beside the model in one of its JSON files; returns the file that this code would make."""
    marker = directory / "marker"
    (directory / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: ...\n")
    path = directory / file
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | fields))
    return marker


def test_code_beside_the_config_of_a_known_model_is_not_run(tmp_path: Path, asked: list[str]) -> None:
    directory = write_model(tmp_path / "model")
    own = {name: f"own.{name}" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}
    markers = [planted(directory, name, auto_map=own) for name in ("config.json", "tokenizer_config.json", "generation_config.json")]
    load_model(directory)
    Tokenizer.load(directory)
    assert not any(marker.exists() for marker in markers)
    assert asked == []


def test_a_tokenizer_that_is_code_is_refused(tmp_path: Path, asked: list[str]) -> None:
    directory = write_model(tmp_path / "model")
    (directory / "tokenizer.json").unlink()
    marker = planted(directory, "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own")
    with pytest.raises(ConfigurationError, match="no tokenizer that can be loaded"):
        Tokenizer.load(directory)
    assert not marker.exists()
    assert asked == []


def test_an_image_processor_that_is_code_is_refused(tmp_path: Path, asked: list[str]) -> None:
    """Also with `--trust-remote-code`, as only those that transformers has are known to work."""
    directory = write_multimodal_model(tmp_path / "model", "qwen2_5_vl")
    planted(directory, "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", "own.Own"]}, tokenizer_class="Own")
    assert image_processor(directory, EngineConfig()) is not None, "tokenizer.json is taken"
    own = {"AutoImageProcessor": "own.Own"}
    marker = planted(directory, "preprocessor_config.json", auto_map=own, image_processor_type="Own")
    for trust_remote_code in (False, True):
        with pytest.raises(ConfigurationError, match="its image processor cannot be loaded"):
            image_processor(directory, EngineConfig(trust_remote_code=trust_remote_code))
    assert not marker.exists()
    assert asked == []


def test_a_header_that_claims_more_than_the_file_is_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    weights = directory / "model.safetensors"
    content = weights.read_bytes()
    for header in ((2**60).to_bytes(8, "little"), (len(content) * 2).to_bytes(8, "little"), b"\0" * 8):
        weights.write_bytes(header + content[8:])
        with pytest.raises(ConfigurationError):
            load_model(directory)
