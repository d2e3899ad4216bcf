"""The engine and the server on a GPU, shown on a fake one: devices of all operands, graphs, waits for the device, and what is said."""

import asyncio
import functools
import itertools
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from penstock.cli.flags import parse_arguments
from penstock.engine.attention.interface import NUM_HEADER_FIELDS, AttentionMetadata
from penstock.engine.build import build_core, core_over_blocks, release
from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.block_files import weights_digest
from penstock.engine.kv_cache.tensors import block_bytes
from penstock.engine.loop import Engine
from penstock.engine.model.loader import CUDA_SHARE, LoadedModel
from penstock.engine.model.loader import load_model as load_generation_model
from penstock.engine.pooling.loader import build_pooling_engine, load_pooling_model, try_largest_batch
from penstock.engine.pooling.model import PoolingInput, PoolingModel, PoolingTask
from penstock.engine.request import Request
from penstock.engine.sampling.params import BeamSearchParams
from penstock.engine.sampling.rows import SamplingState
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.scheduling.admission import WaitingQueue
from penstock.plugins.manager import Plugins
from penstock.plugins.reasoning.formats import FORMATS
from penstock.server import ENGINE_FAILED, bind, listen, load_model, run
from tests import encoders
from tests.api.pooling.server import Reference
from tests.engine.kernels.device_choice_case import choose
from tests.engine.weights.test_quantization import STORED, save_stored
from tests.engines import Recorder, loaded_model
from tests.fakes import beam_request, byte_tokenizer, make_request, tokens
from tests.gpu.fake_cuda import DEVICE, FREE_MEMORY, FakeCuda, fake_cuda
from tests.matchers import Grammar, Walk
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA of its own")

PROMPT = list(range(3, 50))
CHUNK = 32  # tokens in a step: the prompt takes two
NUM_BLOCKS = 64
NUM_TOKENS = 6
NUM_STEPS = NUM_TOKENS + 1
RESULTS = ("results", "system/memory wait")  # where waiting costs nothing: the thread that launches steps goes on


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as device:
        yield device


@functools.cache
def load(name: str, device: torch.device = DEVICE, max_model_len: int = 128) -> LoadedModel:
    return loaded_model(torch.nn.Module.to(tiny_model(name), device), max_model_len)


def make_core(name: str, device: torch.device, **settings: Any) -> EngineCore:
    """As `build_core` makes it, with graphs where the device has any, but for its trials of steps."""
    loaded = load(name, device)
    config = engine_config(**{"max_num_seqs": 2} | settings)  # fewer than elsewhere: each graph takes time
    core = core_over_blocks(loaded, byte_tokenizer(), config, NUM_BLOCKS)
    core.runner.capture_graphs()
    return core


def engine_config(**settings: Any) -> EngineConfig:
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": CHUNK, "num_threads": 1}
    return EngineConfig(**(options | settings))


def serve(core: EngineCore, requests: list[Request]) -> list[list[SequenceDelta]]:
    """Their deltas, from the engine as the server runs it: steps follow each other without a gap where they can."""

    async def run() -> list[list[SequenceDelta]]:
        engine = Engine(core)
        await engine.start()

        async def one(request: Request) -> list[SequenceDelta]:
            return [delta async for delta in engine.generate(request)]

        deltas = await asyncio.gather(*map(one, requests))
        engine.check_integrity()
        await engine.stop()
        return deltas

    return asyncio.run(run())


def make(request_id: str = "r", prompt: list[int] = PROMPT, **params: Any) -> Request:
    if "beam" in params:
        return beam_request(request_id, prompt, params["beam"])
    outputs = params.pop("outputs", ())
    return replace(make_request(request_id, prompt, **({"max_tokens": NUM_TOKENS, "ignore_eos": True} | params)), outputs=outputs)


