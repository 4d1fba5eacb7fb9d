"""What lies on the disk because of qmm, as one table: ``qmm doctor`` shows it, ``qmm cache clear`` empties it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_IR_SUFFIXES = {
    ".source",
    ".ttir",
    ".ttgir",
}  # Triton's texts of a kernel, which name the files it was compiled from


@dataclass(frozen=True)
class Cache:
    """One place.

    Attributes:
        name: for people.
        folder: where it is; need not exist.
        entries: what in it is qmm's; each may be deleted alone, and is made again when needed.
        shared: whether other programs keep theirs there too.
    """

    name: str
    folder: Path
    entries: Callable[[], Iterator[Path]]
    shared: bool


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; what vanishes meanwhile counts nothing."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return total


def remove(path: Path) -> None:
    """Delete an entry.

    Raises:
        OSError: it cannot be deleted.
    """
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def caches() -> list[Cache]:
    """All of them. Numba's kernels are compiled anew in every process; torch's own caches are not qmm's."""
    folder = triton_folder()
    return [Cache("Triton's compiled kernels", folder, lambda: _ours(folder), shared=True)]


def triton_folder() -> Path:
    """Where Triton keeps compiled kernels."""
    named = os.environ.get("TRITON_CACHE_DIR", "").strip()
    home = os.environ.get("TRITON_HOME", "").strip()
    return Path(named) if named else (Path(home) if home else Path.home()) / ".triton" / "cache"


def _ours(folder: Path) -> Iterator[Path]:
    """Entries of Triton's cache whose texts name a file of qmm's backends."""
    from qmm.backends import __path__ as found

    places = {str(Path(place)) for place in found}
    marks = [f'loc("{p}{os.sep}'.encode() for place in places for p in {place, os.path.realpath(place)}]
    if not folder.is_dir():
        return
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and any(_names(file, marks) for file in _texts(entry)):
            yield entry


def _texts(entry: Path) -> list[Path]:
    try:
        return [file for file in entry.iterdir() if file.suffix in _IR_SUFFIXES]
    except OSError:  # deleted meanwhile
        return []


def _names(file: Path, marks: list[bytes]) -> bool:
    try:
        text = file.read_bytes()
    except OSError:
        return False
    return any(mark in text for mark in marks)
