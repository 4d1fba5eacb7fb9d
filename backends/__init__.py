"""The kernels. This folder is the package ``qmm.backends``; it cannot be imported as plain ``backends``.

Importing a submodule binds the name ``backends`` in ``qmm`` to this package, over the public function of that name.
So the package can be called too: ``qmm.backends()`` means the same before and after.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if __name__ != "qmm.backends":
    raise ImportError(
        f"this folder is the package 'qmm.backends' and does not work as {__name__!r}: "
        "install the project (pip install -e .) and import qmm.backends",
        name=__name__,
    )

if TYPE_CHECKING:
    from qmm.backend import Backend


class _CallablePackage(ModuleType):
    def __call__(self) -> dict[str, Backend]:
        """See :func:`qmm.registry.backends`."""
        from qmm.registry import backends

        return backends()


sys.modules[__name__].__class__ = _CallablePackage