def test_the_fake_device_refuses_operands_of_two_devices(cuda: FakeCuda) -> None:
    on_gpu = torch.ones(3, device=DEVICE)
    assert (on_gpu + 1).tolist() == [2.0, 2.0, 2.0]
    assert (on_gpu * torch.tensor(2.0)).device == DEVICE  # a number may come from anywhere
    with pytest.raises(RuntimeError, match="on the same device"):
        _ = on_gpu + torch.ones(3)


@pytest.mark.parametrize(
    ("work", "waits"),
    [
        (lambda gpu, cpu: gpu + 1, 0),
        (lambda gpu, cpu: gpu[1:].clone(), 0),
        (lambda gpu, cpu: cpu.pin_memory().to(DEVICE, non_blocking=True), 0),
        (lambda gpu, cpu: cpu.pin_memory().to(DEVICE), 1),
        (lambda gpu, cpu: cpu.to(DEVICE, non_blocking=True), 1),
        (lambda gpu, cpu: torch.tensor([1, 2], device=DEVICE), 1),
        (lambda gpu, cpu: gpu.sum().item(), 1),
        (lambda gpu, cpu: bool(gpu.any()), 1),
        (lambda gpu, cpu: gpu.tolist(), 1),
        (lambda gpu, cpu: gpu.nonzero(), 1),
        (lambda gpu, cpu: gpu[gpu > 0], 1),
        (lambda gpu, cpu: gpu[[0, 2]], 1),
        (lambda gpu, cpu: gpu.__setitem__(0, 5.0), 1),
        (lambda gpu, cpu: gpu.repeat_interleave(gpu.long()), 1),
        (lambda gpu, cpu: gpu.repeat_interleave(gpu.long(), output_size=3), 0),
    ],
)
def test_the_fake_device_sees_what_waits_for_it_and_captures_none_of_that(
    cuda: FakeCuda, work: Callable[[torch.Tensor, torch.Tensor], object], waits: int
) -> None:
    on_gpu, on_cpu = torch.ones(3, device=DEVICE), torch.ones(3)
    cuda.clear()
    with torch.inference_mode():
        work(on_gpu, on_cpu)
        assert sum(cuda.waits.values()) == waits
        graph: Any = torch.cuda.CUDAGraph()
        refused = pytest.raises(RuntimeError, match="stream is capturing") if waits else nullcontext()
        with refused, torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local"):
            work(on_gpu, on_cpu)


def test_a_copy_from_the_fake_device_is_there_once_it_was_waited_for(cuda: FakeCuda) -> None:
    host = torch.zeros(3, pin_memory=True)
    host.copy_(torch.ones(3, device=DEVICE), non_blocking=True)
    assert host.tolist() == [0.0, 0.0, 0.0]
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.synchronize()
    assert host.tolist() == [1.0, 1.0, 1.0]


@pytest.fixture
def said_on_cpu(name: str) -> list[list[int]]:
    requests = [make("long"), make("short", [9, 8, 7])]
    return [tokens(deltas) for deltas in serve(make_core(name, torch.device("cpu"), compile="off", speculation="none"), requests)]


# Forms of attention, of experts and of norms; the others run the same kernels.
USUAL = ("llama", "gemma2", "gpt_oss", "deepseek_v3")
ARCHITECTURES_APART = [pytest.param(name, marks=[pytest.mark.thorough] * (name not in USUAL)) for name in ARCHITECTURES]


@pytest.mark.parametrize("name", ARCHITECTURES_APART)
def test_every_architecture_says_the_same_as_on_the_cpu_and_waits_for_results_alone(
    said_on_cpu: list[list[int]], cuda: FakeCuda, name: str
) -> None:
    core = make_core(name, DEVICE, speculation="none")
    cuda.clear()
    deltas = serve(core, [make("long"), make("short", [9, 8, 7])])
    assert [tokens(each) for each in deltas] == said_on_cpu
    num_steps = core.stats().num_steps
    assert cuda.waits == {RESULTS: num_steps}, cuda.lines
    assert cuda.num_replays == num_steps, "every step runs as a graph"


