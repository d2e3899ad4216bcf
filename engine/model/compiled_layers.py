"""Runs decoder layers as compiled code once it is ready. Until then, and wherever they cannot be compiled, they run as they are.

Compiled ahead of time rather than by `torch.compile`: what that saves in a small model's layer it spends again on guards (measured: 19 ms a
step either way, 16 without them), and compiling in this process would block every stream for seconds.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock import __version__
from penstock.engine.attention.interface import AttentionMetadata
from penstock.engine.model.loader import LoadedModel
from penstock.engine.native.runtime import find_compiler, processor_features
from penstock.engine.system.cache import cache_directory, check_private, make_private
from penstock.engine.weights.quantization import quantized_layers

logger = logging.getLogger(__name__)

COMPILED_FROM = (
    "attention/interface",
    "model/compiled_layers",
    "model/fused",
    "model/layer_compiler",
    "weights/linear",
    "weights/experts",
    "weights/float8",
)
# Relative, of a layer's output: what rounding in another order amounts to, with room. Quantized layers round their inputs to 8 bits.
MAX_DEVIATION = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
MAX_DEVIATION_QUANTIZED = 3e-2
Runner = Callable[[list[Tensor]], list[Tensor]]


class CompiledLayer:
    """Replaces one layer's `forward`.

    Its first call computes the layer both ways and goes back to the layer as it was where the two disagree. Computing a layer twice is
    harmless: it writes the same keys and values to the same slots.
    """

    def __init__(self, run: Runner, layer: nn.Module) -> None:
        self._run = run
        self._layer = layer
        self._uncompiled = layer.forward
        self._own = list(layer_tensors(layer).values())
        self._is_checked = False

    def undo(self) -> None:
        """The layer is as it was."""
        self._layer.forward = self._uncompiled

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        output = self._run([*self._own, *call_tensors(args, kwargs)])[0]
        return output if self._is_checked else self._check(output, self._uncompiled(*args, **kwargs))

    def _check(self, output: Tensor, expected: Tensor) -> Tensor:
        self._is_checked = True
        deviation = float((output.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))
        if deviation < (MAX_DEVIATION_QUANTIZED if quantized_layers(self._layer) else MAX_DEVIATION[expected.dtype]):
            return output
        logger.warning("A compiled decoder layer deviates by %.1e and runs uncompiled.", deviation)
        self.undo()
        return expected


class LayerCompilation:
    """The compiled code of a model's layers, from the user's cache directory or made by other processes.

    `compile` takes long and touches nothing of the model; `install` is quick and belongs in the model's thread. `cancel` may come from
    any thread. Raises `ConfigurationError` where other users could write there.
    """

    def __init__(self, loaded: LoadedModel, *, block_size: int = 16, trust_remote_code: bool = False) -> None:
        self._loaded = loaded
        self._block_size = block_size
        self._trust_remote_code = trust_remote_code
        self._layers = decoder_layers(loaded.model, loaded.config.get_text_config(decoder=True).num_hidden_layers)
        self._kinds = list(dict.fromkeys(map(layer_kind, self._layers)))
        self._directory = cache_directory() / "layers" / _cache_key(loaded)
        check_private(self._directory)
        self._process: subprocess.Popen[str] | None = None
        self._is_cancelled = False

    @property
    def is_possible(self) -> bool:
        return self._loaded.device.type == "cpu" and bool(self._layers) and find_compiler() is not None

    @property
    def is_cached(self) -> bool:
        return all(self._package(kind).exists() for kind in self._kinds)

    def compile(self) -> bool:
        """Compiles what is missing at the lowest priority. False, with the reason logged, where the compiler gives up."""
        try:
            make_private(self._directory)
        except OSError as error:
            logger.warning("The decoder layers run uncompiled: %s", error)
            return False
        if not all(self._package(kind).exists() or self._compile_kind(kind) for kind in self._kinds):
            return False
        import torch._inductor.cpu_vec_isa  # as below: takes a second, and most models are not compiled

        try:
            # Loading asks which instructions the processor has. The first answer takes imports and runs of the C++ compiler, which no
            # stream should wait for.
            torch._inductor.cpu_vec_isa.pick_vec_isa()
        except Exception as error:
            logger.warning("The decoder layers run uncompiled: %s: %s", type(error).__name__, error)
            return False
        return True

    def cancel(self) -> None:
        """Ends the compiler; `compile` returns False soon."""
        self._is_cancelled = True
        if self._process is not None:
            self._process.kill()

    def install(self) -> None:
        """From here on the layers run as compiled code.

        Raises `RuntimeError` where it does not load, and is no longer cached then, and `ConfigurationError` as `check_private`.
        """
        try:
            for kind in self._kinds:
                check_private(self._package(kind))
            runners = {kind: _load(self._package(kind)) for kind in self._kinds}
        except RuntimeError:
            for kind in self._kinds:
                self._package(kind).unlink(missing_ok=True)
            raise
        for layer in self._layers:
            layer.forward = CompiledLayer(runners[layer_kind(layer)], layer)

    def _package(self, kind: str) -> Path:
        return self._directory / f"{kind}.pt2"

    def _compile_kind(self, kind: str) -> bool:
        with tempfile.TemporaryDirectory(dir=self._directory) as scratch:
            built = Path(scratch) / self._package(kind).name
            # Precompiled headers are in a directory of a predictable name in TMPDIR, whatever torch's cache directory is.
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": scratch, "TMPDIR": scratch, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                self._command(kind, built),
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # a Ctrl-C is for the server, which ends this in its own time
            )
            if self._is_cancelled:
                self._process.kill()
            _, errors = self._process.communicate()
            if self._process.returncode != 0:
                if not self._is_cancelled:
                    logger.warning("The decoder layers run uncompiled: %s", " ".join(errors.strip().splitlines()[-1:]))
                return False
            built.chmod(0o600)
            built.replace(self._package(kind))
        return True

    def _command(self, kind: str, target: Path) -> list[str]:
        polite = ["nice", "-n", "19"] if shutil.which("nice") else []
        dtype = str(self._loaded.dtype).removeprefix("torch.")
        command = [sys.executable, "-m", "penstock.engine.model.layer_compiler", str(self._loaded.directory), dtype, kind, str(target)]
        command += ["--quantization", self._loaded.quantization, "--block-size", str(self._block_size)]
        return polite + command + ["--trust-remote-code"] * self._trust_remote_code


def _cache_key(loaded: LoadedModel) -> str:
    """Whatever the compiled code was made from: the versions, the processor, the model's config, and our own side of the calls."""
    versions = [__version__, torch.__version__, version("transformers")]
    parts = [*versions, str(loaded.dtype), processor_features(), loaded.config.to_json_string()]
    sources = [Path(__file__).parents[1].joinpath(f"{name}.py").read_bytes() for name in COMPILED_FROM]
    return hashlib.sha256("\0".join(parts).encode() + b"".join(sources)).hexdigest()[:20]


