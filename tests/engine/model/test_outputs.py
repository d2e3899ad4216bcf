"""Named outputs are what transformers computes, however prompts are cut, cached, pushed out or forked."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.engine.batch import Batch
from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.kernels import references
from penstock.engine.loop import Engine
from penstock.engine.model import fused
from penstock.engine.model.compiled_layers import CompiledLayer, decoder_layers
from penstock.engine.model.native import NativeDecoder
from penstock.engine.model.outputs import Capture
from penstock.engine.request import Request
from penstock.engine.sampling.params import BeamSearchParams
from penstock.plugins.reasoning.formats import FORMATS
from tests.engine.model.test_native import needs_kernels
from tests.engine.test_deadlines import Clock
from tests.engines import core_over, loaded_model
from tests.fakes import drive, ids, make_request, tokens
from tests.tiny_models import VOCAB_SIZE, tiny_model

seed_oss = FORMATS["seed_oss"]

NUM_LAYERS = 3
NAMES = (
    *(f"hidden_states.{number}" for number in (*range(NUM_LAYERS + 1), "last")),
    *(f"{part}.{number}" for part in ("attention_input", "attention_output", "mlp_input", "mlp_output") for number in range(NUM_LAYERS)),
    "logits",
)
PROMPT = [(7 * place * place + 3) % 200 for place in range(45)]
ATTENTION = {"gpt2": "attn"}


def expected(model: Any, token_ids: list[int], architecture: str) -> dict[str, Tensor]:
    """Every output by name, [T, ...], of a forward pass of transformers' own."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, states: Any) -> None:
        outputs[name] = (states if isinstance(states, Tensor) else states[0])[0]

    def look(module: nn.Module, kind: str, number: int) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(f"{kind}_input.{number}", args[0] if args else kwargs["hidden_states"])

        undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo.callback(module.register_forward_hook(lambda *call: keep(f"{kind}_output.{number}", call[-1])).remove)

    with ExitStack() as undo, torch.inference_mode():
        for number, layer in enumerate(decoder_layers(model, NUM_LAYERS)):
            look(layer.get_submodule(ATTENTION.get(architecture, "self_attn")), "attention", number)
            look(layer.get_submodule("mlp"), "mlp", number)
            if number == NUM_LAYERS - 1:
                undo.callback(layer.register_forward_hook(lambda *call: keep(f"hidden_states.{NUM_LAYERS}", call[-1])).remove)
        result = model(torch.tensor([token_ids]), output_hidden_states=True)
    for number, states in enumerate(result.hidden_states[:-1]):
        keep(f"hidden_states.{number}", states)
    keep("hidden_states.last", result.hidden_states[-1])
    keep("logits", result.logits)
    return outputs


def core_and_reference(architecture: str = "llama", **settings: Any) -> tuple[EngineCore, Callable[[list[int]], dict[str, Tensor]]]:
    reference = tiny_model(architecture)
    return core_over(loaded_model(tiny_model(architecture)), **settings), lambda token_ids: expected(reference, token_ids, architecture)


def add(
    core: EngineCore, request_id: str, prompt: list[int], outputs: Sequence[str] = NAMES, *, with_context: bool = False, **params: Any
) -> None:
    request = make_request(request_id, prompt, ignore_eos=True, **params)
    request.outputs, request.with_context_outputs = tuple(outputs), with_context
    core.add(request)


def generated(deltas: list[SequenceDelta], index: int = 0) -> dict[str, Tensor]:
    """All rows of one sequence. Each delta has as many as it has tokens."""
    own = [delta for delta in deltas if delta.index == index]
    assert all(len(rows) == len(delta.token_ids) for delta in own for rows in delta.outputs.values())
    return {name: torch.cat([delta.outputs[name] for delta in own if delta.outputs]) for name in own[0].outputs}