AHEAD = {RESULTS: NUM_STEPS}  # the next step is launched before the tokens of this one are known
# One wait for each token; the first step has only a part of the prompt, and samples nothing.
SAMPLED = {RESULTS: 1, ("model", "sampling/sampler _sample_pass"): NUM_TOKENS}
KINDS: dict[str, tuple[dict[str, Any], dict[tuple[str, str], int]]] = {
    "greedy": ({}, AHEAD),
    "temperature": ({"temperature": 0.7, "top_p": 0.9, "min_p": 0.1}, AHEAD),
    "top_k": ({"temperature": 1.0, "top_k": 20, "seed": 3}, AHEAD),
    "logit_bias": ({"logit_bias": {40: 1.0, 50: -2.0}}, AHEAD),
    "allowed_token_ids": ({"allowed_token_ids": [5, 6, 7]}, AHEAD),
    "min_tokens": ({"min_tokens": 5, "ignore_eos": False}, AHEAD),
    "n": ({"n": 2, "temperature": 1.0}, AHEAD),
    "penalties": ({"presence_penalty": 0.5, "repetition_penalty": 1.2}, AHEAD),
    "bad_words": ({"bad_words": ["ab"]}, AHEAD),
    "logprobs": ({"logprobs": 3}, AHEAD),
    "prompt_logprobs": ({"prompt_logprobs": 2}, AHEAD),
    "grammar": ({"grammar": Grammar(lambda: Walk(1, forces=False))}, AHEAD),
    "quick_grammar": ({"grammar": Grammar(lambda: Walk(1, forces=False), has_quick_masks=True)}, AHEAD),
    "logits_processor": ({"logits_processors": [Recorder]}, SAMPLED),
    "beams": (
        {"beam": BeamSearchParams(beam_width=2, max_tokens=NUM_TOKENS)},
        SAMPLED | {("model", "sampling/logprobs read_columns"): NUM_TOKENS},
    ),
    "outputs": ({"outputs": ("logits",)}, {RESULTS: NUM_STEPS, ("model", "runner _output_rows"): NUM_TOKENS}),
    "drafts": ({"logit_bias": {40: 100.0}, "prompt": [40] * len(PROMPT)}, {RESULTS: 3}),
}


# Which `test_kinds_of_choices_that_the_device_makes` asks for in one batch.
CHOICES = ("top_k", "logit_bias", "allowed_token_ids", "min_tokens", "penalties", "bad_words", "prompt_logprobs", "quick_grammar")


def test_kinds_of_choices_that_the_device_makes_wait_for_results_alone(cuda: FakeCuda) -> None:
    core = make_core("llama", DEVICE, speculation="none", max_num_seqs=len(CHOICES))
    cuda.clear()
    for deltas in serve(core, [make(kind, [7, 8, 9], **KINDS[kind][0]) for kind in CHOICES]):
        assert deltas[-1].error is None
    assert cuda.waits == {RESULTS: core.stats().num_steps}, cuda.lines


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.thorough] * (kind in CHOICES)) for kind in KINDS])
def test_every_kind_of_request_waits_for_the_device_where_it_has_to_and_nowhere_else(cuda: FakeCuda, kind: str) -> None:
    params, allowed = KINDS[kind]
    core = make_core("llama", DEVICE, speculation="ngram" if kind == "drafts" else "none")
    cuda.clear()
    (deltas,) = serve(core, [make(**params)])
    assert deltas[-1].error is None
    assert cuda.waits == allowed, cuda.lines


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "fp8"}])
def test_no_step_waits_for_blocks_that_are_written_to_disk_or_read_from_there(
    cuda: FakeCuda, tmp_path: Path, settings: dict[str, Any]
) -> None:
    said, num_cached = [], []
    for _ in range(2):
        core = make_core("gemma2", DEVICE, speculation="none", kv_cache_dir=str(tmp_path), **settings)
        cuda.clear()
        (deltas,) = serve(core, [make()])
        said.append(tokens(deltas))
        assert deltas[0].prompt is not None
        num_cached.append(deltas[0].prompt.num_cached_tokens)
        of_steps = {place: count for place, count in cuda.waits.items() if place[0] != "kv-writer"}
        assert of_steps == {RESULTS: core.stats().num_steps}, cuda.lines
        counted = core.stats().persistence
        assert counted is not None
        assert (counted.files.num_written, counted.num_hits > 0) == ((3 * 3, False) if len(said) == 1 else (0, True))
    assert said[0] == said[1]
    assert num_cached == [0, 32]


