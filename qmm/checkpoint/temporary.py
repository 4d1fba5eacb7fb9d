"""Hidden files and folders that are renamed when they are whole, and that a killed writer cannot leave for good.

A writer holds a lock on what it writes (``flock``), which the system lets go of when the process ends, however it ends.
So whoever writes to the same place next can tell what is left over, whichever process, container or machine wrote it,
where a process number could not. Where locks cannot be had (some network file systems, Windows) nothing is removed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class Temporary:
    """A new hidden file (empty) or folder beside ``target``; what dead writers left for the same target goes first.

    Args:
        target: what it is to become.
        folder: a folder rather than a file.

    Attributes:
        path: where it is.

    Raises:
        OSError: the folder of ``target`` does not exist or cannot be written to.
    """

    def __init__(self, target: Path, *, folder: bool = False) -> None:
        remove_leftovers(target)
        self._lock: int | None = None
        while True:
            self.path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.qmm-tmp")
            if folder:
                self.path.mkdir()
            else:
                self.path.open("xb").close()
            with suppress(BlockingIOError):
                self._lock = _lock(self.path)
                if self.path.exists():
                    return
            self.close()  # between its making and its locking somebody took it for a leftover

    def close(self) -> None:
        """Remove what still stands under the temporary name, and let go of the lock."""
        with suppress(FileNotFoundError):
            _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_leftovers(target: Path) -> None:
    """Remove what writers that are no more left for ``target``; live ones, links and other names are left alone."""
    mine = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.qmm-tmp")
    with suppress(OSError), os.scandir(target.parent) as entries:
        found = [Path(e.path) for e in entries if mine.fullmatch(e.name) and not e.is_symlink()]
        for path in found:
            with suppress(OSError):
                lock = _lock(path)
                if lock is not None:
                    try:
                        _remove(path)
                    finally:
                        os.close(lock)


def _lock(path: Path) -> int | None:
    """An open file that holds the lock on ``path``; None where locks cannot be had.

    Raises:
        BlockingIOError: somebody else holds it.
    """
    if fcntl is None:
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return file


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
