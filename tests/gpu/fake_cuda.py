# mypy: disable-error-code="import-untyped"
"""A CUDA device that is not there: tensors that say they are on `cuda:0`, whose numbers are computed on the CPU.

All that the engine does with torch on a GPU goes through torch's own dispatcher: operands on two devices are an error, and so is, in a
capture, whatever a CUDA graph cannot hold. Each wait for the device is recorded with the place in the engine that waits. In place of the
Triton kernels, their references in plain torch compute, over operands that are all on the device. Whether the kernels compute the same is
what tests/engine/kernels are for; how long anything takes is not shown.
"""

import ctypes
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from penstock.engine.attention import cuda as attention_cuda
from penstock.engine.kernels import (
    attention_triton,
    launch,
    layers_triton,
    quantized,
    quantized_triton,
    recurrent_triton,
    references,
    sampling_triton,
)
from penstock.engine.model import adapted, fused
from penstock.engine.recurrent import states
from penstock.engine.sampling import rows
from tests.engine.kernels import quantized_references

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
CAPABILITY = (9, 0)
BACKEND = make_backend(GPUTarget("cuda", 90, 32))
NUM_MULTIPROCESSORS = 132
NUM_DEVICE_TYPES, CUDA_TYPE, META_TYPE = 22, 1, 14  # of c10::DeviceType
FREE_MEMORY, MEMORY = 2**27, 2**34  # bytes
CAPTURE_ERROR = "CUDA error: operation not permitted when stream is capturing"

# What reads a number, or a number of elements, from the device.
READS = {aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.nonzero, aten.masked_select, aten.equal, aten.unique_dim, aten._unique2}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
COPIES = {aten._to_copy, aten.copy_}
WITHOUT_KERNEL = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten._unsafe_view}
WHOLE = {aten.scaled_dot_product_attention}  # its parts are other ones on each device
# What only a GPU takes in some of its types.
WIDENED = {aten.histc}


