"""From an operator's tensors back to the weight: the living one that they belong to, or one made of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from qmm.errors import UnsupportedError
from qmm.op.spec import OpSpec
from qmm.registry import backends
from qmm.weight import QuantizedWeight, WeightTensors

# by the identity of the first part; identities may be used again, so that all parts are compared
_living: weakref.WeakValueDictionary[int, QuantizedWeight] = weakref.WeakValueDictionary()


def remember(w: QuantizedWeight) -> None:
    """Let the operator find ``w`` by its tensors, and with it what is prepared and remembered for it."""
    _living[id(w._store.held.parts[0])] = w


def weight_of(parts: Sequence[Tensor], spec: OpSpec) -> tuple[QuantizedWeight, bool]:
    """The weight that ``parts`` are, and whether it is a living one (and not made for this call)."""
    w = _living.get(id(parts[0]))
    if w is not None and w.spec == spec.weight:
        mine = w._store.held.parts
        if len(parts) <= len(mine) and all(x is y for x, y in zip(parts, mine, strict=False)):
            return w, True
    return _assemble(parts, spec), False


def _assemble(parts: Sequence[Tensor], spec: OpSpec) -> QuantizedWeight:
    """A weight of these very tensors, which are trusted: they come from a weight that was validated."""
    expected = sum(len(names) for _, names in spec.layout)
    if len(parts) != expected:
        raise ValueError(f"parts: must be the {expected} tensors of layout {spec.layout}; got {len(parts)}")
    left = iter(parts)
    canonical, prepared = None, {}
    for owner, names in spec.layout:
        tensors = {name: next(left) for name in names}
        if not owner:
            canonical = WeightTensors(**tensors)
            continue
        backend = backends().get(owner)
        layout = None if backend is None else backend.adopt(spec.weight, tensors)
        if layout is not None:
            prepared[owner] = layout
    if canonical is None and not prepared:
        owners = ", ".join(repr(owner) for owner, _ in spec.layout)
        raise UnsupportedError(
            f"the weight is in the layout of backend {owners} alone, and that backend cannot read it back from "
            "tensors (fix: w.restore() before the program is traced)",
            spec.backend,
            {},
        )
    return QuantizedWeight._of(spec.weight, canonical, prepared, spec.fits_float16, spec.even_groups)
