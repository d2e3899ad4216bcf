from pathlib import Path

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.plain_model import main
from penstock.engine.weights.gguf import convert_gguf
from penstock.engine.weights.quantization import read_quantized
from tests.engine.weights.test_gguf import write_gguf


def test_others_read_what_the_codes_stand_for(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_1)
    source, target = tmp_path / "tiny", tmp_path / "plain"
    source.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", source)
    assert main([str(target), "--model", str(source), "--dtype", "float32"]) == 0
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for name, stored in read_quantized(source, torch.device("cpu")):
        assert torch.equal(model.get_parameter(name), stored.packed.dequantized())
    assert AutoTokenizer.from_pretrained(target).chat_template == AutoTokenizer.from_pretrained(source).chat_template
    assert not list(target.glob("quantized*"))
