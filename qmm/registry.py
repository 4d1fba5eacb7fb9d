"""Which backends exist: one literal table in preference order, then entry points of other packages."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points

from qmm.backend import Backend
from qmm.errors import Reason

# A new backend of this repository: one line here (docs/add-a-backend.md).
TABLE = (
    ("triton", "qmm.backends.triton_gpu"),
    ("torch", "qmm.backends.torch_ref"),
    ("numba", "qmm.backends.numba_gpu"),
)
ENTRY_POINT_GROUP = "qmm.backends"
ENV_VARIABLE = "QMM_BACKEND"
AUTO = "auto"

_used: ContextVar[str | None] = ContextVar("qmm_backend", default=None)
_lock = threading.RLock()  # re-entered where an outside backend asks for backends() while it is imported
_found: dict[str, Backend] | None = None


class BrokenBackend(Backend):
    """Stands for an outside backend whose import failed: listed with the reason, never chosen."""

    kernels = ()

    def __init__(self, name: str, error: str) -> None:
        self.name = name  # type: ignore[misc]  # class data everywhere else
        self._error = error

    def environment(self) -> list[Reason]:
        return [
            Reason("a backend that imports", self._error, "repair or uninstall the package that registers it")
        ]

    def run(self, *args: object) -> None:
        raise RuntimeError(f"backend {self.name!r} could not be imported: {self._error}")


def backends() -> dict[str, Backend]:
    """All known backends by name, in preference order; usable here or not (ask ``.environment()``).

    Example:
        >>> import qmm
        >>> "torch" in qmm.backends()
        True
    """
    global _found
    if _found is None:
        with _lock:
            if _found is None:
                _found = _collect()
    return dict(_found)


def _collect() -> dict[str, Backend]:
    table: dict[str, Backend] = {}
    for name, path in TABLE:
        table[name] = importlib.import_module(path).BACKEND
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: p.name):
        if point.name not in table and point.name != AUTO:  # a name of this repository cannot be taken over
            table[point.name] = _load(point)
    return table


def _load(point: EntryPoint) -> Backend:
    try:
        loaded = point.load()
        backend = loaded() if isinstance(loaded, type) else loaded
    except Exception as error:  # an outsider's import may fail in any way; it must not take qmm down with it
        return BrokenBackend(point.name, f"{type(error).__name__}: {error}")
    if not isinstance(backend, Backend) or getattr(backend, "name", None) != point.name:
        return BrokenBackend(point.name, f"{point.value} is no qmm.Backend named {point.name!r}")
    return backend


def wanted_backend(argument: str) -> tuple[str, str]:
    """The name in force and where it came from: the argument, then ``use_backend``, then ``QMM_BACKEND``, then auto.

    Raises:
        ValueError: no backend has that name.
    """
    if argument != AUTO:
        return check_name(argument, "backend="), "backend="
    used = _used.get()
    if used is not None:
        return used, "qmm.use_backend"
    named = os.environ.get(ENV_VARIABLE)
    if named:
        return check_name(named, ENV_VARIABLE), ENV_VARIABLE
    return AUTO, "default"


def check_name(name: str, source: str) -> str:
    """``name``, if it is ``"auto"`` or a known backend."""
    if not isinstance(name, str):
        raise TypeError(f"{source}: must be a str; got {type(name).__name__}")
    if name != AUTO and name not in (known := backends()):
        raise ValueError(f"{source}: must be one of {', '.join([AUTO, *known])}; got {name!r}")
    return name


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block (this thread or task), calls that name no backend use ``name``.

    ``"auto"`` lifts an outer ``use_backend`` and ``QMM_BACKEND``.

    Raises:
        ValueError: no backend has that name.

    Example:
        >>> import qmm
        >>> with qmm.use_backend("torch"):
        ...     pass
    """
    token = _used.set(check_name(name, "qmm.use_backend"))
    try:
        yield
    finally:
        _used.reset(token)
