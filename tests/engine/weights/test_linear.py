import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.model.fused import FusedPart, fuse_linears
from penstock.engine.weights import linear
from penstock.engine.weights.linear import (
    PackedLinear,
    QuantizedEmbedding,
    can_pack,
    can_panel,
    pack_linears,
    panel_linear,
    panels,
)
from penstock.engine.weights.packed import pack, quantized
from tests.engine.weights.sample_weights import ALL_TYPES, random_weight
from tests.tiny_models import ARCHITECTURES, tiny_model

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
needs_packing = pytest.mark.skipif(not DTYPES, reason="this build of torch has no packed kernels")


class Model(nn.Module):
    """An embedding, a layer and an output layer that shares the embedding's weight."""

    layer: nn.Module
    head: nn.Module

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24, dtype=dtype)
        self.layer = nn.Linear(24, 24, dtype=dtype)
        head = nn.Linear(24, 50, bias=False, dtype=dtype)
        head.weight = self.embedding.weight
        self.head = head

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(token_ids)))  # type: ignore[no-any-return]


class ReadsWeight(nn.Module):
    """As some routers do: the weight is used without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.double(), self.router.weight.double())


class ReadsWeightByInheritance(ReadsWeight):
    pass


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (33,), (300,), (1, 0), (1, 1), (2, 7), (1, 40)])
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (24, 50), (64, 192), (100, 17)])
def test_a_packed_layer_computes_what_the_layer_did(
    in_features: int, out_features: int, shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(in_features, out_features, bias=has_bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(*shape, in_features, dtype=dtype)
    expected = linear(x)
    result = PackedLinear(linear)(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@needs_packing
def test_input_of_any_layout_is_taken() -> None:
    linear = nn.Linear(24, 50).requires_grad_(False)
    packed = PackedLinear(linear)
    for x in (torch.randn(24, 7).T, torch.randn(7, 48)[:, ::2], torch.randn(9, 48)[1::2, 3:27], torch.randn(24).expand(3, 24)):
        torch.testing.assert_close(packed(x), linear(x))


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_weight_stays_with_the_embedding_and_others_are_freed(dtype: torch.dtype) -> None:
    model = Model(dtype).requires_grad_(False)
    token_ids = torch.arange(10)[None]
    expected = model(token_ids)
    embedded, plain = weakref.ref(model.embedding.weight), weakref.ref(model.layer.weight)
    assert pack_linears(model) == 2
    gc.collect()
    assert plain() is None
    assert embedded() is model.embedding.weight
    assert [type(child) for child in model.children()] == [nn.Embedding, PackedLinear, PackedLinear]
    torch.testing.assert_close(model(token_ids), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@needs_packing
def test_packed_weights_go_with_their_model() -> None:
    gc.collect()
    before = len(linear._packed)
    model, other = Model().requires_grad_(False), Model().requires_grad_(False)
    pack_linears(other)
    pack_linears(model)
    weight = weakref.ref(next(reversed(linear._packed.values())))
    expected = other(torch.arange(5))
    del model
    gc.collect()
    assert weight() is None
    assert len(linear._packed) == before + 2
    pack_linears(third := Model())  # takes no number that is in use
    torch.testing.assert_close(other(torch.arange(5)), expected)
    del third


def test_types_without_packed_kernels_are_left_alone() -> None:
    for dtype in (torch.float64, torch.float16):
        model = Model(dtype)
        assert not can_pack(dtype)
        assert pack_linears(model) == 0
        assert type(model.layer) is nn.Linear
        model(torch.arange(3))


@needs_packing
def test_a_model_without_memory_takes_the_same_shape() -> None:
    with torch.device("meta"):
        model = Model()
    assert pack_linears(model) == 2
    assert type(model.layer) is PackedLinear
    with torch.inference_mode():
        assert model(torch.zeros(3, dtype=torch.long, device="meta")).shape == (3, 50)


@needs_packing
def test_a_layer_with_two_places_is_packed_once() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.Sequential(shared), shared).requires_grad_(False)
    x = torch.randn(3, 8)
    expected = model(x)
    assert pack_linears(model) == 1
    assert isinstance(model[0], PackedLinear)
    assert model[0] is model[2]
    assert [model[0]] == list(model[1].children())
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("cls", [ReadsWeight, ReadsWeightByInheritance])
def test_a_layer_whose_weight_is_read_beside_calling_it_stays_plain(cls: type[ReadsWeight]) -> None:
    model = nn.Sequential(cls())
    assert pack_linears(model) == 0
    model(torch.randn(2, 8))


@needs_packing
def test_packing_twice_changes_nothing() -> None:
    model = Model()
    pack_linears(model)
    head = model.head
    assert pack_linears(model) == 0
    assert model.head is head


@needs_packing
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_computes_the_same_packed(name: str) -> None:
    model = tiny_model(name).requires_grad_(False)
    plain = copy.deepcopy(model)
    num_linears = sum(type(module) is nn.Linear for module in model.modules())
    assert pack_linears(model) == num_linears > 0
    token_ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(token_ids).logits, plain(token_ids).logits, rtol=1e-4, atol=1e-4)


@needs_packing
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_keeping_no_row_skips_the_output_layer(name: str) -> None:
    model = tiny_model(name).requires_grad_(False)
    pack_linears(model)
    shapes: list[torch.Size] = []
    model.get_submodule("lm_head").register_forward_hook(lambda _module, _args, output: shapes.append(output.shape))
    with torch.inference_mode():
        logits = model(torch.arange(3, 20)[None], logits_to_keep=torch.tensor([], dtype=torch.long)).logits
    assert shapes == [logits.shape] == [(1, 0, model.config.vocab_size)]


class Attention(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 12, bias=bias)
        self.k_proj = nn.Linear(8, 4, bias=bias)
        self.v_proj = nn.Linear(8, 4, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


@pytest.mark.parametrize("bias", [False, True])
def test_fused_projections_give_what_each_gave_alone(bias: bool) -> None:
    module = Attention(bias).requires_grad_(False)
    first, second = torch.randn(3, 8), torch.randn(5, 8)
    expected = [module(first), module(second)]
    assert fuse_linears(module) == 1
    for outputs, x in zip(expected, (first, second), strict=True):
        for output, wanted in zip(module(x), outputs, strict=True):
            torch.testing.assert_close(output, wanted)


def test_parts_asked_for_in_another_order_or_with_another_input_are_still_right() -> None:
    module = Attention().requires_grad_(False)
    first, second = torch.randn(3, 8), torch.randn(3, 8)
    keys, queries = module.k_proj(first), module.q_proj(second)
    fuse_linears(module)
    torch.testing.assert_close(module.k_proj(first), keys)
    torch.testing.assert_close(module.q_proj(second), queries)


def test_nothing_is_held_once_the_last_part_was_taken() -> None:
    module = Attention().requires_grad_(False)
    fuse_linears(module)
    module(torch.randn(3, 8))
    part = module.q_proj
    assert isinstance(part, FusedPart)
    assert part.fused._input is None
    assert part.fused._parts == []


def test_layers_that_disagree_on_a_bias_stay_apart() -> None:
    module = Attention()
    module.v_proj = nn.Linear(8, 4)
    assert fuse_linears(module) == 0
    assert type(module.q_proj) is nn.Linear


def test_every_projection_of_a_fused_model_is_packed() -> None:
    model = tiny_model("llama").requires_grad_(False)
    assert fuse_linears(model) == 2 * model.config.num_hidden_layers
    pack_linears(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 4 * model.config.num_hidden_layers + 1


needs_panels = pytest.mark.skipif(not can_panel(torch.zeros(16, 2, dtype=torch.bfloat16)), reason="there is no C++ compiler here")


@needs_panels
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 12, 13, 24, 191, 200, 400])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 2), (32, 64), (48, 30), (576, 1536), (960, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_in_panels_computes_what_its_weight_says(num_rows: int, outputs: int, inputs: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight_OI = torch.randn(outputs, inputs, dtype=torch.bfloat16)
    bias = torch.randn(outputs, dtype=torch.bfloat16) if has_bias else None
    x = torch.randn(2, num_rows, inputs, dtype=torch.bfloat16)
    result = panel_linear(x[1], panels(weight_OI), bias, outputs)
    expected = torch.nn.functional.linear(x[1].float(), weight_OI.float(), None if bias is None else bias.float())
    torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=1e-2 * inputs**0.5)


@needs_panels
def test_a_rows_result_does_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(0)
    weight = panels(torch.randn(64, 96, dtype=torch.bfloat16))
    x = torch.randn(40, 96, dtype=torch.bfloat16)
    whole = panel_linear(x, weight, None, 64)
    for first, count in [(0, 1), (3, 5), (11, 12), (20, 20)]:
        assert torch.equal(panel_linear(x[first : first + count], weight, None, 64), whole[first : first + count])


@needs_panels
@pytest.mark.parametrize("outputs", [32, 17])
def test_processors_without_bfloat16_in_onednn_pack_what_the_kernel_takes(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    model = torch.nn.Sequential(torch.nn.Linear(8, outputs, dtype=torch.bfloat16)).requires_grad_(False)
    assert pack_linears(model) == (outputs == 32)
    assert model(torch.zeros(1, 8, dtype=torch.bfloat16)).shape == (1, outputs)


@needs_panels
def test_other_types_and_sizes_are_told() -> None:
    assert not can_panel(torch.zeros(16, 2))
    assert not can_panel(torch.zeros(17, 2, dtype=torch.bfloat16))
    assert not can_panel(torch.zeros(16, 3, dtype=torch.bfloat16))


@needs_panels
@pytest.mark.parametrize("x", [torch.zeros(1, 64), torch.zeros(1, 32, dtype=torch.bfloat16)])
def test_inputs_that_are_not_the_weights_are_not_read(x: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        panel_linear(x, panels(torch.zeros(16, 64, dtype=torch.bfloat16)), None, 16)


@pytest.mark.parametrize("name", ALL_TYPES)
@pytest.mark.parametrize("num_rows", [16, 33])
def test_rows_are_those_of_the_weight(name: str, num_rows: int) -> None:
    weight = random_weight(name, num_rows, 512)
    rows = torch.tensor([0, 15, num_rows - 1, 7, 7])
    found = pack(weight).unpacked_rows(rows)
    assert found.type == weight.type
    assert torch.equal(found.codes_OI, weight.codes_OI[rows])
    assert torch.equal(found.dequantized(), weight.dequantized()[rows])


@pytest.mark.parametrize("name", ALL_TYPES)
def test_token_ids_of_any_shape_become_rows_of_the_type_asked_for(name: str) -> None:
    weight = random_weight(name, 20, 256)
    embedding = QuantizedEmbedding(pack(weight), torch.bfloat16)
    for shape in ((), (3,), (1, 0), (2, 5)):
        token_ids = torch.randint(20, shape)
        assert torch.equal(embedding(token_ids), weight.dequantized().bfloat16()[token_ids])
    assert embedding.to("meta")(torch.zeros(1, 4, dtype=torch.long, device="meta")).shape == (1, 4, 256)


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_rows_of_extreme_sizes_are_looked_up(bits: int) -> None:
    weight = quantized(torch.randn(20, 96) * torch.logspace(-7, 4, 20)[:, None], bits)
    embedding = QuantizedEmbedding(pack(weight), torch.float32)
    assert torch.equal(embedding(torch.arange(20)), weight.dequantized())


def test_token_ids_may_be_of_any_integer_type_and_lie_apart() -> None:
    embedding = QuantizedEmbedding(pack(quantized(torch.randn(20, 32), 8)), torch.float32)
    token_ids = torch.arange(20)
    assert torch.equal(embedding(token_ids[::2]), embedding(token_ids)[::2])
    assert torch.equal(embedding(token_ids.int()), embedding(token_ids))
