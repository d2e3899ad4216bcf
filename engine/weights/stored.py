"""Has transformers load a model without the weights that its directory holds in few bits."""

import re
from collections.abc import Callable, Collection
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from penstock.engine.weights.experts import has_experts
from penstock.engine.weights.quantization import Places, leave_out

METHOD = "penstock"


@register_quantization_config(METHOD)
class StoredWeightsConfig(QuantizationConfigMixin):
    """Makes `from_pretrained` leave out these parameters of the model; afterwards `places` says where they belong, and `renamed` what the
    model calls them, but for those that another rank has.

    Those begin with one of `absent_paths`. Tensors of the weight files whose names end in one of `tensor_names` are read elsewhere.

    transformers builds a model, then reads its weights. Layers that have lost theirs in between cost neither memory nor time.
    """

    def __init__(
        self,
        names: Collection[str],
        tensor_names: Collection[str] = (),
        absent_paths: Callable[[PreTrainedModel], tuple[str, ...]] = lambda model: (),
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers lists its own methods, and takes others
        self.names = names
        self.tensor_names = tensor_names
        self.absent_paths = absent_paths
        self.places: Places = {}
        self.renamed: dict[str, str] = {}


@register_quantizer(METHOD)
class StoredWeightsQuantizer(HfQuantizer):
    quantization_config: StoredWeightsConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        renamed, absent = _renamed(model, self.quantization_config.names), self.quantization_config.absent_paths(model)
        self.quantization_config.renamed = {name: own for name, own in renamed.items() if not own.startswith(absent)}
        self.quantization_config.places = leave_out(model, list(self.quantization_config.renamed.values()))
        read_elsewhere = {rf"\.{re.escape(name)}$" for name in self.quantization_config.tensor_names}
        paths = {path for paths in self.quantization_config.places.values() for path in paths}
        # transformers goes by the names that the weights of all experts together would have.
        read_elsewhere |= {rf"^{re.escape(path)}\.\w+_proj$" for path in paths if has_experts(model.get_submodule(path))}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *read_elsewhere}

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _renamed(model: PreTrainedModel, names: Collection[str]) -> dict[str, str]:
    """What transformers makes of names in a file, where modules were called otherwise when it was written.

    Without what the model's class leaves unread, as layers for multi-token prediction.
    """
    own = model.state_dict()
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    renamed = {name: rename_source_key(name, renamings, [], model.base_model_prefix, own)[0] for name in names}
    unread = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    of_experts = tuple(f"{path}." for path, module in model.named_modules() if has_experts(module))

    def is_read(own_name: str) -> bool:
        return own_name in own or own_name.startswith(of_experts) or not any(pattern.search(own_name) for pattern in unread)

    return {name: own_name for name, own_name in renamed.items() if is_read(own_name)}


def forget_config(model: PreTrainedModel) -> None:
    """Takes the `StoredWeightsConfig` that it was loaded with off the model, which to all other code is one of plain weights."""
    quantizer: Any = model.hf_quantizer
    quantizer.remove_quantization_config(model)
