"""Where a weight's tensors live: canonical, canonical and prepared (kept), or prepared alone (released)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from qmm.weight.facts import has_values
from qmm.weight.tensors import WeightTensors

if TYPE_CHECKING:
    from qmm.backend import Backend, PreparedLayout
    from qmm.weight.quantized_weight import QuantizedWeight


class Held(NamedTuple):
    """What is in memory at one moment. Replaced whole and never changed, so that readers need no lock.

    Attributes:
        canonical: the canonical tensors, or None where the weight is released.
        prepared: prepared layouts by backend name.
        parts: every tensor of both, in one list: what a traced program takes as its inputs.
        layout: what ``parts`` are, as :func:`layout_of` writes it.
    """

    canonical: WeightTensors | None
    prepared: dict[str, PreparedLayout]
    parts: tuple[Tensor, ...]
    layout: str


def hold(canonical: WeightTensors | None, prepared: dict[str, PreparedLayout]) -> Held:
    """``Held`` of these, with its parts listed."""
    groups = [("", {} if canonical is None else canonical.present())]
    groups += [(name, dict(layout.tensors)) for name, layout in prepared.items()]
    parts = tuple(t for _, tensors in groups for t in tensors.values())
    return Held(canonical, prepared, parts, layout_of([(name, tuple(ts)) for name, ts in groups if ts]))


def layout_of(groups: list[tuple[str, tuple[str, ...]]]) -> str:
    """``":qweight,scales|triton:words,scales"``: names in order, behind whose they are (canonical: nobody's)."""
    return "|".join(f"{owner}:{','.join(names)}" for owner, names in groups)


def groups_of(layout: str) -> list[tuple[str, tuple[str, ...]]]:
    """The inverse of :func:`layout_of`."""
    pairs = [group.partition(":") for group in layout.split("|")]
    return [(owner, tuple(names.split(","))) for owner, _, names in pairs]


class Store:
    """Canonical tensors and prepared layouts by backend name; never both absent."""

    def __init__(
        self, canonical: WeightTensors | None, prepared: dict[str, PreparedLayout] | None = None
    ) -> None:
        self._held = hold(canonical, prepared or {})
        self._declined: set[str] = set()  # backends that read the canonical form
        self._lock = threading.RLock()  # held while anything changes
        self.device = self._held.parts[0].device

    def tensors(self) -> WeightTensors:
        """The canonical tensors, restored for the caller where they were released."""
        held = self._held
        return _canonical(held) if held.canonical is None else held.canonical

    @property
    def held(self) -> Held:
        """What is in memory now; another object after every change."""
        return self._held

    @property
    def is_prepared(self) -> bool:
        """Whether there is any prepared layout."""
        return bool(self._held.prepared)

    @property
    def released_to(self) -> str | None:
        """Name of the backend that holds the only copy."""
        held = self._held
        return next(iter(held.prepared)) if held.canonical is None else None

    @property
    def state(self) -> str:
        """See ``QuantizedWeight.state``."""
        held = self._held
        if held.canonical is None:
            return f"released: {next(iter(held.prepared))}"
        return f"kept: {', '.join(sorted(held.prepared))}" if held.prepared else "canonical"

    def stored(self) -> dict[str, Tensor]:
        """Every tensor in memory."""
        held = self._held
        found = {} if held.canonical is None else {f"w.{k}": t for k, t in held.canonical.present().items()}
        for name, layout in held.prepared.items():
            found |= {f"w.{name}.{k}": t for k, t in layout.tensors.items()}
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of distinct storage (a prepared layout may share a canonical tensor)."""
        unique = {(_address(t) or id(t), t.numel()): t for t in self.stored().values()}
        return sum(t.numel() * t.element_size() for t in unique.values())

    def prepare(self, backend: Backend, w: QuantizedWeight, release: bool) -> PreparedLayout | None:
        """See ``QuantizedWeight.prepare_for``. Costs no lock once the layout is there."""
        name = backend.name
        held = self._held
        layout = held.prepared.get(name)
        if layout is not None and (held.canonical is None or not release):
            return layout
        with self._lock:
            held = self._held
            layout = held.prepared.get(name)
            if layout is None and name not in self._declined:
                layout = backend.prepare(w)
                if layout is None:
                    self._declined.add(name)
            if layout is None:
                return None
            if release:
                self._held = hold(None, {name: layout})
            elif (
                held.canonical is None and name not in held.prepared
            ):  # released to another: one copy at a time
                self._held = hold(_canonical(held), {name: layout})
            else:
                self._held = hold(held.canonical, {**held.prepared, name: layout})
            return layout

    def restore(self) -> None:
        """Canonical alone."""
        with self._lock:
            self._held = hold(_canonical(self._held), {})

    def copy_(self, values: WeightTensors) -> None:
        """New values of the same facts into the same storage."""
        with self._lock:
            held = self._held
            if held.canonical is not None:
                mine = held.canonical.present()
                for name, source in values.present().items():
                    mine[name].copy_(source)
            on_device = {
                name: None if t is None else t.to(self.device) for name, t in values._asdict().items()
            }
            for layout in held.prepared.values():
                layout.refill(on_device)
            self._declined.clear()  # what a backend makes no layout of may depend on the values


def _canonical(held: Held) -> WeightTensors:
    if held.canonical is not None:
        return held.canonical
    (layout,) = held.prepared.values()
    return WeightTensors(**layout.restore())  # type: ignore[arg-type]


def _address(t: Tensor) -> int:
    """Where the data begins; 0 for tensors without memory (meta, fake)."""
    return t.data_ptr() if has_values(t) else 0


def same_storage(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors live in one storage."""
    return (
        has_values(x)
        and has_values(y)
        and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() != 0
    )
