"""A short run of the fuzzer; ``fuzz_files.py --seconds 60`` is the long one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def script() -> ModuleType:
    """``fuzz_files.py`` (tests are no package)."""
    spec = importlib.util.spec_from_file_location("fuzz_files", Path(__file__).with_name("fuzz_files.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_only_the_one_error_comes_out() -> None:
    counts = script().fuzz(seconds=2.5, seed=20)
    assert sum(counts.values()) > 20
    assert {key.split()[0] for key in counts} == {"gguf", "safetensors"}
