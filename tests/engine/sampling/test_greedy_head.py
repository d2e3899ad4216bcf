"""The most probable tokens by a second output layer are those of all logits, however far that layer is from the true one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.engine.core import EngineCore
from penstock.engine.deltas import SequenceDelta
from penstock.engine.model.fused import fuse_linears
from penstock.engine.model.loader import LoadedModel
from penstock.engine.model.native import NativeDecoder
from penstock.engine.native.runtime import native_library
from penstock.engine.output import ResultProcessor
from penstock.engine.sampling.greedy_head import NUM_TIMES, RETRY_EVERY, FasterWay, GreedyHead, prepare_greedy_head
from penstock.engine.sampling.sampler import greedy_tokens
from penstock.engine.weights.linear import QuantizedEmbedding, QuantizedLinear, quantize_linears
from penstock.engine.weights.packed import PackedWeight, pack, quantized
from tests.engine.weights.sample_weights import random_weight
from tests.engines import core_over, loaded_model
from tests.fakes import drive, make_request, tokens
from tests.matchers import Grammar, Walk
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")

VOCAB_SIZE = 1000  # of 1,013 rows: the last ones are padding


@pytest.fixture
def without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second output layer counts as the faster way."""
    monkeypatch.setattr(FasterWay, "next", lambda self: False)


