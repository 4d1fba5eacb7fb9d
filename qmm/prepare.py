"""qmm.prepare: a backend's own layout of a weight, made ahead of the first call."""

from __future__ import annotations

from qmm.dispatch import auto_order
from qmm.registry import AUTO, backends, wanted_backend
from qmm.weight import QuantizedWeight


def prepare(w: QuantizedWeight, backend: str = AUTO, release: bool = False) -> QuantizedWeight:
    """Make the prepared layout of ``w`` now, losslessly, at most once per weight and backend.

    Args:
        w: the weight; its meaning does not change.
        backend: whose layout; ``"auto"`` takes the first usable backend in auto's order.
        release: give up the canonical tensors: the prepared form then is the weight, and ``.to``, pickling and
            ``state_dict`` restore the canonical form exactly first.

    Returns:
        ``w`` itself. Backends whose kernels read the canonical form leave it as it is, also with ``release``.

    Raises:
        ValueError: no backend has that name.

    Example:
        >>> import torch, qmm
        >>> w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
        >>> qmm.prepare(w).state
        'canonical'
    """
    name, _ = wanted_backend(backend)
    if name == AUTO:
        usable = [b for b, _ in auto_order() if not b.environment() and not b.emulated]
        chosen = next((b for b in usable if w.device.type in _devices(b)), None)
    else:
        chosen = backends()[name]
    if chosen is not None:
        w.prepare_for(chosen, release)
    return w


def _devices(backend: object) -> set[str]:
    from qmm.backend import Backend

    assert isinstance(backend, Backend)
    found: set[str] = set()
    for kernel in backend.kernels:
        found |= set(kernel.limits.devices or ("cpu", "cuda", "xpu", "mps"))
    return found