class CudaTensor(Tensor):
    """A tensor of the fake device, around the CPU tensor with its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "CudaTensor":
        with torch.inference_mode(False):  # a view of a weight must not be an inference tensor; `held` is what torch would make it
            wrapper: CudaTensor = Tensor._make_wrapper_subclass(
                cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=DEVICE
            )
        wrapper.held = held
        return wrapper

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CudaTensor({self.held})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub takes it for a method of instances
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        device = FakeCuda.current
        assert device is not None, "a tensor of the fake device is used after its time"
        return device.run(func, args, kwargs or {})


def _is_sequence_length(func: Any, args: Any, kwargs: Any) -> bool:
    return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None


class _Thread(threading.local):
    """What torch keeps for each thread."""

    device: int | None = None
    tape: "list[Callable[[], None]] | None" = None


class FakeCuda:
    """The device and what has been seen of it. One at a time: `fake_cuda` makes it and takes it away.

    `waits` counts the places that waited for the device, "module function", by thread: "model", "results" or another's name.
    `launches` counts kernels by name, torch's own (such as "aten.mm") and Triton's. With `failure`, all that is launched fails, and with
    `capture_error` each capture.
    """

    current: "FakeCuda | None" = None

    def __init__(self) -> None:
        self.waits: Counter[tuple[str, str]] = Counter()
        self.lines: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.num_replays = 0
        self.set_devices: dict[str, int] = {}
        self.peak_memory = 0
        self.variants: set[tuple[str, str]] = set()
        self.failure: Exception | None = None
        self.capture_error: Exception | None = None
        self._pools_captured_to: set[object] = set()
        self._pinned: dict[int, Tensor] = {}
        self._copies_under_way: list[tuple[Tensor, Tensor]] = []
        self._copying = threading.Lock()
        self._thread = _Thread()

    def clear(self) -> None:
        """Forgets what it has seen."""
        self.waits.clear()
        self.lines.clear()
        self.launches.clear()

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other tensor gets its address
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def wait(self) -> None:
        """What the caller does, the CPU does not go on from before the device has come so far."""
        if self._thread.tape is not None:
            raise RuntimeError(CAPTURE_ERROR)
        place, line = _place()
        thread = threading.current_thread().name.split("_")[0]
        self.waits[thread, place] += 1
        self.lines[line] += 1
        with self._copying, torch.inference_mode():  # the results' thread must not go on while the model's thread carries out its copy
            copies, self._copies_under_way = self._copies_under_way, []
            for target, source in copies:
                target.copy_(source)

    def launch(self, name: str, variant: str, *operands: Any) -> None:
        """What a launch of a Triton kernel has to hold to. A kernel is compiled for each of its `variants`."""
        self.variants.add((name, variant))
        for operand in operands:
            assert not isinstance(operand, Tensor) or isinstance(operand, CudaTensor), f"a kernel is given a tensor on {operand.device}"
        assert self._thread.device == DEVICE.index, "Triton launches on the thread's current device, and nothing has set it here"
        self.launches[name] += 1

    def compute(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function over CPU tensors on those of the device, as one operation."""
        return self._compute(work, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation of torch's with a tensor of the device among its operands, or a result there."""
        packet = func._overloadpacket
        if packet not in WHOLE and (result := func.decompose(*args, **kwargs)) is not NotImplemented:
            return result  # in inference mode, torch leaves it to us to take composite operations apart
        if packet in COPIES:
            return self._copy(func, args, kwargs)
        tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        strangers = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor) and tensor.dim() > 0]
        if packet in INDEXING:
            if args[0].dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                raise NotImplementedError(f'"index_cuda" not implemented for {args[0].dtype}')  # in some versions of torch
            if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _indices(args)) or any(
                tensor is index for tensor in strangers for index in _indices(args)
            ):
                self.wait()  # for the number of places; for the copy of the indices
            strangers = [tensor for tensor in strangers if all(tensor is not index for index in _indices(args))]
        if strangers:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got one on {DEVICE} and one on the CPU")
        if packet in READS or _is_sequence_length(func, args, kwargs):
            self.wait()
        if "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "cpu":
            return func(*_held(args), **_held(kwargs))
        return self._compute(func, args, kwargs)

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Between the devices, or on this one."""
        if func._overloadpacket is aten._to_copy:
            source, device = args[0], kwargs.get("device")
            device = source.device if device is None else torch.device(device)
            blocks = not kwargs.get("non_blocking")
        else:
            target, source = args[0], args[1]
            device = target.device
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if source.device.type == device.type == "cuda":
            return self._compute(func, args, kwargs)
        if device.type == "cuda":
            # From pageable memory, the driver waits for all that was queued before, whatever the caller says.
            if source.numel() and (blocks or not self.is_pinned(source)):
                self.wait()
            return self._compute(func, args, kwargs, from_host=True)
        if func._overloadpacket is aten._to_copy or blocks or not self.is_pinned(args[0]):
            self.wait()
            return func(*_held(args), **_held(kwargs))
        self._copies_under_way.append((args[0], source.held.clone()))
        return args[0]

    def _compute(self, work: Any, args: Any, kwargs: Any, from_host: bool = False) -> Any:
        if self.failure is not None:
            raise self.failure
        packet = getattr(work, "_overloadpacket", None)
        if packet is not None and not work.is_view and packet not in WITHOUT_KERNEL:
            self.launches[str(packet)] += 1
        if packet in WIDENED:
            work = functools.partial(_in_floats, work)
        held_args, held_kwargs = _held(args), _held(kwargs)
        result = work(*held_args, **held_kwargs)
        known = {id(leaf.held): leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, CudaTensor)}
        assert all(leaf.shape == leaf.held.shape for leaf in known.values()), f"{work} resizes a tensor in place"
        tape = self._thread.tape
        if tape is not None:
            tape.append(functools.partial(_again, work, held_args, held_kwargs, result))
        return _mapped(
            lambda leaf: (known[id(leaf)] if id(leaf) in known else CudaTensor(leaf)) if isinstance(leaf, Tensor) else leaf, result
        )

    # What is called of `torch.cuda`.

    def set_device(self, index: int) -> None:
        self._thread.device = index
        self.set_devices[threading.current_thread().name] = index

    def current_device(self) -> int:
        return self._thread.device or 0

    def exchange_device(self, index: int) -> int:
        before, self._thread.device = self._thread.device, index
        return 0 if before is None else before

    @contextmanager
    def capture(self, graph: "FakeGraph", *, pool: object, stream: object = None, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "the event loop's copies would end the capture"
        assert self._thread.tape is None
        tape: list[Callable[[], None]] = []
        self._thread.tape = tape
        self._pools_captured_to.add(pool)
        try:
            yield
            if self.capture_error is not None:
                raise self.capture_error
        finally:
            self._thread.tape = None
        self._pools_captured_to.discard(pool)  # as torch did before 2.13: only where the capture has not failed
        graph.tape = tape

    def end_allocate_to_pool(self, index: int, pool: object) -> None:
        assert index == DEVICE.index
        if pool not in self._pools_captured_to:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self._pools_captured_to.discard(pool)

    def empty_cache(self) -> None:
        if self._pools_captured_to:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")


class FakeGraph:
    """A CUDA graph."""

    tape: list[Callable[[], None]] | None = None

    def replay(self) -> None:
        assert self.tape is not None, "nothing was captured"
        device = FakeCuda.current
        assert device is not None
        device.num_replays += 1
        for repeat in self.tape:
            repeat()


class FakeStream:
    """A stream: all work is in order here, whatever stream it is on."""

    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, stream: "FakeStream") -> None:
        pass

    def synchronize(self) -> None:
        assert FakeCuda.current is not None
        FakeCuda.current.wait()


class FakeEvent:
    """An event: waiting for it is waiting for the device."""

    def __init__(self, *, blocking: bool = False, enable_timing: bool = False) -> None:
        self.blocking = blocking

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        assert self.blocking, "the thread that waits would spin on a core"
        assert FakeCuda.current is not None
        FakeCuda.current.wait()


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """As torch's own `tree_map`, at a fraction of its cost: operands are in tuples, lists and dicts."""
    if type(tree) in (tuple, list):
        return type(tree)([_mapped(change, branch) for branch in tree])
    if type(tree) is dict:
        return {name: _mapped(change, branch) for name, branch in tree.items()}
    return change(tree)


