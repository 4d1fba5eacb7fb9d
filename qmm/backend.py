"""The backend contract on one screen: class data about kernels, a refusal that lists all reasons, and ``run``.

A backend is one folder with an ``__init__.py`` that ends in ``BACKEND = MyBackend()``. Importing that folder must not
import the backend's optional packages; they load when ``environment()`` or ``run()`` is first called.
See docs/add-a-backend.md.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from qmm.errors import Reason
from qmm.weight.spec import SCALE_DTYPES, ZeroKind, dtype_name

if TYPE_CHECKING:
    from qmm.call import MatmulCall
    from qmm.weight import QuantizedWeight, WeightSpec


class Tier(enum.IntEnum):
    """The one written order in which ``backend="auto"`` tries kernels; within a tier the table's order holds.

    Example:
        >>> from qmm import Tier
        >>> [tier.name.lower() for tier in sorted(Tier)]
        ['specialised', 'portable', 'library', 'textbook']
    """

    SPECIALISED = 10  # built for one GPU architecture
    PORTABLE = 20  # fused, runs on any GPU its compiler knows
    LIBRARY = 30  # dequantise a block, then the library's matmul
    TEXTBOOK = 40  # written to be read


ALL_BITS = (1, 2, 3, 4, 5, 6, 7, 8)
ALL_ZERO_KINDS = tuple(ZeroKind)
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
DETERMINISTIC = (True, False, "batch")


@dataclass(frozen=True)
class Limits:
    """What a kernel takes, as data: ``why_not`` and the README's support table both read it. None means no limit.

    Example:
        >>> import torch, qmm
        >>> from qmm.call import describe_call
        >>> spec = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32).spec
        >>> for reason in qmm.Limits(bits=(8,), max_m=16).check(describe_call(32, spec), "mine"):
        ...     print(reason)
        mine: needs bits in {8}; got 4
        mine: needs M <= 16; got 32
    """

    devices: tuple[str, ...] | None = None
    a_dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
    bits: tuple[int, ...] = ALL_BITS
    zero_kinds: tuple[ZeroKind, ...] = ALL_ZERO_KINDS
    scale_dtypes: tuple[torch.dtype, ...] = SCALE_DTYPES
    activations: tuple[str, ...] = ACTIVATIONS
    deterministic: tuple[bool | str, ...] = DETERMINISTIC
    codebook: bool = True
    act_order: bool = True
    two_level_scales: bool = True
    group_sizes: tuple[int, ...] | None = None
    min_m: int = 1
    max_m: int | None = None

    def check(self, call: MatmulCall, kernel: str) -> list[Reason]:
        """Every limit that ``call`` breaks."""
        w = call.weight
        found: list[Reason] = []

        def need(ok: bool, limit: str, got: object, fix: str = "") -> None:
            if not ok:
                found.append(Reason(limit, str(got), fix, kernel))

        def one_of(field: str, allowed: tuple[Any, ...], got: Any, fix: str = "") -> None:
            if got not in allowed:
                shown = ", ".join(dtype_name(v) if isinstance(v, torch.dtype) else str(v) for v in allowed)
                name = dtype_name(got) if isinstance(got, torch.dtype) else got
                need(False, f"{field} in {{{shown}}}", name, fix)

        if self.devices is not None:
            one_of("device", self.devices, call.device.type, "move a and w to such a device")
        one_of("a.dtype", self.a_dtypes, call.a_dtype, "cast a")
        one_of("bits", self.bits, w.bits)
        one_of("zero kind", self.zero_kinds, w.zero_kind)
        one_of("scales.dtype", self.scale_dtypes, w.scale_dtype)
        if call.activation is not None:
            one_of("activation", self.activations, call.activation, "apply it to the result")
        one_of("deterministic", self.deterministic, call.deterministic)
        need(self.codebook or w.codebook_dtype is None, "no codebook", "a codebook")
        need(self.act_order or not w.act_order, "no act-order", "g_idx")
        two_level = w.scale2_ratio is not None or w.zero2_ratio is not None
        need(self.two_level_scales or not two_level, "one level of scales", "scale2 or zero2")
        if self.group_sizes is not None:
            one_of("group_size", self.group_sizes, w.group_size)
        # no rows: nothing is launched
        need(call.m >= self.min_m or call.m == 0, f"M >= {self.min_m}", call.m)
        need(self.max_m is None or call.m <= self.max_m, f"M <= {self.max_m}", call.m)
        return found


@dataclass(frozen=True)
class Kernel:
    """One kernel of a backend, as data. ``emulated``: whether it runs in the backend's emulator, if there is one.

    Example:
        >>> import qmm
        >>> [(k.name, k.tier.name) for k in qmm.backends()["torch"].kernels]
        [('blocks', 'LIBRARY')]
    """

    name: str
    summary: str
    tier: Tier
    limits: Limits = Limits()
    emulated: bool = True


class PreparedLayout(abc.ABC):
    """A backend's own lossless layout of one weight (see ``QuantizedWeight.prepare_for``).

    Example:
        >>> import torch, qmm
        >>> w = qmm.prepare(qmm.quantize(torch.randn(8, 64), bits=4, group_size=32), "torch")
        >>> w.state  # the torch backend reads the canonical form and has no layout of its own
        'canonical'
    """

    layout: ClassVar[str]

    @property
    @abc.abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Plain tensors that hold the weight in this layout."""

    @abc.abstractmethod
    def restore(self) -> Mapping[str, Tensor | None]:
        """The canonical tensors (the field names of ``QuantizedWeight``), bit for bit, freshly allocated."""

    @abc.abstractmethod
    def refill(self, canonical: Mapping[str, Tensor | None]) -> None:
        """Take new values of the same spec into the same storage, so that captured graphs see them."""

    @property
    def nbytes(self) -> int:
        """Bytes of ``tensors``."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class Backend(abc.ABC):
    """What a backend is. Subclass it, fill the class data, and write ``environment``, ``config`` and ``run``.

    Example:
        >>> import qmm
        >>> qmm.backends()["torch"].environment()  # nothing stands in its way
        []
    """

    name: ClassVar[str]
    kernels: ClassVar[tuple[Kernel, ...]]

    @property
    def emulated(self) -> str | None:
        """``"interpreter"`` or ``"simulator"`` where kernels run emulated on CPU tensors; ``auto`` never picks it."""
        return None

    @abc.abstractmethod
    def environment(self) -> list[Reason]:
        """Why this backend cannot run on this machine at all (missing package, no driver); empty means it can.

        Cheap after the first call. Independent of any call.
        """

    def why_not(self, call: MatmulCall, kernel: Kernel) -> list[Reason]:
        """Every reason why ``kernel`` cannot take ``call``; empty means it can. Pure, allocates nothing."""
        return [*self.environment(), *kernel.limits.check(call, kernel.name)]

    def config(self, call: MatmulCall, kernel: Kernel) -> Any:
        """The kernel's configuration for this call: a small frozen dataclass, or None. Shown by ``explain``."""
        return None

    def prepare(self, w: QuantizedWeight) -> PreparedLayout | None:
        """The weight in this backend's own layout, or None where its kernels read the canonical form."""
        return None

    def adopt(self, spec: WeightSpec, tensors: Mapping[str, Tensor]) -> PreparedLayout | None:
        """The prepared layout that these tensors (``PreparedLayout.tensors``) are, or None where that is unknown.

        For programs that torch traced: they hold tensors and no layout.
        """
        return None

    @abc.abstractmethod
    def run(
        self,
        call: MatmulCall,
        kernel: Kernel,
        config: Any,
        a: Tensor,
        w: QuantizedWeight,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        """Write ``activation(a @ dequantize(w) + bias)`` into ``out``.

        The call has been checked: M, N, K >= 1, dtypes, devices and shapes agree, and ``why_not`` was empty.

        Args:
            a: ``[M, K]``, ``call.a_dtype``, any strides (0 included).
            w: the weight; its tensors are on ``call.device``.
            bias: ``[N]`` contiguous float tensor of any float dtype, or None.
            out: ``[M, N]``, dtype of ``a``, any non-overlapping strides, contents undefined; write every element.
        """
