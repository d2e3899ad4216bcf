"""Writes small models as the checkpoints that quantization tools make, by their formats' descriptions."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

Tensors = dict[str, Tensor]
# A layer's tensors, and the weight that they stand for, in float32.
Packer = Callable[[Tensor, Tensor], tuple[Tensors, Tensor]]


def rounded(weight_OI: Tensor, bits: int, groups_I: Tensor, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [O, I], scales [O, G] in half precision, and zero points [O, G] of integers."""
    scales, zero_points = [], []
    for group in range(int(groups_I.max()) + 1):
        columns = weight_OI[:, groups_I == group]
        low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
        if is_symmetric:
            high = columns.abs().amax(1)
            low = -high
        scales.append(((high - low) / (2**bits - 1)).clamp(min=1e-4).half())
        middle = torch.full_like(low, 2 ** (bits - 1))
        zero_points.append((middle if is_symmetric else (-low / scales[-1].float()).round()).clamp(0, 2**bits - 1).long())
    scales_OG, zero_points_OG = torch.stack(scales, 1), torch.stack(zero_points, 1)
    codes = (weight_OI / scales_OG.float()[:, groups_I]).round() + zero_points_OG[:, groups_I]
    return codes.clamp(0, 2**bits - 1).long(), scales_OG, zero_points_OG


def restored(codes_OI: Tensor, scales_OG: Tensor, zero_points_OG: Tensor, groups_I: Tensor) -> Tensor:
    return (codes_OI - zero_points_OG[:, groups_I]).float() * scales_OG.float()[:, groups_I]


