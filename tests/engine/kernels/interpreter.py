# mypy: disable-error-code="import-untyped,import-not-found"
"""A process that runs kernels in Triton's interpreter: reads pickled calls from standard input, writes pickled answers.

Triton decides between compiler and interpreter when it is imported, for the whole process. The tests must not decide that for whatever
else runs beside them (torch.compile imports Triton too), so the interpreter lives in a process of its own.
"""

import io
import os
import pickle
import sys
import traceback
from importlib import import_module
from typing import IO, Any

import numpy as np
import torch


def send(message: Any, stream: IO[bytes]) -> None:
    """By torch's own pickling: Python's knows no tensors of 8 bits."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    pickle.dump(buffer.getvalue(), stream)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    return torch.load(io.BytesIO(pickle.load(stream)), weights_only=False)


def serve(calls: IO[bytes], answers: IO[bytes]) -> None:
    """Answers (module, function, arguments by name) with (result, arguments as the call left them, None) or (None, None, traceback)."""
    while True:
        try:
            module, function, arguments = receive(calls)
        except EOFError:
            return
        answer: tuple[Any, Any, str | None]
        try:
            answer = (getattr(import_module(module), function)(**arguments), arguments, None)
        except BaseException:
            answer = (None, None, traceback.format_exc())
        send(answer, answers)


def widen_bfloat16_dots() -> None:
    """Makes `tl.dot` convert bfloat16 operands: the interpreter keeps their bits in integers, and multiplies those (Triton 3.9)."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16 or handle.data.dtype != np.uint16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_wide_dot(builder: Any, left: Any, right: Any, *rest: Any) -> Any:
        return create_dot(builder, widened(left), widened(right), *rest)

    InterpreterBuilder.create_dot = create_wide_dot


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    widen_bfloat16_dots()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a kernel that prints must not break into the answers
    serve(sys.stdin.buffer, answers)
