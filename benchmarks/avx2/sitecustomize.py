"""On PYTHONPATH, makes torch say that the processor has no more than AVX2, so that vLLM, which asks it, loads its library for AVX2:

PYTHONPATH=benchmarks/avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m vllm.entrypoints.openai.api_server ...
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULE = "torch.cpu"
NEWER = ("_is_avx512", "_is_amx", "_is_vnni")


class Restriction:
    """Finds `torch.cpu` as others do, and answers its questions for what is newer with no."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def restricted(module: ModuleType) -> None:
            execute(module)
            for question in vars(module):
                if question.startswith(NEWER):
                    setattr(module, question, lambda: False)

        spec.loader.exec_module = restricted  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Restriction())