def int32s(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Several codes along `dim` in one integer of 32 bits, the first in the lowest place; missing ones are zeros."""
    per = 32 // bits
    moved = codes.movedim(dim, -1)
    moved = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % per)).unflatten(-1, (-1, per))  # type: ignore[no-untyped-call]
    whole = sum(moved[..., place] << bits * place for place in range(per))
    assert isinstance(whole, Tensor)
    return torch.where(whole >= 2**31, whole - 2**32, whole).to(torch.int32).movedim(-1, dim).contiguous()


def gptq(bits: int, group: int, is_symmetric: bool, *, version: int = 1, has_order: bool = False) -> Packer:
    def pack(weight_OI: Tensor, groups_I: Tensor) -> tuple[Tensors, Tensor]:
        inputs = weight_OI.shape[1]
        groups_I = groups_I if has_order else torch.arange(inputs) // group
        codes, scales, zero_points = rounded(weight_OI, bits, groups_I, is_symmetric)
        stored = (zero_points - int(version == 1)) % 2**bits
        tensors = {
            "qweight": int32s(codes.T, bits, 0),
            "qzeros": int32s(stored.T, bits, 1),
            "scales": scales.T.contiguous(),
            "g_idx": groups_I.to(torch.int32),
        }
        return tensors, restored(codes, scales, zero_points, groups_I)

    return pack


def awq(group: int) -> Packer:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def shuffled(codes: Tensor) -> Tensor:
        return int32s(codes.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4, 1)  # type: ignore[no-untyped-call]

    def pack(weight_OI: Tensor, _: Tensor) -> tuple[Tensors, Tensor]:
        groups_I = torch.arange(weight_OI.shape[1]) // group
        codes, scales, zero_points = rounded(weight_OI, 4, groups_I, False)
        tensors = {"qweight": shuffled(codes.T), "qzeros": shuffled(zero_points.T), "scales": scales.T.contiguous()}
        return tensors, restored(codes, scales, zero_points, groups_I)

    return pack


def pack_quantized(bits: int, group: int | None, is_symmetric: bool, *, has_order: bool = False) -> Packer:
    def pack(weight_OI: Tensor, groups_I: Tensor) -> tuple[Tensors, Tensor]:
        inputs = weight_OI.shape[1]
        groups_I = groups_I if has_order else torch.arange(inputs) // (group or inputs)
        codes, scales, zero_points = rounded(weight_OI, bits, groups_I, is_symmetric)
        tensors = {
            "weight_packed": int32s(codes, bits, 1),
            "weight_scale": scales.float(),
            "weight_shape": torch.tensor(weight_OI.shape),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = int32s(zero_points, bits, 0)
        if has_order:
            tensors["weight_g_idx"] = groups_I.to(torch.int32)
        return tensors, restored(codes, scales, zero_points, groups_I)

    return pack


def int_quantized(is_symmetric: bool = True) -> Packer:
    def pack(weight_OI: Tensor, _: Tensor) -> tuple[Tensors, Tensor]:
        groups_I = torch.zeros(weight_OI.shape[1]).long()
        codes, scales, zero_points = rounded(weight_OI, 8, groups_I, is_symmetric)
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales.float()}
        if not is_symmetric:
            tensors["weight_zero_point"] = (zero_points - 128).to(torch.int8)
        return tensors, restored(codes, scales, zero_points, groups_I)

    return pack


def float8(scale_name: str, block: tuple[int, int] | None = None, *, of_tensor: bool = False) -> Packer:
    """A scale for each block, each row or, `of_tensor`, for all."""

    def pack(weight_OI: Tensor, _: Tensor) -> tuple[Tensors, Tensor]:
        outputs, inputs = weight_OI.shape
        rows, columns = block or ((outputs, inputs) if of_tensor else (1, inputs))
        scales, whole = torch.empty(-(-outputs // rows), -(-inputs // columns)), torch.empty(outputs, inputs)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight_OI[part].abs().max() / 448
                whole[part] = scales[i, j]
        codes = (weight_OI / whole).to(torch.float8_e4m3fn)
        return {"weight": codes, scale_name: scales.reshape(1) if of_tensor else scales}, codes.float() * whole

    return pack


def calibrated(pack: Packer, **more: Tensor) -> Packer:
    """With what a calibration found for the layer's activations."""

    def pack_all(weight_OI: Tensor, groups_I: Tensor) -> tuple[Tensors, Tensor]:
        tensors, weight_OI = pack(weight_OI, groups_I)
        return {**tensors, **{name: tensor.clone() for name, tensor in more.items()}}, weight_OI

    return pack_all


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4(weight_OI: Tensor, _: Tensor) -> tuple[Tensors, Tensor]:
    groups_OGS = weight_OI.unflatten(1, (-1, 32))  # type: ignore[no-untyped-call]
    exponents_OG1 = (groups_OGS.abs().amax(-1, keepdim=True) / 6).clamp(min=2.0**-20).log2().ceil()
    scaled = groups_OGS / 2**exponents_OG1
    sizes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    codes_OI = (sizes + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
    restored = (E2M1[sizes] * scaled.sign() * 2**exponents_OG1).flatten(1)
    scales = (exponents_OG1[..., 0] + 127).to(torch.uint8)
    return {"weight_packed": codes_OI[:, ::2] | codes_OI[:, 1::2] << 4, "weight_scale": scales}, restored


def compressed_tensors(stored: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The `quantization_config`."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def int_weights(bits: int, group: int | None, is_symmetric: bool, **more: Any) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    return {"num_bits": bits, "type": "int", "symmetric": is_symmetric, "strategy": strategy, "group_size": group, **more}


def _float_weights(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


@dataclass(frozen=True)
class Format:
    """How a checkpoint is written, and in which types it is served. Inputs are 128 and 256."""

    config: dict[str, Any]
    pack: Packer
    types: tuple[str, ...]
    order_group: int | None = field(default=None)  # of columns in any order


DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
FORMATS = {
    "gptq": Format(_GPTQ, gptq(4, 128, True), ("INT4",)),
    "gptq-asymmetric": Format({**_GPTQ, "sym": False}, gptq(4, 128, False), ("UINT4",)),
    "gptq-v2": Format({**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, gptq(4, 128, False, version=2), ("UINT4",)),
    "gptq-order": Format(
        {**_GPTQ, "group_size": 32, "desc_act": True, "sym": False}, gptq(4, 32, False, has_order=True), ("Q5_0",), order_group=32
    ),
    "gptq-int8": Format({**_GPTQ, "bits": 8, "group_size": 64}, gptq(8, 64, True), ("Q8_0",)),
    "gptq-int8-asymmetric": Format({**_GPTQ, "bits": 8, "group_size": 64, "sym": False}, gptq(8, 64, False), ("UINT8",)),
    "gptq-int8-order": Format(
        {**_GPTQ, "bits": 8, "group_size": 32, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(8, 32, False, version=2, has_order=True),
        ("UINT8",),
        order_group=32,
    ),
    "gptq-rows": Format({**_GPTQ, "group_size": -1}, gptq(4, 10**6, True), ("INT4",)),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm", "modules_to_not_convert": None},
        awq(128),
        ("UINT4",),
    ),
    "pack": Format(compressed_tensors("pack-quantized", int_weights(4, 64, True)), pack_quantized(4, 64, True), ("Q4_0",)),
    "pack-asymmetric": Format(compressed_tensors("pack-quantized", int_weights(4, 128, False)), pack_quantized(4, 128, False), ("UINT4",)),
    "pack-order": Format(
        compressed_tensors("pack-quantized", int_weights(4, 64, True, actorder="group")),
        pack_quantized(4, 64, True, has_order=True),
        ("Q4_0",),
        order_group=64,
    ),
    "pack-int8": Format(compressed_tensors("pack-quantized", int_weights(8, None, True)), pack_quantized(8, None, True), ("Q8_0",)),
    "pack-int8-asymmetric": Format(
        compressed_tensors("pack-quantized", int_weights(8, 128, False)), pack_quantized(8, 128, False), ("UINT8",)
    ),
    "w8a8-asymmetric": Format(compressed_tensors("int-quantized", int_weights(8, None, False), DYNAMIC), int_quantized(False), ("UINT8",)),
    "w8a8": Format(compressed_tensors("int-quantized", int_weights(8, None, True), DYNAMIC), int_quantized(), ("Q8_0",)),
    "mxfp4": Format(
        compressed_tensors(
            "mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
        ),
        mxfp4,
        ("MXFP4",),
    ),
    "fp8-rows": Format(
        compressed_tensors("float-quantized", _float_weights("channel"), {**DYNAMIC, "type": "float"}), float8("weight_scale"), ("FP8",)
    ),
    "fp8-tensor": Format(compressed_tensors("float-quantized", _float_weights("tensor")), float8("weight_scale", of_tensor=True), ("FP8",)),
    "fp8-blocks": Format(
        compressed_tensors("float-quantized", _float_weights("block", block_structure=[64, 128])),
        float8("weight_scale", (64, 128)),
        ("FP8",),
    ),
    "fp8-deepseek": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        float8("weight_scale_inv", (128, 128)),
        ("FP8",),
    ),
    "fp8-static": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"},
        calibrated(float8("weight_scale", of_tensor=True), input_scale=torch.tensor(0.25)),
        ("FP8",),
    ),
    "fp8-static-inv": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        calibrated(float8("weight_scale_inv", of_tensor=True), activation_scale=torch.tensor(0.25).bfloat16()),
        ("FP8",),
    ),
    "fp8-static-tensor": Format(
        {**compressed_tensors("float-quantized", _float_weights("tensor"), STATIC), "kv_cache_scheme": STATIC},
        calibrated(float8("weight_scale", of_tensor=True), input_scale=torch.tensor([0.25])),
        ("FP8",),
    ),
    "w8a8-static": Format(
        compressed_tensors("int-quantized", int_weights(8, None, True), {**STATIC, "type": "int", "symmetric": False}),
        calibrated(int_quantized(), input_scale=torch.tensor([0.25]), input_zero_point=torch.tensor([3], dtype=torch.int8)),
        ("Q8_0",),
    ),
}


def write_checkpoint(directory: Path, model: PreTrainedModel, stored: Format) -> dict[str, Tensor]:
    """Writes the model with the linear layers of its decoder quantized, and gives the model's weights with what they stand for.

    Projections of one input have their columns in one order, where they have any. Keys and values have scales where the config says so.
    """
    torch.manual_seed(0)
    tensors, weights = {}, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    orders: dict[tuple[str, int], Tensor] = {}
    for name, weight in list(weights.items()):
        layer = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.contiguous()
            continue
        inputs = weight.shape[1]
        key = (layer.rpartition(".")[0] + ("" if layer.endswith(("o_proj", "down_proj")) else ".inputs"), inputs)
        if stored.order_group is not None and key not in orders:
            orders[key] = (torch.arange(inputs) // stored.order_group)[torch.randperm(inputs)]
        packed, weights[name] = stored.pack(weight.float(), orders.get(key, torch.zeros(inputs).long()))
        tensors |= {f"{layer}.{part}": tensor for part, tensor in packed.items()}
        if stored.config.get("kv_cache_scheme") and name.endswith(("k_proj.weight", "v_proj.weight")):
            attention, _, projection = layer.rpartition(".")
            tensors[f"{attention}.{projection[0]}_scale"] = torch.tensor([0.5])
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    change_config(directory, lambda config: config.update(quantization_config=stored.config))
    return weights


def change_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def change_tensors(directory: Path, change: Callable[[Tensors], None]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
