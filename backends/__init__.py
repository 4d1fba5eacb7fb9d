"""The kernels. This folder is the package ``qmm.backends``; it cannot be imported as plain ``backends``."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if __name__ != "qmm.backends":
    raise ImportError("import qmm.backends: this folder is installed under that name and does not work as 'backends'")

if TYPE_CHECKING:
    from qmm.registry import backends as __call__  # noqa: F401


class _CallableModule(ModuleType):
    """``qmm.backends()`` lists the backends, and ``qmm.backends.<name>`` is one: importing a submodule binds its
    package's name in qmm over the function, so the package answers calls too.
    """

    def __call__(self) -> object:
        from qmm.registry import backends

        return backends()


sys.modules[__name__].__class__ = _CallableModule
