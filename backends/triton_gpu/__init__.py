"""The triton backend (being written)."""

from __future__ import annotations

from typing import Any

from qmm.backend import Backend
from qmm.errors import Reason


class TritonBackend(Backend):
    """Placeholder until its kernel lands."""

    name = "triton"
    kernels = ()

    def environment(self) -> list[Reason]:
        return [Reason("a kernel", "none written yet")]

    def run(self, *args: Any) -> None:
        raise AssertionError("no kernel")


BACKEND = TritonBackend()