def context(deltas: list[SequenceDelta], index: int = 0) -> tuple[dict[str, Tensor], int]:
    prompt = next(delta.prompt for delta in deltas if delta.index == index)
    assert prompt is not None
    return prompt.outputs, prompt.first_output_token


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], start: int, stop: int, names: Sequence[str] = NAMES) -> None:
    assert set(got) == set(names)
    for name in names:
        assert got[name].device.type == "cpu"
        assert not got[name].is_inference()
        deviation = (got[name] - wanted[name][start:stop]).abs().max()
        assert deviation < 2e-4 * (1 + wanted[name].abs().max()), name


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "gpt_oss", "glm4", "cohere2", "qwen3_moe"])
def test_every_output_is_transformers_own_of_prompt_and_answer(architecture: str) -> None:
    """The prompt is cut into chunks, beside others that want other outputs or none."""
    core, reference = core_and_reference(architecture, max_num_batched_tokens=16, max_num_seqs=4)
    add(core, "all", PROMPT, with_context=True, max_tokens=6)
    add(core, "none", PROMPT[3:], (), max_tokens=4)
    add(core, "few", PROMPT[5:30], ("hidden_states.last", "logits"), max_tokens=5)
    said = drive(core)
    wanted = reference(PROMPT + tokens(said["all"])[:-1])
    rows, first = context(said["all"])
    assert first == 0
    assert_same(rows, wanted, 0, len(PROMPT))
    assert_same(generated(said["all"]), wanted, len(PROMPT) - 1, len(PROMPT) + 5)
    assert not any(delta.outputs for delta in said["none"])
    wanted = reference(PROMPT[5:30] + tokens(said["few"])[:-1])
    assert_same(generated(said["few"]), wanted, 24, 29, ("hidden_states.last", "logits"))
    assert context(said["few"]) == ({}, 0)


def test_all_sequences_of_a_request_get_theirs_and_the_prompts() -> None:
    core, reference = core_and_reference(max_num_batched_tokens=16)
    names = ("hidden_states.2", "logits")
    add(core, "r", PROMPT, names, with_context=True, max_tokens=4, n=3, temperature=1.0, seed=5)
    said = drive(core)["r"]
    for index in range(3):
        wanted = reference(PROMPT + tokens(said, index)[:-1])
        assert_same(generated(said, index), wanted, len(PROMPT) - 1, len(PROMPT) + 3, names)
        assert_same(context(said, index)[0], wanted, 0, len(PROMPT), names)
        assert context(said, index)[0]["logits"] is context(said, 0)[0]["logits"]


def test_what_the_prefix_cache_holds_is_absent_and_the_result_says_so() -> None:
    core, reference = core_and_reference(block_size=8)
    add(core, "first", PROMPT[:30], (), max_tokens=1)
    drive(core)
    names = ("attention_input.1", "logits")
    add(core, "second", PROMPT, names, with_context=True, max_tokens=3)
    said = drive(core)["second"]
    rows, first = context(said)
    assert first == said[0].prompt.num_cached_tokens == 24  # type: ignore[union-attr]
    wanted = reference(PROMPT + tokens(said)[:-1])
    assert_same(rows, wanted, 24, len(PROMPT), names)
    assert_same(generated(said), wanted, len(PROMPT) - 1, len(PROMPT) + 2, names)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_sequences_get_each_row_once(enable_prefix_caching: bool) -> None:
    core, reference = core_and_reference(
        num_blocks=18, block_size=8, max_num_batched_tokens=24, enable_prefix_caching=enable_prefix_caching
    )
    prompts = {str(number): PROMPT[number:] + PROMPT[:number] for number in range(4)}
    names = ("hidden_states.0", "mlp_output.2", "logits")
    for request_id, prompt in prompts.items():
        add(core, request_id, prompt, names, with_context=True, max_tokens=20)
    said = drive(core)
    assert core.stats().num_preemptions
    for request_id, prompt in prompts.items():
        wanted = reference(prompt + tokens(said[request_id])[:-1])
        rows, first = context(said[request_id])
        assert first == 0
        assert_same(rows, wanted, 0, len(prompt), names)
        assert_same(generated(said[request_id]), wanted, len(prompt) - 1, len(prompt) + 19, names)


def test_rows_are_the_same_where_steps_are_put_together_ahead() -> None:
    core, reference = core_and_reference(max_num_batched_tokens=16, async_scheduling=True)
    names = ("hidden_states.2", "logits")
    stopping = make_request("stops", PROMPT[4:], max_tokens=30, temperature=1.0, seed=1, stop_token_ids=tuple(range(0, 200, 7)))
    going_on = make_request("goes on", PROMPT, max_tokens=12, ignore_eos=True)
    for request in (stopping, going_on):
        request.outputs, request.with_context_outputs = names, True

    async def collect(engine: Engine, request: Request) -> list[SequenceDelta]:
        return [delta async for delta in engine.generate(request)]

    async def main() -> tuple[list[SequenceDelta], list[SequenceDelta]]:
        engine = Engine(core)
        await engine.start()
        said = await asyncio.gather(collect(engine, stopping), collect(engine, going_on))
        await engine.stop()
        return said

    for request, deltas in zip((stopping, going_on), asyncio.run(main()), strict=True):
        prompt = request.prompt_token_ids
        wanted = reference(prompt + tokens(deltas)[:-1])
        assert_same(context(deltas)[0], wanted, 0, len(prompt), names)
        assert_same(generated(deltas), wanted, len(prompt) - 1, len(prompt) + len(tokens(deltas)) - 1, names)