def test_weights_have_the_same_digest_on_either_device(cuda: FakeCuda) -> None:
    model = tiny_model("llama")
    on_cpu = weights_digest(model)
    assert weights_digest(torch.nn.Module.to(model, DEVICE)) == on_cpu


def test_an_engine_that_is_built_anew_over_its_model_captures_its_graphs_again(cuda: FakeCuda) -> None:
    """As after sleep and wake-up."""
    loaded = load("llama")
    said = []
    for _ in range(2):
        core = core_over_blocks(loaded, byte_tokenizer(), engine_config(speculation="none"), NUM_BLOCKS)
        core.runner.capture_graphs()
        before = cuda.num_replays
        said.append(tokens(serve(core, [make()])[0]))
        assert cuda.num_replays - before == core.stats().num_steps
        release(core)
    assert said[0] == said[1]


def test_a_step_waits_for_no_grammar_and_no_thinking_budget_of_the_step_before() -> None:
    def requests() -> list[Request]:
        return [
            make("plain"),
            make("forced", [9, 8, 7], grammar=Grammar(lambda: Walk(1, forces=True)), max_tokens=20),
            make("quick", [7, 8], grammar=Grammar(lambda: Walk(2, forces=True), has_quick_masks=True), max_tokens=20),
            make("budgeted", [5, 6], parser=FORMATS["deepseek_r1"], thinking_token_budget=4, max_tokens=20),
        ]

    said_on_cpu = [
        tokens(deltas)
        for deltas in serve(make_core("llama", torch.device("cpu"), compile="off", speculation="none", max_num_seqs=4), requests())
    ]
    with fake_cuda() as cuda:
        core = make_core("llama", DEVICE, speculation="none", max_num_seqs=4)
        cuda.clear()
        assert [tokens(deltas) for deltas in serve(core, requests())] == said_on_cpu
        assert cuda.waits == {RESULTS: core.stats().num_steps}, cuda.lines


def test_a_capture_that_fails_leaves_an_engine_that_runs_and_an_allocator_that_frees(cuda: FakeCuda) -> None:
    cuda.capture_error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    core = make_core("llama", DEVICE, speculation="none")
    torch.cuda.empty_cache()
    (deltas,) = serve(core, [make()])
    assert len(tokens(deltas)) == NUM_TOKENS
    assert cuda.num_replays == 0


def run_decode(core: EngineCore, context_len: int, num_passes: int = 1) -> None:
    """The model over one decode, as the thread that runs it, again and again with the same tensors."""
    loaded, tables_PN = core.runner.loaded, core.runner.cache.block_tables_PN
    packed = AttentionMetadata.pack([0], [0, 1], [context_len], [0], tables_PN, num_decodes=1).packed
    metadata = AttentionMetadata.view(packed.to(DEVICE), packed[:NUM_HEADER_FIELDS].tolist(), tables_PN)
    zeros = torch.zeros(1, 1, dtype=torch.int64).to(DEVICE)
    torch.cuda.set_device(DEVICE)
    with torch.inference_mode():
        for _ in range(num_passes):
            loaded.model(input_ids=zeros, position_ids=zeros, use_cache=False, attention_metadata=metadata)


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # of which the second has a window, of fewer keys than a split
def test_layers_that_see_the_same_keys_share_a_plan_of_splits_which_each_pass_makes_anew(cuda: FakeCuda, name: str) -> None:
    core = core_over_blocks(load(name, max_model_len=512), byte_tokenizer(), engine_config(speculation="none"), NUM_BLOCKS)
    cuda.clear()
    run_decode(core, context_len=400, num_passes=2)  # a graph is recorded in the second, whose lengths the first one's plan must not have
    assert (cuda.launches["paged_decode_kernel"], cuda.launches["plan_splits_kernel"]) == (2 * 3, 2)
    cuda.clear()
    run_decode(core, context_len=100)
    assert cuda.launches["plan_splits_kernel"] == 0


