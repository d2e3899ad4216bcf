"""Cases of kernels that differ in numbers from those that run by default."""

from typing import Any

import pytest


def thorough(*values: Any) -> Any:
    """A case that the interpreter takes long for, and that differs from others in a number alone."""
    return pytest.param(*values, marks=pytest.mark.thorough)
