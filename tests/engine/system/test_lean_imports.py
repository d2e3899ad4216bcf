import subprocess
import sys

import pytest

CODE = """
import sys
from penstock.engine.system.process import triton_left_out
with triton_left_out({device!r}):
    import penstock.engine.model.loader
print("torch._dynamo" in sys.modules, "triton" in sys.modules)
import importlib.util
print(importlib.util.find_spec("triton") is not None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_a_server_on_the_cpu_does_not_import_triton_and_still_could() -> None:
    pytest.importorskip("triton")
    run = subprocess.run([sys.executable, "-c", CODE.format(device="cpu")], capture_output=True, text=True, check=True)
    # Torch's compiler, which would import it, is imported by transformers.
    assert run.stdout.split() == ["True", "False", "True"]