def launches_of_a_decode(cuda: FakeCuda, name: str, num_layers: int) -> Counter[str]:
    model = tiny_model(name, num_hidden_layers=num_layers, layer_types=["full_attention"] * num_layers)
    loaded = loaded_model(torch.nn.Module.to(model, DEVICE))
    core = core_over_blocks(loaded, byte_tokenizer(), engine_config(speculation="none"), NUM_BLOCKS)
    cuda.clear()
    run_decode(core, context_len=1)
    return Counter(cuda.launches)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "glm4"])
def test_a_decode_layer_is_ten_kernels(cuda: FakeCuda, name: str) -> None:
    of_a_layer = launches_of_a_decode(cuda, name, 3) - launches_of_a_decode(cuda, name, 2)
    assert of_a_layer.pop("aten.mm") + of_a_layer.pop("aten.addmm", 0) == 4
    one_each = ("rotate_kernel", "kv_write_kernel", "paged_decode_kernel", "gated_kernel")
    assert of_a_layer == {"add_rms_norm_kernel": 2} | dict.fromkeys(one_each, 1)


@pytest.mark.parametrize(("name", "kv_cache_dtype"), [pytest.param("gemma2", "auto", marks=pytest.mark.thorough), ("gpt_oss", "fp8")])
def test_no_kernel_is_compiled_once_the_engine_is_built(cuda: FakeCuda, name: str, kv_cache_dtype: str) -> None:
    loaded = loaded_model(torch.nn.Module.to(tiny_model(name), DEVICE, torch.bfloat16), max_model_len=300)
    small_queue = {"max_waiting_requests": 1, "max_waiting_tokens": 1}  # which trials of steps do not wait in
    config = engine_config(speculation="none", max_num_batched_tokens=300, kv_cache_dtype=kv_cache_dtype, **small_queue)
    core = build_core(loaded, byte_tokenizer(), config)
    core.scheduler.waiting = WaitingQueue(max_sequences=100)
    before = set(cuda.variants)
    lengths = [make(str(length), [7] * length, temperature=float(length % 2)) for length in (1, 2, 5, 9, 17, 33, 40, 70, 120)]
    serve(core, [*lengths, *(make(kind, **params) for kind, (params, _) in KINDS.items())])
    assert {kernel for kernel, _ in before} >= {"varlen_prefill_kernel", "paged_decode_kernel", "sample_kernel", "bitmask_apply_kernel"}
    assert cuda.variants == before


