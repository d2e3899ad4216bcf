"""The roofline: bounds by bytes and products, and every part of a step beside its own."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import roofline
from benchmarks.profile_step import Bench, Machine
from benchmarks.roofline import Limits, Part, line, main, prompt_lines, step_lines
from penstock.engine.model.fused import fuse_linears
from penstock.engine.native.runtime import find_compiler, native_library
from penstock.engine.weights.linear import quantize_linears
from tests.engines import core_over, loaded_model
from tests.tiny_models import tiny_model

LIMITS = Limits(threads=1, read_bytes=1000.0, byte_products=100.0, bfloat16_products=10.0)

needs_kernels = pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")


def test_a_bound_is_the_greater_of_bytes_and_products() -> None:
    def part(num_bytes: int, products: int, *, is_of_bytes: bool) -> Part:
        return Part("gate_up", num_bytes, products, lambda: None, is_of_bytes)

    by_bytes = line("gate_up", [part(1500, 50, is_of_bytes=True), part(500, 50, is_of_bytes=True)], 4.0, LIMITS)
    assert (by_bytes.calls, by_bytes.bound, by_bytes.bound_by, by_bytes.times_bound) == (2, 2.0, "bytes", 2.0)
    by_products = line("attention", [part(500, 50, is_of_bytes=False)], 10.0, LIMITS)
    assert (by_products.bound, by_products.bound_by, by_products.times_bound) == (5.0, "products", 2.0)


@needs_kernels
def test_a_step_is_taken_apart_by_kinds_of_layers() -> None:
    model = tiny_model("llama", head_dim=64, hidden_size=64).bfloat16()
    fuse_linears(model)
    quantize_linears(model, 4)
    core = core_over(loaded_model(model))
    bench = Bench(core, Machine(1e9, 1e9), time.perf_counter)
    decode, prompt = step_lines(bench, LIMITS, 3, 8, 4), prompt_lines(bench, LIMITS, 20)
    core.runner.shutdown()
    places = ["query_key_value Q4_1", "output Q4_1", "gate_up Q4_1", "down Q4_1"]
    assert [each.name for each in decode] == [*places, "attention", "head Q4_1", "rest", "step"]
    assert [each.name for each in prompt] == [*places, "bfloat16, 20 keys, 20 rows", "head Q4_1", "rest", "step"]
    num_layers = model.config.num_hidden_layers
    assert [each.calls for each in decode[:6]] == [num_layers] * 4 + [1, 1]
    assert [each.calls for each in prompt[:6]] == [num_layers] * 5 + [1]
    output = bench.decoder.form.layers[0].output
    assert decode[1].products == 3 * num_layers * output.inputs * output.outputs
    assert prompt[1].products == 20 * num_layers * output.inputs * output.outputs
    assert 3 * prompt[5].products == decode[5].products, "a prompt's last row alone has logits"
    assert decode[-1].num_bytes == sum(each.num_bytes for each in decode[:-1])
    assert decode[-1].seconds == pytest.approx(sum(each.seconds for each in decode[:-1]))


@needs_kernels
def test_attention_is_timed_over_long_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    limits, reads = replace(LIMITS, bfloat16_products=1e30), iter([1e9, 4e9, *[2e9] * 100])
    monkeypatch.setattr(roofline, "measured_limits", lambda num_threads: (limits, reads.__next__))
    monkeypatch.setattr(roofline, "READ_BYTES", 50_000)
    results = tmp_path / "roofline.json"
    monkeypatch.setattr(
        "sys.argv", ["roofline.py", *["contexts", "--contexts", "50", "--prompt", "20", "--threads", "1", "--json"], str(results)]
    )
    main()
    numbers = json.loads(results.read_text())["tables"]
    (decode,), (prompt,) = numbers["bfloat16, 50 keys, 1 row"], numbers["bfloat16, 50 keys, 20 rows"]
    assert decode["calls"] == 2, "of layers that no cache holds"
    assert decode["num_bytes"] == 2 * 2 * 64 * 2 * 64 * 2, "whole blocks"
    assert decode["products"] == 2 * 2 * 50 * 14 * 64
    (in_order,) = numbers["bfloat16, 50 keys, 1 row, blocks in order"]
    assert [in_order["bound"], decode["bound"]] == [in_order["num_bytes"] / 4e9, decode["num_bytes"] / 2e9], "by the fastest read beside it"
    assert [in_order["read_bytes"], decode["read_bytes"]] == [4e9, 2e9]
    assert prompt["products"] == 2 * 2 * sum(range(31, 51)) * 14 * 64
    assert "int8, 50 keys, 1 row" in capsys.readouterr().out


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
def test_limits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "READ_BYTES", 2**20)
    monkeypatch.setattr(roofline, "ROUNDS_OF_PRODUCTS", 1000)
    limits, measure_reading = roofline.measured_limits(1)
    assert min(limits.read_bytes, measure_reading()) > 0
    assert limits.bfloat16_products > 0
    assert torch.get_num_threads() >= 1
