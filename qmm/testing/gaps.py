"""Known gaps: one text file a backend, ``test id: reason`` a line, strict both ways."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def read_gaps(path: Path) -> dict[str, str]:
    """``{test id: reason}``; blank lines and lines that begin with # are comments."""
    import pytest  # here and not above: the numerics and the oracle serve `qmm demo`, which has no pytest

    gaps = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        ident, separator, reason = line.partition(": ")
        if not separator or not reason.strip():
            raise pytest.UsageError(f"{path}:{number}: must be 'test id: reason'; got {line!r}")
        gaps[ident.strip()] = reason.strip()
    return gaps


def apply_known_gaps(items: Iterable[pytest.Item], directory: Path) -> None:
    """Mark the tests of ``directory/<backend>.txt`` as expected failures, strictly.

    To be called from ``pytest_collection_modifyitems``. A test id is the item's name,
    ``test_case[triton.tiled:cpu-...]``. A listed test that passes fails the run; a line that matches
    no collected test is an error, when the whole suite of that backend was collected.

    Example:
        >>> import pathlib, tempfile
        >>> from qmm.testing import apply_known_gaps
        >>> apply_known_gaps([], pathlib.Path(tempfile.mkdtemp()))  # no files, no gaps
    """
    import pytest

    by_name: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_name.setdefault(item.name, []).append(item)
    for path in sorted(directory.glob("*.txt")):
        whole = any(f"[{path.stem}." in name for name in by_name)
        for ident, reason in read_gaps(path).items():
            matching = by_name.get(ident, [])
            if whole and not matching:
                raise pytest.UsageError(f"{path}: {ident!r} matches no test: delete the line")
            for item in matching:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
