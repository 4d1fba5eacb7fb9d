"""What the suite can run here: (backend, kernel, device) triples, found from class data and the machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qmm.registry import backends


@dataclass(frozen=True)
class Target:
    """One kernel on one device type; ``str()`` is its test id.

    Example:
        >>> from qmm.testing import Target
        >>> print(Target("torch", "blocks", "cpu"))
        torch.blocks:cpu
    """

    backend: str
    kernel: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}.{self.kernel}:{self.device}"


def targets(names: tuple[str, ...] | None = None) -> list[Target]:
    """Every kernel that can run here, on every kind of device that is here.

    Example:
        >>> from qmm.testing import targets
        >>> [str(target) for target in targets(("torch",))][0]
        'torch.blocks:cpu'
    """
    found = []
    present = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for name, backend in backends().items():
        if (names is not None and name not in names) or backend.environment():
            continue
        for kernel in backend.kernels:
            if backend.emulated and not kernel.emulated:
                continue
            devices = (
                ["cpu"]
                if backend.emulated
                else [d for d in present if d in (kernel.limits.devices or present)]
            )
            found += [Target(name, kernel.name, device) for device in devices]
    return found