@pytest.mark.parametrize("num_blocks", [64, 19])
def test_every_beam_that_is_returned_has_its_own_rows(num_blocks: int) -> None:
    """Also where there is too little room for two searches, which push each other out."""
    core, reference = core_and_reference(max_num_batched_tokens=16, block_size=8, num_blocks=num_blocks)
    names = ("hidden_states.2", "logits")
    for request_id, prompt in (("one", PROMPT), ("two", PROMPT[5:])):
        search = BeamSearchParams(3, max_tokens=14, ignore_eos=True)
        request = make_request(request_id, prompt, n=3, max_tokens=14, stop_token_ids=tuple(range(0, 259, 9)))
        request.beam, request.outputs, request.with_context_outputs = search, names, True
        core.add(request)
    said = drive(core)
    assert bool(core.stats().num_preemptions) == (num_blocks == 19)
    for request_id, prompt in (("one", PROMPT), ("two", PROMPT[5:])):
        ends = [delta for delta in said[request_id] if delta.finish_reason is not None]
        assert [delta.index for delta in ends] == [0, 1, 2]
        for delta in ends:
            wanted = reference(prompt + delta.token_ids[:-1])
            assert_same(delta.outputs, wanted, len(prompt) - 1, len(prompt) + len(delta.token_ids) - 1, names)
        rows, first = context(said[request_id])
        assert_same(rows, wanted, first, len(prompt), names)
    assert len({len(delta.token_ids) for delta in said["one"] + said["two"] if delta.finish_reason is not None}) > 1


def test_a_search_that_is_timed_out_gives_the_rows_of_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    core, reference = core_and_reference()
    request = make_request("r", PROMPT, n=2, max_tokens=30, ignore_eos=True)
    request.beam, request.outputs, request.deadline = BeamSearchParams(2, max_tokens=30), ("hidden_states.2",), clock.now + 5
    core.add(request)
    for _ in range(4):
        core.step()
    clock.now += 6
    deltas = drive(core)["r"]
    assert [(delta.finish_reason, len(delta.token_ids)) for delta in deltas] == [(FinishReason.TIMED_OUT, 4)] * 2
    for delta in deltas:
        assert_same(delta.outputs, reference(PROMPT + delta.token_ids[:-1]), len(PROMPT) - 1, len(PROMPT) + 3, request.outputs)


def test_logits_go_with_scores_of_the_prompt_and_are_raw() -> None:
    core, reference = core_and_reference(max_num_batched_tokens=16)
    add(core, "r", PROMPT, ("logits",), with_context=True, max_tokens=3, prompt_logprobs=1, logprobs=0, logit_bias={9: 50.0}, min_tokens=3)
    said = drive(core)["r"]
    assert tokens(said) == [9] * 3
    wanted = reference([*PROMPT, 9, 9])
    rows, _ = context(said)
    assert rows["logits"].dtype == torch.float32
    assert rows["logits"].shape == (len(PROMPT), VOCAB_SIZE)
    assert_same(rows, wanted, 0, len(PROMPT), ("logits",))
    assert_same(generated(said), wanted, len(PROMPT) - 1, len(PROMPT) + 2, ("logits",))
    scores = said[0].prompt.logprobs  # type: ignore[union-attr]
    assert scores is not None
    for place, entry in enumerate(scores[1:]):
        assert entry is not None
        logits_V = rows["logits"][place, : core.vocab_size]  # scores are among the tokens that the tokenizer knows
        assert entry.logprob == pytest.approx(float(logits_V.log_softmax(-1)[PROMPT[place + 1]]), abs=1e-4)


def test_a_prompt_alone_gives_its_outputs() -> None:
    core, reference = core_and_reference()
    add(core, "r", PROMPT, ("hidden_states.last",), with_context=True, max_tokens=0)
    (delta,) = drive(core)["r"]
    assert_same(context([delta])[0], reference(PROMPT), 0, len(PROMPT), ("hidden_states.last",))
    assert delta.outputs == {}


