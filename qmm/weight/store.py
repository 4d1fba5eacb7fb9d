"""Where a weight's tensors live: canonical, canonical and prepared (kept), or prepared alone (released)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qmm.weight.tensors import WeightTensors

if TYPE_CHECKING:
    from qmm.backend import Backend, PreparedLayout
    from qmm.weight.quantized_weight import QuantizedWeight


class Store:
    """Canonical tensors and prepared layouts by backend name; never both absent."""

    def __init__(self, canonical: WeightTensors) -> None:
        self._canonical: WeightTensors | None = canonical
        self._prepared: dict[str, PreparedLayout] = {}
        self._declined: set[str] = set()  # backends that read the canonical form
        self._lock = threading.RLock()
        self.device = canonical.qweight.device

    def tensors(self) -> WeightTensors:
        """The canonical tensors, restored for the caller where they were released."""
        canonical = self._canonical
        if canonical is None:
            with self._lock:
                canonical = self._canonical or self._restored()
        return canonical

    def _restored(self) -> WeightTensors:
        (layout,) = self._prepared.values()
        return WeightTensors(**layout.restore())  # type: ignore[arg-type]

    @property
    def released_to(self) -> str | None:
        """Name of the backend that holds the only copy."""
        return next(iter(self._prepared)) if self._canonical is None else None

    @property
    def state(self) -> str:
        """See ``QuantizedWeight.state``."""
        if self._canonical is None:
            return f"released: {self.released_to}"
        return f"kept: {', '.join(sorted(self._prepared))}" if self._prepared else "canonical"

    def stored(self) -> dict[str, Tensor]:
        """Every tensor in memory."""
        found = {} if self._canonical is None else {f"w.{k}": t for k, t in self._canonical.present().items()}
        for name, layout in self._prepared.items():
            found |= {f"w.{name}.{k}": t for k, t in layout.tensors.items()}
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of distinct storage (a prepared layout may share a canonical tensor)."""
        unique = {(t.data_ptr(), t.numel(), id(t) if t.device.type == "meta" else 0): t for t in self.stored().values()}
        return sum(t.numel() * t.element_size() for t in unique.values())

    def prepare(self, backend: Backend, w: QuantizedWeight, release: bool) -> PreparedLayout | None:
        """See ``QuantizedWeight.prepare_for``."""
        with self._lock:
            layout = self._prepared.get(backend.name)
            if layout is None and backend.name not in self._declined:
                layout = backend.prepare(w)
                if layout is None:
                    self._declined.add(backend.name)
                else:
                    if self._canonical is None:  # released to another backend: only one copy at a time
                        self._canonical = self._restored()
                        self._prepared.clear()
                    self._prepared[backend.name] = layout
            if release and layout is not None:
                self._prepared = {backend.name: layout}
                self._canonical = None
            return layout

    def restore(self) -> None:
        """Canonical alone."""
        with self._lock:
            if self._canonical is None:
                self._canonical = self._restored()
            self._prepared.clear()

    def copy_(self, values: WeightTensors) -> None:
        """New values of the same facts into the same storage."""
        with self._lock:
            if self._canonical is not None:
                mine = self._canonical.present()
                for name, source in values.present().items():
                    mine[name].copy_(source)
            on_device = {
                name: None if t is None else t.to(self.device) for name, t in values._asdict().items()
            }
            for layout in self._prepared.values():
                layout.refill(on_device)


def same_storage(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors live in one storage."""
    return (
        x.device.type != "meta"
        and torch.is_tensor(y)
        and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() != 0
    )