def at_once(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    return function()


def prepared(weight: PackedWeight, embedding: PackedWeight | None = None) -> GreedyHead:
    found = prepare_greedy_head(
        QuantizedLinear([weight], None), QuantizedEmbedding(embedding or weight, torch.bfloat16), VOCAB_SIZE, at_once
    )
    assert found is not None
    return found


def gaussian_weight(name: str) -> PackedWeight:
    torch.manual_seed(1)
    weight_OI = torch.randn(1013, 256)
    weight_OI[700] = weight_OI[13] = weight_OI[900]  # ties
    return pack(quantized(weight_OI, 8)) if name == "Q8_0" else pack(random_weight(name, 1013, 256))


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_tokens_are_those_of_all_logits(name: str, num_rows: int) -> None:
    weight = gaussian_weight(name)
    head, greedy = QuantizedLinear([weight], None), prepared(weight)
    rows = QuantizedEmbedding(weight, torch.float32)(
        torch.tensor([13, 1012, 5])
    )  # the third's own row is the most probable, the second padding
    for x in (torch.randn(60, 256), rows.repeat(2, 1), rows * 1e-3 + torch.randn(3, 256), torch.zeros(3, 256)):
        for start in range(0, len(x) - num_rows + 1, num_rows):
            hidden_KH = x[start : start + num_rows].bfloat16()
            assert greedy.tokens(hidden_KH) == greedy_tokens(head(hidden_KH), VOCAB_SIZE)


def test_rows_behind_a_wrong_draft_token_are_not_looked_at() -> None:
    weight = gaussian_weight("Q8_0")
    greedy, hidden_KH = prepared(weight), torch.randn(7, 256).bfloat16()
    right = greedy_tokens(QuantizedLinear([weight], None)(hidden_KH), VOCAB_SIZE)
    assert right is not None
    wrong = (right[1] + 1) % VOCAB_SIZE
    # Two sequences: of one the second draft token is wrong, of the other none.
    drafted = [right[0], wrong, right[2], -1, right[4], right[5], -1]
    hidden_KH[2] = torch.nan  # behind the wrong one
    assert greedy.tokens(hidden_KH) is None
    found = greedy.tokens(hidden_KH, drafted)
    assert found is not None
    assert [found[row] for row in (0, 1, 4, 5, 6)] == [right[row] for row in (0, 1, 4, 5, 6)]
    hidden_KH[1] = torch.nan
    assert greedy.tokens(hidden_KH, drafted) is None


def test_few_true_logits_are_computed_and_any_second_layer_will_do() -> None:
    exact, coarse = gaussian_weight("Q8_0"), pack(random_weight("Q4_0", 1013, 256))
    rows = [QuantizedEmbedding(weight, torch.float32)(torch.arange(1013)) for weight in (exact, coarse)]
    errors_V = (rows[0] - rows[1]).norm(dim=1) * 1.01
    far = GreedyHead(exact, coarse, errors_V, VOCAB_SIZE)
    for hidden_KH in torch.randn(40, 1, 256).bfloat16():
        assert far.tokens(hidden_KH) == greedy_tokens(QuantizedLinear([exact], None)(hidden_KH), VOCAB_SIZE)
    wrong = GreedyHead(exact, coarse, torch.zeros(1013), VOCAB_SIZE)  # as if the second layer were the true one
    hidden_TH = torch.randn(40, 256).bfloat16()
    found = [wrong.tokens(row[None]) for row in hidden_TH]
    assert found != [greedy_tokens(QuantizedLinear([exact], None)(row[None]), VOCAB_SIZE) for row in hidden_TH], "the bounds decide"


def test_what_is_not_finite_has_no_token() -> None:
    greedy = prepared(gaussian_weight("Q8_0"))
    for value in (torch.nan, torch.inf):
        hidden_KH = torch.randn(2, 256).bfloat16()
        hidden_KH[1, 7] = value
        assert greedy.tokens(hidden_KH) is None


def test_the_embedding_is_the_second_layer_where_it_is_close() -> None:
    exact, close = (
        gaussian_weight("Q8_0"),
        pack(quantized(QuantizedEmbedding(gaussian_weight("Q8_0"), torch.float32)(torch.arange(1013)), 5)),
    )
    assert prepared(exact, close).weights[1] is close
    assert prepared(exact, pack(random_weight("Q5_0", 1013, 256))).weights[1].type_name == "Q4_1"


def test_layers_of_few_bits_are_left_alone() -> None:
    few, bias = pack(random_weight("Q4_0", 64, 256)), torch.zeros(64)
    embedding = QuantizedEmbedding(few, torch.bfloat16)
    assert prepare_greedy_head(QuantizedLinear([few], None), embedding, 64, at_once) is None
    assert prepare_greedy_head(QuantizedLinear([pack(random_weight("Q8_0", 64, 256))], bias), embedding, 64, at_once) is None
    assert prepare_greedy_head(torch.nn.Linear(256, 64), embedding, 64, at_once) is None


def test_the_faster_way_is_taken_and_the_other_tried_now_and_then() -> None:
    faster, seconds = FasterWay(), [2.0, 1.0]

    def ways(num_calls: int) -> list[bool]:
        taken = []
        for _ in range(num_calls):
            taken.append(faster.next())
            faster.took(seconds[taken[-1]], is_second=taken[-1])
        return taken

    assert sum(ways(2 * NUM_TIMES)) == NUM_TIMES  # each is timed at first
    assert ways(RETRY_EVERY).count(False) == 1
    faster.took(50.0, is_second=True)  # one call that was interrupted
    assert ways(RETRY_EVERY).count(False) == 1
    seconds[1] = 3.0
    assert ways(2 * RETRY_EVERY)[NUM_TIMES:].count(True) == 2
    seconds[0] = 4.0  # and the other is not known to be faster before it has been tried
    assert ways(2 * RETRY_EVERY)[NUM_TIMES:].count(False) == 2


@pytest.mark.parametrize("has_all", [False, True])
def test_either_way_finds_the_same_and_a_row_that_is_not_finite_has_no_token(has_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FasterWay, "next", lambda self: has_all)
    weight = gaussian_weight("Q8_0")
    head, greedy, hidden_KH = QuantizedLinear([weight], None), prepared(weight), torch.randn(3, 256).bfloat16()
    found = greedy.most_probable(hidden_KH, head)
    assert found is not None
    assert found.token_ids == greedy_tokens(head(hidden_KH), VOCAB_SIZE)
    assert (found.logits_KV is not None) == has_all
    hidden_KH[1, 7] = torch.nan
    assert greedy.most_probable(hidden_KH, head) is None


def quantized_model() -> LoadedModel:
    model = tiny_model("llama", head_dim=64, hidden_size=64).bfloat16()
    fuse_linears(model)
    quantize_linears(model, 8)
    return loaded_model(model)


def driven(core: EngineCore, loaded: LoadedModel) -> tuple[dict[str, list[SequenceDelta]], int]:
    """With the number of steps in which the output layer computed all logits."""
    decoder, calls = loaded.model.forward, 0
    assert isinstance(decoder, NativeDecoder)

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    hook = decoder.head.register_forward_hook(count)
    deltas = drive(core)
    hook.remove()
    return deltas, calls


@pytest.mark.usefixtures("without_logits")
def test_steps_with_draft_tokens_compute_no_logits() -> None:
    loaded = quantized_model()

    def answers(*, is_prepared: bool) -> tuple[list[list[int]], int, int]:
        core = core_over(loaded, speculation="ngram")
        if is_prepared:
            core.runner.prepare_greedy_head()
        for name in ("1", "2"):
            core.add(make_request(name, [7, 8, 9, int(name)] * 5, max_tokens=60, temperature=0.0, ignore_eos=True))
        deltas, calls = driven(core, loaded)
        assert core.scheduler.speculation is not None
        accepted = core.scheduler.speculation.counts["ngram"].num_accepted
        core.runner.shutdown()
        return [tokens(deltas[name]) for name in ("1", "2")], calls, accepted

    (expected, num_all, num_accepted), (found, num_left, num_accepted_too) = answers(is_prepared=False), answers(is_prepared=True)
    assert found == expected
    assert num_accepted == num_accepted_too > 0
    assert num_left < num_all / 2


@pytest.mark.usefixtures("without_logits")
@pytest.mark.parametrize(
    ("num_prompts", "params", "num_without"),
    [
        (1, {}, 5),
        (2, {}, 5),
        (4, {}, 0),
        (1, {"logprobs": 1}, 0),
        (1, {"temperature": 1.0, "seed": 3}, 0),
        (1, {"repetition_penalty": 1.2}, 0),
    ],
)
def test_steps_of_few_greedy_rows_compute_no_logits(num_prompts: int, params: dict[str, Any], num_without: int) -> None:
    loaded = quantized_model()
    names = list(map(str, range(num_prompts)))

    def answers(*, is_prepared: bool) -> tuple[list[list[int]], int]:
        core = core_over(loaded, speculation="none")
        if is_prepared:
            core.runner.prepare_greedy_head()
            assert core.runner.greedy_head is not None
        for name in names:
            wanted: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, **params}
            core.add(make_request(name, [7 + int(name), 8, 9], **wanted))
        deltas, calls = driven(core, loaded)
        core.runner.shutdown()
        return [tokens(deltas[name]) for name in names], calls

    (expected, num_all), (found, num_left) = answers(is_prepared=False), answers(is_prepared=True)
    assert found == expected
    assert num_all - num_left == num_without


