# mypy: disable-error-code="import-untyped"
"""The benchmark of GPUs, where there is none: its arithmetic, its parts on a tiny model, and how it runs them."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import gpu, gpu_parts, gpu_server
from benchmarks.gpu import Part, run_part
from benchmarks.gpu_clock import Clock, measure_ceilings
from benchmarks.gpu_shapes import SHAPES, Shape, share
from benchmarks.gpu_table import table
from benchmarks.gpu_verdict import judged
from tests.gpu.fake_cuda import fake_cuda

LLAMA = SHAPES["llama-3.1-8b"]
MOE = SHAPES["qwen3-30b-a3b"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_shape_has_the_weights_of_the_model_that_is_built_from_it(shape: Shape) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(max_len=64))  # type: ignore[no-untyped-call]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    assert sum(matrix.numel() for matrix in matrices) == shape.num_weights


def test_shapes_are_as_large_as_their_names_say() -> None:
    sizes = {name: shape.num_weights / 1e9 for name, shape in SHAPES.items() if "tiny" not in name}
    assert sizes == pytest.approx({"llama-3.1-8b": 8.03, "qwen3-0.6b": 0.596, "qwen3-30b-a3b": 30.53}, rel=0.01)


def test_a_step_reads_each_weight_once_and_each_sequence_its_own_keys_and_values() -> None:
    embedding = LLAMA.vocab_size * LLAMA.hidden_size
    weights = 2 * (LLAMA.num_weights - embedding)
    assert LLAMA.decode_bytes(1, 0) == LLAMA.decode_bytes(64, 0) == weights
    one_token = 2 * 2 * 32 * 8 * 128  # keys and values, 2 bytes, layers, heads, head size
    assert LLAMA.decode_bytes(64, 1000) == weights + 64 * 1000 * one_token


def test_a_step_reads_the_experts_of_its_tokens_and_never_more_than_there_are() -> None:
    assert MOE.experts_touched(1) == pytest.approx(8)
    assert 15 < MOE.experts_touched(2) < 16
    assert MOE.experts_touched(10_000) == pytest.approx(128)
    active = 2 * (MOE.num_weights - 2 * MOE.head_weights - 48 * 120 * MOE.mlp_weights + MOE.head_weights)
    assert MOE.decode_bytes(1, 0) == pytest.approx(active)


def test_prefill_takes_two_operations_for_each_weight_and_token_and_attends_backwards_only() -> None:
    linear_weights = LLAMA.num_weights - 2 * LLAMA.head_weights
    linear = 2 * 3 * 100 * linear_weights
    attention = 3 * 4 * (100 * 101 / 2) * 32 * 128 * 32
    assert LLAMA.prefill_operations(3, 100) == pytest.approx(linear + attention + 3 * 2 * LLAMA.head_weights)


def test_a_step_at_the_bound_has_a_share_of_one() -> None:
    assert share(0.5, 0.5) == 1
    assert share(0.5, 1.0) == 0.5


def records() -> list[dict[str, Any]]:
    generate = {"kind": "generate", "model": "tiny", "batch": 2, "prompt_len": 5, "output_len": 10}
    return [
        {"kind": "ceilings", "model": "tiny", "bandwidth": 1e9, "matmul": 1e12},
        {"kind": "decode", "model": "tiny", "batch": 4, "context_len": 100.0, "step_s": 2e-3, "forward_s": 1e-3},
        *({"kind": "prefill", "model": "tiny", "prompts": 2, "prompt_len": 50, "budget": 32, "seconds": s} for s in (9.0, 0.5, 0.4)),
        *(generate | {"engine": "penstock", "seconds": seconds, "is_warm": True} for seconds in (1.0, 2.0, 3.0)),
        generate | {"engine": "transformers", "seconds": 8.0, "is_warm": False},
        {"kind": "kernel", "model": "tiny", "name": "write", "kernel_s": 1e-3, "reference_s": 5e-3, "rate": 7.0, "unit": "GB/s"},
        {"kind": "profile", "model": "tiny", "batch": 4, "kernels": [["matmul", 14.0, 3e-3]]},
        {"kind": "built", "model": "tiny", "engine": "penstock", "seconds": 3.0},
    ]


def test_times_become_rates_and_shares() -> None:
    ceilings, decode, prefill, ours, theirs, *_ = judged(records())
    assert ceilings["bandwidth"] == 1e9
    bound_s = SHAPES["tiny"].decode_bytes(4, 100) / 1e9
    assert decode["tokens_per_s"] == 2000
    assert decode["share_of_bandwidth"] == pytest.approx(bound_s / 2e-3)
    assert decode["forward_share_of_bandwidth"] == pytest.approx(bound_s / 1e-3)
    assert (prefill["seconds"], prefill["runs"], prefill["tokens_per_s"]) == (0.5, 3, 200)
    assert prefill["share_of_matmul"] == pytest.approx(SHAPES["tiny"].prefill_operations(2, 50) / 1e12 / 0.5)
    assert (ours["seconds"], ours["tokens_per_s"], ours["times_generate_batch"]) == (2.0, 10, 4)
    assert theirs["tokens_per_s"] == 2.5


def test_without_ceilings_there_are_rates_and_no_shares() -> None:
    found = judged(records()[1:])
    assert not any("share" in key for record in found for key in record)
    assert "-" in next(line for line in table(found) if line.startswith("tiny "))


def test_the_table_has_a_line_for_everything() -> None:
    text = "\n".join(table(judged(records())))
    for part in ("copy 1 GB/s", "ready after 3.0 s", "2,000", "200", "4.0x", "5.0x  7.0 GB/s", "14    3.000  matmul"):
        assert part in text


def test_a_clock_gives_the_median_and_leaves_the_warm_up_out() -> None:
    pauses = iter([0.05, 0.0, 0.0, 0.05, 0.0])
    assert Clock(torch.device("cpu")).median_s(lambda: time.sleep(next(pauses)), repeats=4, warmup=1) < 0.04


def test_ceilings_are_measured() -> None:
    found = measure_ceilings(Clock(torch.device("cpu")), copy_bytes=2**16, matmul_size=32)
    assert found.bandwidth > 0
    assert found.matmul > 0


def results(capsys: pytest.CaptureFixture[str], *arguments: str, device: str = "cpu") -> list[dict[str, Any]]:
    gpu_parts.main([*arguments, "--device", device])
    return [json.loads(line.removeprefix(gpu.MARK)) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("model", ["tiny", pytest.param("tiny-moe", marks=pytest.mark.thorough)])
def test_the_engine_is_measured_over_a_model_of_random_weights(capsys: pytest.CaptureFixture[str], model: str) -> None:
    found = judged(results(capsys, "penstock", "--model", model))
    assert [(record["kind"], record.get("batch")) for record in found] == [
        ("built", None),
        ("decode", 1),
        ("profile", 1),
        ("decode", 3),
        ("profile", 3),
        ("generate", 1),
        ("generate", 3),
        ("prefill", None),
    ]
    assert all(record["tokens_per_s"] > 0 for record in found if record["kind"] in ("decode", "generate", "prefill"))
    assert all(launches > 0 and seconds >= 0 for _, launches, seconds in found[2]["kernels"])
    assert found[1]["context_len"] > 20


@pytest.mark.thorough
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA of its own")
def test_steps_with_prompts_are_measured_in_graphs_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_cuda():
        in_graphs, without = found = judged(results(capsys, "mixed", "--model", "tiny", device="cuda"))
    assert (in_graphs["share_in_graphs"], in_graphs["share_with_prompts_in_graphs"]) == (1, 1)
    assert (without["share_in_graphs"], without["share_with_prompts_in_graphs"]) == (0, 0)
    assert all(0 < record["share_with_prompts"] < 1 and record["tokens_per_s"] > 0 for record in found)
    assert [line.split()[3] for line in table(found) if line.startswith("tiny ")] == ["yes", "no"]


@pytest.mark.parametrize(
    "chosen", [pytest.param(slice(None), id="every load", marks=pytest.mark.thorough), pytest.param(slice(1, None, 7), id="two loads")]
)
def test_the_server_is_measured_over_http_and_a_load_that_fails_takes_no_other_with_it(
    chosen: slice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, no_drafts, fast_cache = gpu_server.variants(True, (1, 2, 3), 8, 4, 40)
    assert (no_drafts.flags, fast_cache.flags) == (("--speculation", "none"), ("--kv-cache-dtype", "fp8"))
    loads = (gpu_server.Load("wrong", (3,), 2, {"temperature": -1}), *usual.loads[chosen])
    monkeypatch.setattr(gpu_server, "variants", lambda *_: [gpu_server.Variant("", (), loads)])
    with pytest.raises(RuntimeError, match="these loads failed: wrong"):
        results(capsys, "server", "--model", "tiny")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(gpu.MARK)]
    start, wrong, *found = judged(json.loads(line.removeprefix(gpu.MARK)) for line in lines)
    assert start["load"] == "start"
    assert "HTTP 400" in wrong["failed"]
    assert [record["load"] for record in found] == [
        "greedy, 1 stream",
        "greedy, 2 streams",
        "greedy, 3 streams",
        "one context of 40 among 1",
        "prompts beside decodes",
        "temperature, top-p, top-k",
        "repetition penalty",
        "5 log probabilities",
        "regex",
        "drafts that are all accepted",
    ][chosen]
    assert all(record["tokens_per_s"] > 0 and record["memory_bytes"] > 2**20 for record in found)
    assert all(0 < record["first_token_s"] <= record["slowest_first_token_s"] < record["seconds"] for record in found)
    assert len([line for line in table([start, wrong, *found]) if line.startswith("tiny ")]) == len(loads) + 1


def test_generate_batch_is_timed_from_its_first_start_to_its_last_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(inputs: list[list[int]], generation_config: Any, **_: Any) -> dict[str, Any]:
        tokens = [7] * generation_config.max_new_tokens
        return {str(n): SimpleNamespace(generated_tokens=tokens, lifespan=(10.0 + n, 13.0 + n)) for n in range(len(inputs))}

    model = SimpleNamespace(generate_batch=generate, set_attn_implementation=lambda name: None)
    monkeypatch.setattr(gpu_parts, "random_model", lambda shape, device: model)
    built, *found = results(capsys, "generate_batch", "--model", "tiny")
    assert "sdpa" in built["engine"]
    assert [(record["batch"], record["seconds"]) for record in found] == [(1, 3.0)] * 3 + [(3, 5.0)] * 3


def test_answers_of_generate_batch_that_are_cut_short_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(generate_batch=lambda **_: {}, set_attn_implementation=lambda name: None)
    monkeypatch.setattr(gpu_parts, "random_model", lambda shape, device: model)
    with pytest.raises(RuntimeError, match="not 1 times 4"):
        gpu_parts.main(["generate_batch", "--model", "tiny", "--device", "cpu"])


def script(body: str) -> Part:
    return Part("some part", [sys.executable, "-c", "import sys, time, json\n" + body], 60)


def test_a_part_that_hangs_is_ended_and_what_it_measured_counts() -> None:
    found: list[dict[str, Any]] = []
    outcome = run_part(script("print('noise'); print('RESULT {\"a\": 1}', flush=True); time.sleep(600)"), 1.5, found.append)
    assert outcome.status == "out of time"
    assert found == [{"a": 1}]


def test_a_part_that_fails_says_why_and_what_it_measured_counts() -> None:
    found: list[dict[str, Any]] = []
    outcome = run_part(script("print('RESULT {\"a\": 1}', flush=True); raise ValueError('no such thing')"), 60, found.append)
    assert outcome.status == "failed: ValueError: no such thing"
    assert found == [{"a": 1}]


def test_parts_run_until_the_time_is_up_and_all_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"print('RESULT ' + {json.dumps(record)!r})" for record in records()]
    chosen = [script("\n".join(lines)), script("time.sleep(600)"), script("")]
    monkeypatch.setattr(gpu, "parts", lambda models, device, kernels: chosen)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    written = tmp_path / "made" / "gpu.json"
    gpu.main(["--device", "cpu", "--limit-s", "2", "--json", str(written)])
    whole = json.loads(written.read_text())
    assert [part["status"] for part in whole["parts"]] == ["done", "out of time", "no time left"]
    assert not whole["is_complete"]
    assert whole["results"] == judged(records())
    assert "4.0x" in capsys.readouterr().out


def test_the_most_telling_parts_come_first() -> None:
    names = [part.name for part in gpu.parts(gpu.MODELS, "cuda")]
    first = ["ceilings", "server qwen3-0.6b", "penstock llama-3.1-8b", "mixed llama-3.1-8b", "generate_batch llama-3.1-8b", "kernels"]
    assert names[:6] == first
    assert len(names) == 10


def test_parts_can_be_chosen() -> None:
    chosen = gpu.parts(["tiny", "tiny-moe"], "cpu", ("mixed", "penstock"))
    assert [part.name for part in chosen] == ["penstock tiny", "mixed tiny", "penstock tiny-moe"]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees none here"):
        gpu.main([])
