"""The mark of tests that export a model to ONNX."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TypeVar

import pytest

MISSING = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
Test = TypeVar("Test", bound=Callable[..., None])


def can_export(test: Test) -> Test:
    """Mark a test that needs the packages in the `export` extra; `make test-extras` runs these tests."""
    return pytest.mark.extras(pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")(test))
