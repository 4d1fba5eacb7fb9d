"""qmm.prepare: a backend's own layout of a weight, made ahead of the first call."""

from __future__ import annotations

from qmm.dispatch import auto_order
from qmm.errors import UnsupportedError
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
        TypeError: ``w`` is no weight.
        ValueError: no backend has that name.
        UnsupportedError: the named backend cannot run here.

    Example:
        >>> import torch, qmm
        >>> w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
        >>> qmm.prepare(w).state
        'canonical'
    """
    if not isinstance(w, QuantizedWeight):
        raise TypeError(f"w: must be a qmm.QuantizedWeight; got {type(w).__name__}")
    name, source = wanted_backend(backend)
    if name == AUTO:
        usable = [b for b, _ in auto_order() if not b.environment() and not b.emulated]
        chosen = next((b for b in usable if w.device.type in _devices(b)), None)
    else:
        chosen = backends()[name]
        reasons = chosen.environment()
        if reasons:
            text = "\n".join(f"  {name}: {r}" for r in reasons)
            raise UnsupportedError(
                f"backend {name!r} (from {source}) cannot prepare a weight here:\n{text}",
                name,
                {name: reasons},
            )
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
