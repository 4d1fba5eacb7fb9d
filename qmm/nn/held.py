"""A weight as modules hold it: in a box of its own, so that tied modules share it, moves included."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qmm.op.parts import remember
from qmm.prepare import prepare
from qmm.registry import AUTO
from qmm.weight import QuantizedWeight, WeightTensors
from qmm.weight.facts import has_values
from qmm.weight.spec import dtype_name

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HeldWeight:
    """The weight of one module, or of several that are tied.

    Attributes:
        weight: the weight; another object after a move to another device.
        backend: whose layout it is brought into on a GPU.
        release: whether the canonical form is given up there. (An embedding reads the canonical form.)
    """

    def __init__(self, weight: QuantizedWeight, backend: str = AUTO, release: bool = True) -> None:
        self.backend, self.release = backend, release
        self.weight = weight
        self.prepare()

    def set(self, weight: QuantizedWeight) -> None:
        """Hold another weight."""
        self.weight = weight
        self.prepare()

    def prepare(self) -> None:
        """On a GPU, bring the weight into the backend's layout now: nothing is prepared while a graph is captured."""
        w = self.weight
        if w.device.type != "cpu" and has_values(next(iter(w.stored_tensors().values()))):
            prepare(w, self.backend, release=self.release)
        # a block that is compiled once runs with the tensors of every layer: each is to find its own plans
        remember(w)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """What ``nn.Module._apply`` does to a tensor (moves, copies without values, shared memory), without any cast.

        Floating tensors are shown to ``fn`` as integers of the same bytes, which it leaves alone where it casts
        floating ones. A released weight is left as it is where ``fn`` moves nothing.
        """
        w = self.weight
        if w.released_to is not None:
            probe = fn(torch.empty(0, dtype=torch.int32, device=w.device))
            if probe.device == w.device:
                return
        old = w.tensors.present()
        new = {name: _without_cast(fn, name, t) for name, t in old.items()}
        if all(new[name] is old[name] for name in old):
            return
        self.set(w._same_meaning(WeightTensors(**new)))

    def buffers(self) -> dict[str, Tensor]:
        """The tensors in memory, by names that a module may register: canonical ones, or the released layout's."""
        backend = self.weight.released_to
        if backend is None:
            return self.weight.tensors.present()
        start = f"w.{backend}."
        stored = self.weight.stored_tensors()
        return {f"{backend}_{key.removeprefix(start)}": t for key, t in stored.items()}


def _without_cast(fn: Callable[[Tensor], Tensor], name: str, t: Tensor) -> Tensor:
    bits = t.view(_SAME_SIZE[t.element_size()]) if t.is_floating_point() else t
    moved = fn(bits)
    if moved is bits or _same_memory(moved, t):
        return t
    if moved.dtype != bits.dtype:  # Module.type() casts integers as well: only the move is meant for codes
        moved = bits.to(moved.device)
    if moved.shape != t.shape:
        raise TypeError(
            f"{name}: must keep its shape; got {list(moved.shape)} for {dtype_name(t.dtype)} {list(t.shape)}"
        )
    return moved.view(t.dtype)


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return (
        has_values(x)
        and has_values(y)
        and x.device == y.device
        and x.element_size() == y.element_size()
        and x.data_ptr() == y.data_ptr()
    )