def test_steps_without_wanted_outputs_install_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = core_and_reference()
    num_hooks = 0

    def count(register: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_hooks
            num_hooks += 1
            return register(*args, **kwargs)

        return counted

    for name in ("register_forward_hook", "register_forward_pre_hook"):
        monkeypatch.setattr(nn.Module, name, count(getattr(nn.Module, name)))
    add(core, "none", PROMPT, (), max_tokens=3)
    add(core, "logits", PROMPT, ("logits",), with_context=True, max_tokens=3)
    drive(core)
    assert num_hooks == 0
    add(core, "one", PROMPT, ("hidden_states.1",), max_tokens=3)
    drive(core)
    assert num_hooks == 3
    model = core.runner.loaded.model
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@needs_kernels
def test_native_code_steps_aside_where_outputs_are_wanted_and_goes_on_with_what_was_computed() -> None:
    core = core_over(loaded_model(tiny_model("llama", head_dim=64).bfloat16()), max_num_batched_tokens=16, max_num_seqs=4)
    model = core.runner.loaded.model
    native = model.forward
    assert isinstance(native, NativeDecoder)
    names = ("hidden_states.2", "hidden_states.last", "attention_output.1", "logits")
    add(core, "looks", PROMPT, names, with_context=True, max_tokens=4)
    add(core, "goes on", PROMPT[:20], (), max_tokens=12)
    said = drive(core)
    assert model.forward is native
    wanted = expected(tiny_model("llama", head_dim=64).bfloat16(), PROMPT + tokens(said["looks"])[:-1], "llama")
    rows = context(said["looks"])[0]
    assert rows["hidden_states.last"].dtype == torch.bfloat16
    for name in names:
        got = torch.cat([rows[name], generated(said["looks"])[name][1:]]).float()
        assert (got - wanted[name]).norm() / wanted[name].float().norm() < 3e-2
    add(core, "logits alone", PROMPT, ("logits",), max_tokens=2)
    logits = generated(drive(core)["logits alone"])["logits"]
    assert (logits[:1] - generated(said["looks"])["logits"][:1]).norm() / logits[:1].norm() < 3e-2


def test_fused_layers_and_gates_step_aside_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rms_norm", "add_rms_norm", "gated"):
        monkeypatch.setattr(fused, name, getattr(references, name))
    core, _ = core_and_reference("gemma2", native_kernels="none")
    model: Any = core.runner.loaded.model
    assert fused.fuse_norms(model) > fused.fuse_residuals(model) == fused.fuse_gates(model) == NUM_LAYERS
    replaced = model.model.layers[1].forward
    names = ("model.layers.1.post_attention_layernorm", "model.layers.1.mlp.act_fn")
    add(core, "r", PROMPT, names, max_tokens=2)
    num_rows = {name: len(rows) for name, rows in generated(drive(core)["r"]).items()}
    assert num_rows == dict.fromkeys(names, 2)
    assert model.model.layers[1].forward is replaced


def test_compiled_layers_and_graphs_step_aside_too() -> None:
    class NoGraphs:
        num_runs = 0

        def run(self, batch: Batch) -> None:
            self.num_runs += 1

    class Broken(list[Tensor]):
        def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
            raise RuntimeError("compiled code was run")

    core, reference = core_and_reference()
    graphs: Any = NoGraphs()
    core.runner.graphs = graphs
    layers = decoder_layers(core.runner.loaded.model, NUM_LAYERS)
    stand_ins = [CompiledLayer(Broken(), layer) for layer in layers]
    for layer, stand_in in zip(layers, stand_ins, strict=True):
        layer.forward = stand_in
    names = ("attention_input.1", "hidden_states.3")
    add(core, "r", PROMPT, names, max_tokens=3)
    said = drive(core)["r"]
    assert graphs.num_runs == 0
    assert [layer.forward for layer in layers] == stand_ins
    assert_same(generated(said), reference(PROMPT + tokens(said)[:-1]), len(PROMPT) - 1, len(PROMPT) + 2, names)
    for layer in layers:
        del layer.forward
    add(core, "r", PROMPT, ("logits",), max_tokens=3)
    drive(core)
    assert graphs.num_runs == 3


def test_tokens_that_the_engine_put_in_get_their_rows_once_they_are_computed() -> None:
    """The end of the reasoning, under a budget: its rows come later, and none is lost or out of place."""
    core, reference = core_and_reference()
    prompt = ids("abc<seed:think>")
    add(core, "r", prompt, ("hidden_states.1",), max_tokens=30, thinking_token_budget=3, parser=seed_oss, tail="<seed:think>")
    deltas = drive(core)["r"]
    assert max(len(delta.token_ids) for delta in deltas) == len(ids("</seed:think>"))
    wanted = reference(prompt + tokens(deltas)[:-1])["hidden_states.1"][len(prompt) - 1 :]
    rows = torch.cat([delta.outputs["hidden_states.1"] for delta in deltas if delta.outputs])
    torch.testing.assert_close(rows, wanted, atol=2e-4, rtol=1e-4)


def test_an_output_that_the_model_does_not_have_is_refused_with_those_that_it_has() -> None:
    core, _ = core_and_reference()
    assert set(core.runner.outputs.names) == set(NAMES)
    for name in ("hidden_states.4", "hidden_states", "attention_input.3", "attention_weights.0", ""):
        with pytest.raises(InvalidRequest, match=r"hidden_states\.0 to hidden_states\.3, .*hidden_states\.last, logits") as caught:
            add(core, "r", PROMPT, ("logits", name))
        assert caught.value.param == "outputs"
    with pytest.raises(InvalidRequest, match="needs `outputs`"):
        add(core, "r", PROMPT, (), with_context=True)


@pytest.mark.parametrize(
    ("architecture", "paths"),
    [
        ("llama", ("model.embed_tokens", "model.layers.1.mlp.gate_proj", "model.layers.2.self_attn.q_proj", "model.norm")),
        ("gpt2", ("transformer.h.1.mlp.c_fc", "transformer.ln_f")),
        ("qwen3_moe", ("model.layers.0.mlp.gate", "model.layers.1.input_layernorm")),
    ],
)
def test_what_comes_out_of_any_module_has_its_path_for_a_name(architecture: str, paths: tuple[str, ...]) -> None:
    core, _ = core_and_reference(architecture, max_num_batched_tokens=16)
    add(core, "r", PROMPT, (*paths, "logits"), with_context=True, max_tokens=4)
    said = drive(core)["r"]
    seen: dict[str, Tensor] = {}
    model: Any = tiny_model(architecture)

    def seeing(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def see(_: nn.Module, __: Any, output: Any) -> None:
            states = output if isinstance(output, Tensor) else output[0]
            seen[path] = states if states.ndim == 2 else states[0]

        return see

    for path in paths:
        model.get_submodule(path).register_forward_hook(seeing(path))
    with torch.inference_mode():
        seen["logits"] = model(torch.tensor([PROMPT + tokens(said)[:-1]])).logits[0]
    assert_same(context(said)[0], seen, 0, len(PROMPT), (*paths, "logits"))
    assert_same(generated(said), seen, len(PROMPT) - 1, len(PROMPT) + 3, (*paths, "logits"))


def test_a_module_without_a_row_for_each_token_ends_its_own_request_and_is_refused_from_then_on() -> None:
    core, reference = core_and_reference(max_num_batched_tokens=64)
    uncalled = "model.layers"  # a list of modules
    add(core, "uncalled", PROMPT, (uncalled, "logits"), max_tokens=4, n=2)
    add(core, "good", PROMPT[4:], ("hidden_states.1",), max_tokens=4)
    said = drive(core)
    assert {delta.finish_reason for delta in said["uncalled"]} == {FinishReason.ERROR}
    assert all("the model does not call this module" in str(delta.error) for delta in said["uncalled"])
    wanted = reference(PROMPT[4:] + tokens(said["good"])[:-1])
    assert_same(generated(said["good"]), wanted, len(PROMPT) - 5, len(PROMPT) - 1, ("hidden_states.1",))
    core.check_integrity()
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
    with pytest.raises(InvalidRequest, match="the model does not call this module"):
        add(core, "again", PROMPT, (uncalled,))
    for head in ("lm_head", "model", "model.layers.9"):
        with pytest.raises(InvalidRequest, match="by the module's path"):
            add(core, "again", PROMPT, (head,))


@pytest.mark.parametrize("shape", [(1, 2, 5, 3), (5,), (2, 5, 3), (4, 3), ()])
def test_only_rows_of_all_tokens_are_taken(shape: tuple[int, ...]) -> None:
    capture = Capture(torch.tensor([0, 4]), 5)
    capture.take("bad", torch.zeros(shape))
    assert "no row for each token" in capture.failures["bad"]
    for name, good in {"flat": torch.rand(5, 3), "whole": torch.rand(1, 5, 2, 3)}.items():
        capture.take(name, good)
        assert torch.equal(capture.rows[name], good.reshape(5, *good.shape[2:] if good.ndim > 2 else good.shape[1:])[[0, 4]])
    assert "bad" not in capture.rows


def test_a_failing_step_takes_its_hooks_away() -> None:
    core, _ = core_and_reference()
    model: PreTrainedModel = core.runner.loaded.model

    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    handle = decoder_layers(model, NUM_LAYERS)[1].register_forward_hook(fail)
    add(core, "r", PROMPT, ("hidden_states.1",), max_tokens=3)
    step = core.schedule()
    assert step is not None
    batch = core.build(step)
    with pytest.raises(RuntimeError, match="out of order"):
        core.runner.launch(batch).collect()
    core.fail(step, "failed")
    handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