def _load(package: Path) -> Runner:
    import torch._inductor

    try:
        model = torch._inductor.aoti_load_package(str(package))
    except Exception as error:
        raise RuntimeError(f"what was compiled does not load: {type(error).__name__}: {error}") from error
    run: Runner = model.loader.boxed_run
    return run


if TYPE_CHECKING:
    pass


def decoder_layers(model: nn.Module, num_layers: int) -> list[nn.Module]:
    """The layers in order: the one list of modules that is as long as the config says. Empty where there is no such list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    return list(lists[0]) if len(lists) == 1 else []


def layer_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Everything in the layer that a computation reads, the KV cache included."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def layer_kind(layer: nn.Module) -> str:
    """Layers of one kind differ in nothing but their number and what is in their tensors, and share one compiled function."""

    def describe() -> Iterator[str]:
        for name, tensor in layer_tensors(layer).items():
            # How many blocks the cache has does not matter to compiled code.
            shape = tensor.shape[1:] if name.endswith(("key_cache", "value_cache")) else tensor.shape
            yield f"{name} {tuple(shape)} {tensor.dtype}"
        for path, module in layer.named_modules():
            settings = {
                name: setting
                for name, setting in vars(module).items()
                if isinstance(setting, bool | int | float | str) and name not in ("layer_idx", "training") and not name.startswith("_")
            }
            yield f"{path} {type(module).__qualname__} {sorted(settings.items())}"

    return hashlib.sha256("\n".join(describe()).encode()).hexdigest()[:20]


def call_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among a layer's arguments, in order. Of the attention metadata these are `packed` and the block tables."""
    tensors: list[Tensor] = []
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, tuple):
            tensors += argument
        elif isinstance(argument, AttentionMetadata):
            tensors += (argument.packed, argument.block_tables_PN)
    return tensors


def rebuild_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with other tensors: what `call_tensors` takes apart, put together."""
    remaining = iter(tensors)

    def rebuild(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return next(remaining)
        if isinstance(argument, tuple):
            return tuple(next(remaining) for _ in argument)
        if isinstance(argument, AttentionMetadata):
            return SimpleNamespace(packed=next(remaining), block_tables_PN=next(remaining))
        return argument

    return tuple(rebuild(argument) for argument in args), {name: rebuild(argument) for name, argument in kwargs.items()}