def _leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    _mapped(leaves.append, tree)
    return leaves


def _held(tree: Any) -> Any:
    """The CPU tensors in place of those on the device, and the CPU in place of the device."""
    return _mapped(lambda leaf: leaf.held if isinstance(leaf, CudaTensor) else CPU if isinstance(leaf, torch.device) else leaf, tree)


def _in_floats(func: Any, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = func(source.float(), *args, **kwargs)
    return result.to(source.dtype)


def _indices(args: Any) -> list[Tensor]:
    return [index for index in args[1] if index is not None]


def _again(work: Callable[..., Any], args: Any, kwargs: Any, recorded: Any) -> None:
    """Leaves a call's result where later calls on the tape look for it. Views and what was changed in place are there already."""
    for source, target in zip(_leaves(work(*args, **kwargs)), _leaves(recorded), strict=True):
        if isinstance(source, Tensor) and source.data_ptr() != target.data_ptr():
            target.copy_(source)


def _place() -> tuple[str, str]:
    """Where in the engine, or in the model's code, the caller is: "module function", and the line, for the message of a test."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if "/transformers/models/" in path or ("/engine/" in path and "/tests/" not in path):
            module = path.split("/engine/")[-1].split("/transformers/")[-1].removesuffix(".py")
            return f"{module} {frame.f_code.co_name}", f"{module}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere", "elsewhere"


# Every Triton kernel, and where it is looked up.
KERNELS = {
    attention_triton: ("kv_write_kernel", "merge_splits_kernel", "paged_decode_kernel", "plan_splits_kernel", "varlen_prefill_kernel"),
    layers_triton: ("add_rms_norm_kernel", "gated_kernel", "rms_norm_kernel", "rotate_kernel", "shrink_kernel", "expand_kernel"),
    quantized_triton: ("quantized_linear_kernel", "dequantize_kernel", "float8_linear_kernel", "dequantize_float8_kernel"),
    recurrent_triton: ("gated_delta_kernel", "state_space_kernel"),
    sampling_triton: ("bitmask_apply_kernel", "sample_kernel"),
}
# Each function that launches kernels, and the modules that have imported it.
LAUNCHERS: dict[str, tuple[Any, ...]] = {
    "kv_write": (attention_cuda,),
    "paged_decode": (attention_cuda,),
    "varlen_prefill": (attention_cuda,),
    "bitmask_apply": (launch,),
    "add_rms_norm": (fused,),
    "gated": (fused,),
    "rms_norm": (fused,),
    "rotate": (fused,),
    "sample": (rows,),
    "add_low_rank": (adapted,),
    **dict.fromkeys(("gated_delta_update", "state_space_update"), (states,)),
    **dict.fromkeys(("quantized_linear", "grouped_linear", "dequantized_rows", "float8_linear", "grouped_float8_linear"), (quantized,)),
}


class _Kernel:
    """Stands in for a Triton kernel: looks at the operands of a launch, and at what Triton would compile the kernel for."""

    def __init__(self, kernel: Any, name: str, device: FakeCuda) -> None:
        self.name = name
        self.device = device
        self._bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*operands: Any, **constants: Any) -> None:
            _, specialization, options = self._bind(*_held(operands), **constants)
            self.device.launch(self.name, str((specialization, options)), *operands)

        return launch


def _launcher(name: str, device: FakeCuda) -> Callable[..., Any]:
    """The engine's own function, whose kernel computes nothing here, and then its reference for the numbers."""
    modules = LAUNCHERS[name]
    own, reference = getattr(modules[0], name), getattr(quantized_references if quantized in modules else references, name)

    @functools.wraps(own)
    def launcher(*args: Any, **kwargs: Any) -> Any:
        own(*args, **kwargs)
        return device.compute(functools.partial(_by_reference, name, reference), *args, **kwargs)

    return launcher


def _by_reference(name: str, reference: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    out, first = kwargs.pop("out", None), kwargs.pop("first_sequence", 0)
    for tuning in ("splits", "max_query_len", "shares_keys"):
        kwargs.pop(tuning, None)
    if name == "paged_decode":  # only the first sequences are decodes
        args = tuple(argument[: len(args[0])] if argument.dim() == 1 else argument for argument in args)
    result = reference(*args, **kwargs)
    if out is None:
        return result
    start = int(args[-2][first]) if name == "varlen_prefill" else 0
    out[start:] = result[start:]
    return out


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Gives this process a CUDA device, for as long as it is entered."""
    assert torch.version.cuda is None, "this torch has a CUDA of its own"
    device = FakeCuda()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeCuda, "current", device)
        patch.setattr(torch._C, "_cuda_setDevice", device.set_device, raising=False)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", device.end_allocate_to_pool, raising=False)
        properties = SimpleNamespace(multi_processor_count=NUM_MULTIPROCESSORS, total_memory=MEMORY, name="Fake", major=9, minor=0)
        stand_ins: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "_lazy_init": lambda: None,
            "current_device": device.current_device,
            "_exchange_device": device.exchange_device,
            "_maybe_exchange_device": device.exchange_device,
            "get_device_capability": lambda *_: CAPABILITY,
            "get_device_properties": lambda *_: properties,
            "get_device_name": lambda *_: "Fake",
            "mem_get_info": lambda *_: (FREE_MEMORY, MEMORY),
            "memory_reserved": lambda *_: 0,
            "memory_allocated": lambda *_: 0,
            "max_memory_allocated": lambda *_: device.peak_memory,
            "reset_peak_memory_stats": lambda *_: None,
            "empty_cache": device.empty_cache,
            "synchronize": lambda *_: device.wait(),
            "Stream": FakeStream,
            "Event": FakeEvent,
            "CUDAGraph": FakeGraph,
            "graph": device.capture,
            "graph_pool_handle": lambda: (0, 1),
            "stream": lambda stream: nullcontext(),
            "current_stream": FakeStream,
        }
        for name, stand_in in stand_ins.items():
            patch.setattr(torch.cuda, name, stand_in)
        # A module that goes to the device gets new parameters: the old ones cannot become tensors of another class.
        patch.setattr(torch, "_has_compatible_shallow_copy_type", lambda *_: False)
        patch.setattr(Tensor, "pin_memory", lambda tensor: tensor if device.is_pinned(tensor) else device.pin(tensor.clone()))
        _device_constructors()  # keeps what it finds, which must not be what follows
        for name in ("empty", "zeros"):
            patch.setattr(torch, name, _with_pinned(getattr(torch, name), device))
        for module, names in KERNELS.items():
            for name in names:
                patch.setattr(module, name, _Kernel(getattr(module, name), name, device))
        launchers = {name: _launcher(name, device) for name in LAUNCHERS}
        for name, modules in LAUNCHERS.items():
            for module in modules:
                patch.setattr(module, name, launchers[name])
        for module in list(sys.modules.values()):
            if module.__name__.startswith("penstock.engine.") and hasattr(module, "native_library"):
                patch.setattr(module, "native_library", _no_native_library)
        attention_cuda.num_multiprocessors.cache_clear()
        with _registered():
            yield device
        attention_cuda.num_multiprocessors.cache_clear()


def _no_native_library() -> None:
    raise AssertionError("the C++ kernels are for the CPU, and building them takes half a minute of a GPU's start")


def _with_pinned(factory: Callable[..., Tensor], device: FakeCuda) -> Callable[..., Tensor]:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = factory(*args, **kwargs)
        return device.pin(tensor) if pin_memory else tensor

    return made


@contextmanager
def _registered() -> Iterator[None]:
    """What a torch without CUDA lacks to make tensors of its own for `cuda`: a device guard, and the operations that all others rest on."""
    c10 = ctypes.CDLL(str(Path(torch.__path__[0]) / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * NUM_DEVICE_TYPES).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[CUDA_TYPE] = guards[CUDA_TYPE], guards[META_TYPE]  # a guard that does nothing
    library = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
    library.impl("empty.memory_format", _empty)  # type: ignore[no-untyped-call]
    library.impl("empty_strided", _empty_strided)  # type: ignore[no-untyped-call]
    for overload in ("", ".start", ".start_step"):
        library.impl(f"arange{overload}", _arange)  # type: ignore[no-untyped-call]
    library.impl("copy_", _copy_from_constructor)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
        guards[CUDA_TYPE] = before


def _empty(size: list[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return CudaTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: list[int], stride: list[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return CudaTensor(torch.empty_strided(size, stride, dtype=dtype))


def _arange(*bounds: float, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """torch's own makes an empty tensor first and resizes it, which the tensors here cannot follow."""
    return CudaTensor(torch.arange(*bounds, dtype=dtype))


def _copy_from_constructor(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`torch.tensor(..., device="cuda")`, which leaves Python's dispatch out."""
    result: Tensor = CudaTensor.__torch_dispatch__(aten.copy_.default, (), (target, source, non_blocking))
    return result