def test_one_sampling_kernel_does_for_every_number_of_rows(cuda: FakeCuda) -> None:
    torch.cuda.set_device(DEVICE)
    for num_rows in range(1, 9):
        choose(
            torch.zeros(num_rows, VOCAB_SIZE, device=DEVICE), [{"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}] * num_rows
        )
    assert [kernel for kernel, _ in cuda.variants] == ["sample_kernel"]


def test_logits_that_no_request_changes_are_not_copied(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy = Sampler._float_copy

    def spy(sampler: Sampler, logits_BV: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
        copied.append(len(states))
        return copy(sampler, logits_BV, states)

    monkeypatch.setattr(Sampler, "_float_copy", spy)
    core = make_core("llama", DEVICE, speculation="none")
    serve(core, [make("greedy"), make("sampled", temperature=0.7, top_k=20, top_p=0.9, logprobs=1)])
    assert copied == []
    serve(make_core("llama", DEVICE, speculation="none"), [make(presence_penalty=0.5)])
    assert copied == [1] * NUM_TOKENS


def test_a_steps_launches_do_not_grow_with_the_layers(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of a step of decodes nor those of one with a prompt."""
    compute = FakeCuda._compute
    calls: list[object] = []

    def counted(device: FakeCuda, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(work)
        return compute(device, work, *args, **kwargs)

    monkeypatch.setattr(FakeCuda, "_compute", counted)
    steps: dict[tuple[str, int], list[int]] = {}
    for compile, num_layers in itertools.product(("off", "auto"), (1, 4)):
        loaded = loaded_model(torch.nn.Module.to(tiny_model("llama", num_hidden_layers=num_layers), DEVICE))
        config = engine_config(speculation="none", async_scheduling=False, compile=compile)
        core = core_over_blocks(loaded, byte_tokenizer(), config, NUM_BLOCKS)
        core.runner.capture_graphs()
        core.add(make("decodes", [5, 6, 7]))
        core.step()
        core.add(make("prompt"))
        counts = steps[compile, num_layers] = []
        for _ in range(3):  # a chunk of the prompt, the rest of it, two decodes
            before = len(calls)
            core.step()
            counts.append(len(calls) - before)
    assert steps["auto", 1] == steps["auto", 4]
    assert all(more > fewer + 50 for fewer, more in zip(steps["off", 1], steps["off", 4], strict=True))


@pytest.mark.parametrize("peak_memory", [0, 2**25])
def test_the_cache_leaves_room_for_what_the_largest_step_takes(cuda: FakeCuda, peak_memory: int) -> None:
    cuda.peak_memory = peak_memory
    core = build_core(load("llama"), byte_tokenizer(), engine_config())
    per_block = block_bytes(core.runner.loaded.kv_layout, 16, torch.float32)
    # The graphs keep as much for their largest step as one without a graph takes.
    assert core.runner.cache.num_blocks == int((FREE_MEMORY - 2 * peak_memory) * CUDA_SHARE) // per_block


def test_steps_that_do_not_fit_are_refused_before_the_first_request(cuda: FakeCuda) -> None:
    loaded = load("llama")
    cuda.failure = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(ConfigurationError, match="lower --max-num-batched-tokens or --max-num-seqs"):
        build_core(loaded, byte_tokenizer(), EngineConfig())


Client = Callable[[str, dict[str, Any]], str]
Asked: TypeAlias = tuple[str, dict[str, Any]]
COMPLETION: Asked = ("/v1/completions", {"model": "tiny", "prompt": "Hi", "max_tokens": 3, "stream": True, "temperature": 0})
WHOLE_COMPLETION: Asked = ("/v1/completions", COMPLETION[1] | {"stream": False})
EMBEDDING: Asked = ("/v1/embeddings", {"model": "tiny", "input": ["Hi", "a longer text"]})


def serve_http(directory: Path, use: Callable[[Client], None], *flags: str, ends_by_itself: bool = False) -> int:
    """The exit code of `penstock --model DIRECTORY` with `flags`. It ends by a signal after `use` if not by itself.

    `use` is given what posts a body to a path, and returns the first line of the answer.
    """
    arguments = parse_arguments(["--model", str(directory), "--served-model-name", "tiny", "--no-access-log", *flags])
    assembled = load_model(arguments, Plugins.start([]))

    def client(url: str) -> None:
        def ask(path: str, body: dict[str, Any]) -> str:
            sent = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(sent, timeout=60) as response:
                line: bytes = response.readline()
                return line.decode()

        is_to_end = not ends_by_itself
        try:
            use(ask)
        except BaseException:
            is_to_end = True
            raise
        finally:
            if is_to_end:
                os.kill(os.getpid(), signal.SIGTERM)

    with bind("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        listen(listener)
        done = pool.submit(client, "http://{}:{}".format(*listener.getsockname()))
        code = asyncio.run(run(arguments, assembled, listener, time.monotonic()))
        done.result()
    return code


@pytest.fixture(scope="module")
def generator_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("generator")
    tiny_model("qwen3").save_pretrained(directory)
    encoders.byte_backend().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def embedder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.embedding_directory(tmp_path_factory.mktemp("embedder"))


@pytest.mark.parametrize("factory", [AutoModelForCausalLM, AutoModel])
def test_weights_go_to_the_gpu_as_they_are_read(
    generator_dir: Path, embedder_dir: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, factory: Any
) -> None:
    loaded: list[PreTrainedModel] = []
    from_pretrained = factory.from_pretrained

    def spy(*args: Any, **kwargs: Any) -> Any:
        model, report = from_pretrained(*args, **kwargs)
        loaded.append(model)
        assert {parameter.device for parameter in model.parameters()} == {DEVICE}
        return model, report

    monkeypatch.setattr(factory, "from_pretrained", spy)
    if factory is AutoModel:
        load_pooling_model(embedder_dir, EngineConfig())
    else:
        load_generation_model(generator_dir)
    assert len(loaded) == 1


def test_weights_of_few_bits_are_inflated_on_the_gpu(tmp_path: Path, cuda: FakeCuda) -> None:
    save_stored(tmp_path, tiny_model("qwen2", tie_word_embeddings=True), STORED)
    options: dict[str, Any] = {"quantization": "none", "attn_implementation": "eager"}
    model = load_generation_model(tmp_path, "float32", **options).model
    on_cpu = load_generation_model(tmp_path, "float32", "cpu", **options).model
    tokens_1T = torch.tensor([PROMPT])
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens_1T.to(DEVICE)).logits.cpu(), on_cpu(tokens_1T).logits)


def test_a_cache_of_8_bits_is_copied_for_forks(cuda: FakeCuda) -> None:
    core = make_core("llama", DEVICE, kv_cache_dtype="fp8", enable_prefix_caching=False)
    (deltas,) = serve(core, [make(n=2, temperature=1.0)])
    assert [delta.error for delta in deltas] == [None] * len(deltas)


def test_a_server_of_embeddings_gives_those_of_the_cpu(embedder_dir: Path, cuda: FakeCuda) -> None:
    lines: list[str] = []
    assert serve_http(embedder_dir, lambda ask: lines.append(ask(*EMBEDDING))) == 0
    expected = Reference.of(embedder_dir)
    for text, item in zip(EMBEDDING[1]["input"], json.loads(lines[0])["data"], strict=True):
        torch.testing.assert_close(torch.tensor(item["embedding"]), expected.embedding(text), atol=1e-5, rtol=0)


def test_the_largest_batch_of_embeddings_has_run_for_each_task_before_the_first_request(
    embedder_dir: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[PoolingTask | None, int]] = []
    compute = PoolingModel.compute

    def spy(model: PoolingModel, inputs: Sequence[PoolingInput]) -> list[torch.Tensor]:
        computed.append((inputs[0].params.task, sum(len(text.tokens.token_ids) for text in inputs)))
        return compute(model, inputs)

    monkeypatch.setattr(PoolingModel, "compute", spy)
    build_pooling_engine(embedder_dir, byte_tokenizer(), EngineConfig(max_num_batched_tokens=256))
    assert computed == [("embed", 256), ("token_embed", 256)]
    model = load_pooling_model(embedder_dir, EngineConfig())
    cuda.failure = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(ConfigurationError, match="lower --max-num-batched-tokens"):
        try_largest_batch(model, 256)


@pytest.mark.parametrize("kind", ["text", "embeddings", "text, idle"])
def test_a_server_with_default_flags_answers_and_exits_with_a_code_of_its_own_when_the_gpu_is_lost(
    generator_dir: Path, embedder_dir: Path, cuda: FakeCuda, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    asked, begins = {"text": (COMPLETION, "data: {"), "text, idle": (WHOLE_COMPLETION, "{"), "embeddings": (EMBEDDING, "{")}[kind]
    directory = embedder_dir if kind == "embeddings" else generator_dir

    def use(ask: Client) -> None:
        assert ask(*asked).startswith(begins)
        cuda.failure = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        with suppress(urllib.error.HTTPError):  # an answer that has begun ends with an error, another is a 503
            ask(*asked)

    assert serve_http(directory, use, ends_by_itself=True) == ENGINE_FAILED
    assert "on cuda:0" in capsys.readouterr().out