@pytest.mark.parametrize("has_all", [None, False, True])
@pytest.mark.parametrize("speculation", ["none", "ngram"])
def test_what_a_grammar_refuses_is_sampled_again_under_its_mask(
    has_all: bool | None, speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, refused = quantized_model(), []
    accept = ResultProcessor._accept_unmasked

    def counted(self: Any, sequence: Any, delta: Any, token_id: Any, sample_again: Any) -> None:
        def noted(mask_W: torch.Tensor) -> Any:
            refused.append(token_id)
            return sample_again(mask_W)

        accept(self, sequence, delta, token_id, noted)

    def answers(has_all: bool | None) -> tuple[list[list[int]], int, int]:
        refused.clear()
        core = core_over(loaded, speculation=speculation)
        if has_all is not None:
            core.runner.prepare_greedy_head()
            monkeypatch.setattr(FasterWay, "next", lambda self: has_all)
        for seed in (1, 2):
            grammar = Grammar(lambda seed=seed: Walk(seed, length=60, forces=False), has_quick_masks=True)  # type: ignore[misc]
            core.add(make_request(str(seed), [7, 8, 9, seed] * 5, grammar=grammar, max_tokens=60, temperature=0.0))
        deltas, calls = driven(core, loaded)
        core.runner.shutdown()
        assert len(refused) > 10
        return [tokens(deltas[str(seed)]) for seed in (1, 2)], calls, len(refused)

    monkeypatch.setattr(ResultProcessor, "_accept_unmasked", counted)
    (expected, num_all, _), (found, num_left, num_refused) = answers(None), answers(has_all)
    assert found == expected
    assert num_left <= (num_refused + num_all / 2 if has_all is False else num_all)
