"""QuantizedWeight: codes, scales and zero points of one ``[K, N]`` matrix, validated once, immutable in meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qmm.weight import build, facts, slicing
from qmm.weight.dequantize import dequantize_columns, magnitude_bound
from qmm.weight.properties import WeightProperties
from qmm.weight.spec import WeightSpec, ZeroKind
from qmm.weight.store import Store
from qmm.weight.tensors import WeightTensors
from qmm.weight.validate import check_values, has_even_groups, make_spec, require

if TYPE_CHECKING:
    from typing_extensions import Self

    from qmm.backend import PreparedLayout

_BLOCK_CODES = 1 << 22  # dequantize() works in column blocks of about this many codes


class QuantizedWeight(WeightProperties):
    """A quantised matrix W of K = in_features rows and N = out_features columns; groups of rows share a scale.

    Args:
        qweight: int32 (or uint32, viewed as int32) ``[ceil(K*bits/32), N]``: codes as a little-endian bit stream
            down K; for bits 2, 4 and 8 element k is bits ``(k % pack_num) * bits`` of word ``k // pack_num``.
        scales: ``[G, N]``, float16, bfloat16, float32, float8_e4m3fn, float8_e8m0fnu, or int8 (with ``scale2``).
            int32 ``[ceil(G*4/32), N]`` are integers from 0 to 15, packed down G like 4-bit codes (with ``scale2``;
            not with ``g_idx``): ``spec.scale_dtype`` is then ``torch.uint4``.
        bits: bits of a code, 1 to 8.
        group_size: rows per group; -1 means K. Without ``g_idx``, G = ceil(K / group_size).
        in_features: K.
        zeros: int32 ``[ceil(G*bits/32), N]`` packed down G like the codes (kind int), or floating ``[G, N]``;
            for kind bias with ``zero2`` also int8 or 4-bit integers, as ``scales`` may be.
        zero_kind: ``"none"``, ``"int"``, ``"float"`` or ``"bias"`` (:class:`ZeroKind`); None means none, int or
            float by what ``zeros`` is; bias has to be said.
        scale2: second level of the scales, float32 ``[1]`` or ``[ceil(G/r), N]``.
        scale2_ratio: r; None where the rows of ``scale2`` divide G.
        scale2_divides: the scale is ``scales / scale2``, rounded once, and not their product. (A reciprocal of
            ``scale2`` in its place would be another weight, by up to 3 units in the last place.)
        zero2: the same second level for zeros of kind bias.
        zero2_ratio: r of ``zero2``.
        codebook: floating ``[2**bits]``; the weight is then ``codebook[q] * s``.
        g_idx: int32 ``[K]``, the group of each row (act-order); None means ``k // group_size``.

    Raises:
        WeightFormatError: a rule does not hold; the text names field, rule and value.

    The tensors are kept, not copied (unless they are not contiguous or share storage).
    In-place updates go through :meth:`copy_`, which also refills a prepared layout.

    Example:
        >>> import torch, qmm
        >>> w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
        >>> w.in_features, w.out_features, w.bits
        (64, 8, 4)
    """

    __slots__ = ("__weakref__", "_plans")

    def __init__(
        self,
        qweight: Tensor,
        scales: Tensor,
        *,
        bits: int,
        group_size: int,
        in_features: int,
        zeros: Tensor | None = None,
        zero_kind: ZeroKind | str | None = None,
        scale2: Tensor | None = None,
        scale2_ratio: int | None = None,
        scale2_divides: bool = False,
        zero2: Tensor | None = None,
        zero2_ratio: int | None = None,
        codebook: Tensor | None = None,
        g_idx: Tensor | None = None,
    ) -> None:
        tensors = WeightTensors(
            build.as_words(qweight),
            build.as_words(scales),
            scale2,
            build.as_words(zeros),
            zero2,
            codebook,
            g_idx,
        )
        spec = make_spec(
            tensors,
            bits=bits,
            group_size=group_size,
            in_features=in_features,
            zero_kind=zero_kind,
            scale2_ratio=scale2_ratio,
            zero2_ratio=zero2_ratio,
            scale2_divides=scale2_divides,
        )
        tensors = build.own_storage(tensors)
        known = facts.has_values(tensors.qweight)
        if known:
            check_values(tensors, spec)
        self._spec, self._store = spec, Store(tensors)
        self._know(
            magnitude_bound(tensors, spec) if known else float("nan"),
            has_even_groups(tensors.g_idx if known else None, spec),
        )
        self._plans: dict[Any, Any] = {}

    # -- named constructors ------------------------------------------------------------------------------------

    @classmethod
    def from_codes(
        cls,
        codes_kn: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        *,
        bits: int,
        group_size: int,
        zero_kind: ZeroKind | str | None = None,
        g_idx: Tensor | None = None,
        codebook: Tensor | None = None,
        scale2: Tensor | None = None,
        scale2_ratio: int | None = None,
        scale2_divides: bool = False,
        zero2: Tensor | None = None,
        zero2_ratio: int | None = None,
    ) -> Self:
        """From unpacked codes.

        Args:
            codes_kn: integers ``[K, N]`` in ``[0, 2**bits)``, any integer dtype.
            scales: ``[G, N]``, or packed, as for the class.
            zeros: integers ``[G, N]`` in ``[0, 2**bits)`` (kind int), or floating ``[G, N]`` (kind float, or bias
                where ``zero_kind="bias"`` says so; then as for the class).
            g_idx: any integer dtype ``[K]``.

        The other arguments are those of the class.

        Raises:
            WeightFormatError: a rule does not hold.

        Example:
            >>> import torch, qmm
            >>> codes, scales = torch.randint(0, 16, (64, 8)), torch.full((2, 8), 0.5)
            >>> w = qmm.QuantizedWeight.from_codes(codes, scales, bits=4, group_size=32)
            >>> torch.equal(w.dequantize(), (codes - 8) * 0.5)
            True
        """
        words, packed_zeros, g_idx = build.pack_codes(
            codes_kn, scales, zeros, bits, group_size, zero_kind, g_idx
        )
        return cls(
            words,
            scales,
            bits=bits,
            group_size=group_size,
            in_features=codes_kn.shape[0],
            zeros=packed_zeros,
            zero_kind=zero_kind,
            scale2=scale2,
            scale2_ratio=scale2_ratio,
            scale2_divides=scale2_divides,
            zero2=zero2,
            zero2_ratio=zero2_ratio,
            codebook=codebook,
            g_idx=g_idx,
        )

    @classmethod
    def from_seed(
        cls, qw: Tensor, scales: Tensor, qzeros: Tensor | None = None, *, w_bit: int, group_size: int
    ) -> Self:
        """From the seed kernel's layout, which is the canonical one for bits that divide 32.

        Args:
            qw: int32 ``[K // pack_num, N]``, ``pack_num = 32 // w_bit``.
            scales: ``[K // group_size, N]``.
            qzeros: int32 ``[K // group_size // pack_num, N]``; None means symmetric.
            w_bit: 1, 2, 4 or 8.
            group_size: rows per group; -1 means K.

        Raises:
            WeightFormatError: a rule does not hold.

        Example:
            >>> import torch, qmm
            >>> qw, scales = torch.zeros(8, 4, dtype=torch.int32), torch.ones(2, 4)
            >>> qmm.QuantizedWeight.from_seed(qw, scales, w_bit=4, group_size=32).shape
            (64, 4)
        """
        return cls(**build.seed_arguments(qw, scales, qzeros, w_bit, group_size))

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], prefix: str = "") -> Self:
        """From what :meth:`state_dict` gave.

        Raises:
            WeightFormatError: a key is missing or unknown, or a rule does not hold.

        Example:
            >>> import torch, qmm
            >>> w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
            >>> qmm.QuantizedWeight.from_state_dict(w.state_dict("up."), "up.").spec == w.spec
            True
        """
        return cls(**facts.arguments_from_state(state, prefix))

    @staticmethod
    def cat(weights: Sequence[QuantizedWeight], dim: int = 1) -> QuantizedWeight:
        """Join weights along N (``dim=1``: fused q/k/v) or K (``dim=0``), exactly.

        Raises:
            WeightFormatError: the weights differ in a fact that one weight cannot express.

        Example:
            >>> import torch, qmm
            >>> q, k = (qmm.quantize(torch.randn(n, 64), bits=4, group_size=32) for n in (8, 4))
            >>> qmm.QuantizedWeight.cat([q, k]).shape
            (64, 12)
        """
        return slicing.cat(weights, dim)

    # -- use ----------------------------------------------------------------------------------------------------

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W as ``[K, N]``, computed in float32 and rounded once to ``dtype`` (a floating dtype).

        Raises:
            TypeError: ``dtype`` is not floating.

        Example:
            >>> import torch, qmm
            >>> qmm.quantize(torch.randn(8, 64), bits=4, group_size=32).dequantize(torch.float16).shape
            torch.Size([64, 8])
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dtype: must be a floating torch.dtype; got {dtype!r}")
        tensors, (k, n) = self.tensors, self.shape
        w = torch.empty(k, n, dtype=dtype, device=self.device)
        step = max(1, _BLOCK_CODES // k)
        for start in range(0, n, step):
            stop = min(n, start + step)
            w[:, start:stop] = dequantize_columns(tensors, self._spec, start, stop)
        return w

    def unpack(self) -> Tensor:
        """Codes as uint8 ``[K, N]``.

        Example:
            >>> import torch, qmm
            >>> qmm.quantize(torch.eye(32), bits=4, group_size=32).unpack()[:2, :2].tolist()
            [[15, 8], [8, 15]]
        """
        return build.unpack(self.tensors.qweight, self.bits, self.in_features)

    def unpack_zeros(self) -> Tensor | None:
        """Zero points as uint8 ``[G, N]`` (kind int), as stored (float, bias), or None.

        Example:
            >>> import torch, qmm
            >>> qmm.quantize(torch.rand(8, 64), bits=4, group_size=32, symmetric=False).unpack_zeros().shape
            torch.Size([2, 8])
        """
        zeros = self.tensors.zeros
        if zeros is None or self.zero_kind is not ZeroKind.INT:
            return zeros
        return build.unpack(zeros, self.bits, self._spec.groups)

    def __getitem__(self, index: Any) -> QuantizedWeight:
        """``w[k0:k1, n0:n1]``: a copy of a block, exact; K is cut at group edges (anywhere with act-order).

        ``w[:, columns]`` with a 1-D tensor (or list) of integers picks columns, in that order, repeats allowed.

        Raises:
            TypeError: the index is not two slices of step 1 (or a slice and integers).
            WeightFormatError: a cut of K inside a group, an empty slice, or a column that is not there.

        Example:
            >>> import torch, qmm
            >>> w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
            >>> w[32:, :4].shape, w[:, [5, 0]].shape
            ((32, 4), (64, 2))
        """
        return slicing.take(self, index)

    def to(
        self, device: torch.device | str | int, *, non_blocking: bool = False, copy: bool = False
    ) -> QuantizedWeight:
        """This weight on ``device`` (itself where it is there already, unless ``copy``); prepared layouts stay behind.

        Raises:
            TypeError: ``device`` is a dtype: stored dtypes are part of the weight and do not change.

        Example:
            >>> import torch, qmm
            >>> qmm.quantize(torch.randn(8, 64), bits=4, group_size=32).to("meta").device
            device(type='meta')
        """
        if device is None or isinstance(device, torch.dtype):
            raise TypeError(
                f"device: must be a device; got {device}. A weight keeps its stored dtypes; "
                "the result of matmul has the dtype of a"
            )
        # an unindexed device ("cuda") means the current one: let torch resolve it
        target = torch.empty(0, device=device).device
        if target == self.device and not copy:
            return self
        moved = {
            name: t.to(target, non_blocking=non_blocking, copy=copy)
            for name, t in self.tensors.present().items()
        }
        return self._same_meaning(WeightTensors(**moved))

    def cpu(self) -> QuantizedWeight:
        """This weight on the CPU, ``to("cpu")``.

        Example:
            >>> import torch, qmm
            >>> qmm.quantize(torch.randn(8, 64), bits=4, group_size=32).cpu().device
            device(type='cpu')
        """
        return self.to("cpu")

    def cuda(self, device: int | str | torch.device | None = None) -> QuantizedWeight:
        """``to`` the given or the current CUDA device.

        Example:
            >>> import torch, qmm
            >>> w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
            >>> w = w.cuda() if torch.cuda.is_available() else w
        """
        if device is None:
            device = "cuda"
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device)

    def clone(self) -> QuantizedWeight:
        """An independent canonical copy.

        Example:
            >>> import torch, qmm
            >>> w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
            >>> w.clone().qweight.data_ptr() == w.qweight.data_ptr()
            False
        """
        return self._same_meaning(WeightTensors(**{k: t.clone() for k, t in self.tensors.present().items()}))

    def _same_meaning(self, tensors: WeightTensors) -> QuantizedWeight:
        other = object.__new__(type(self))
        other._spec, other._store, other._plans = self._spec, Store(tensors), {}
        known = facts.has_values(tensors.qweight)
        other._know(
            self._bound if known else float("nan"), self._even and (known or not self._spec.act_order)
        )
        return other

    @classmethod
    def _of(
        cls,
        spec: WeightSpec,
        canonical: WeightTensors | None,
        prepared: dict[str, PreparedLayout],
        fits_float16: bool,
        even_groups: bool,
    ) -> Self:
        """A weight of tensors that were validated before."""
        made = object.__new__(cls)
        made._spec, made._store, made._plans = spec, Store(canonical, prepared), {}
        made._know(0.0 if fits_float16 else float("nan"), even_groups)
        return made

    @torch.no_grad()
    def copy_(self, other: QuantizedWeight) -> Self:
        """Take the values of ``other`` in place: same storage, prepared layouts refilled, captured graphs see it.

        Raises:
            WeightFormatError: the facts of ``other`` differ, or (act-order) a prepared layout that stores rows by
                groups cannot take its groups; nothing is written then.

        Example:
            >>> import torch, qmm
            >>> w, new = (qmm.quantize(torch.randn(8, 64), bits=4, group_size=32) for _ in range(2))
            >>> torch.equal(w.copy_(new).dequantize(), new.dequantize())
            True
        """
        if not isinstance(other, QuantizedWeight):
            raise TypeError(f"other: must be a qmm.QuantizedWeight; got {type(other).__name__}")
        difference = facts.first_difference(self._spec, other.spec)
        require(difference is None, "other", "must have the facts of this weight", difference)
        values = other.tensors
        known = facts.has_values(values.qweight) or not facts.has_values(self.tensors.qweight)
        require(known, "other", "must hold values", f"a weight on {other.device}")
        require(
            other._even or not (self._even and self.is_prepared),
            "other",
            f"must have {self.group_size} rows in each group, as this weight, whose prepared layout relies on it "
            "(fix: w.restore() before)",
            "groups of other sizes",
        )
        # nothing is known for calls of other threads in between
        self._know(float("nan"), self._even and other._even)
        self._store.copy_(values)
        self._know(other._bound, other._even)
        return self

    # -- saving -------------------------------------------------------------------------------------------------

    def state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """Plain contiguous tensors without shared storage, ready for safetensors.

        The canonical tensors by field name, and ``facts``, an int64 vector on the CPU that makes the dict describe
        itself.

        Example:
            >>> import torch, qmm
            >>> list(qmm.quantize(torch.randn(8, 64), bits=4, group_size=32).state_dict("up."))
            ['up.qweight', 'up.scales', 'up.facts']
        """
        tensors = self.tensors.present() | {"facts": facts.encode(self._spec)}
        return {prefix + name: t for name, t in tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], prefix: str = "") -> None:
        """``copy_`` from what :meth:`state_dict` gave.

        Raises:
            WeightFormatError: a key is missing or unknown, a rule does not hold or the facts differ.

        Example:
            >>> import torch, qmm
            >>> w, new = (qmm.quantize(torch.randn(8, 64), bits=4, group_size=32) for _ in range(2))
            >>> w.load_state_dict(new.state_dict())
            >>> torch.equal(w.qweight, new.qweight)
            True
        """
        self.copy_(QuantizedWeight.from_state_dict(state, prefix).to(self.device))

    def __reduce__(self) -> tuple[Any, ...]:
        return facts.rebuild, facts.picklable(self.state_dict())

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        copied = self.clone()
        memo[id(self)] = copied
        return copied

    # -- prepared layouts ---------------------------------------------------------------------------------------

    def prepare_for(self, backend: Any, release: bool = False) -> PreparedLayout | None:
        """The prepared layout of ``backend`` (a :class:`qmm.Backend`), made at most once, under a lock.

        None where its kernels read the canonical form. With ``release`` the canonical tensors are given up and the
        prepared form is the weight; asking for them restores them exactly.

        Example:
            >>> import torch, qmm
            >>> w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
            >>> w.prepare_for(qmm.backends()["torch"]) is None  # which reads the canonical form
            True
        """
        return self._store.prepare(backend, self, release)

    def restore(self) -> Self:
        """Back to the canonical form alone; prepared layouts are dropped.

        Example:
            >>> import torch, qmm
            >>> qmm.quantize(torch.randn(8, 64), bits=4, group_size=32).restore().state
            'canonical'
        """
        self._store.restore()
        return self

    def _choose_runner(self, *facts: Any) -> str:
        """See :func:`qmm.op.way_in.choose_runner`."""
        from qmm.op.way_in import choose_runner

        return choose_runner(self, *facts)

    # torch.compiler.assume_constant_result, without loading torch's compiler for it: torch.compile calls this method
    # while it traces, and what comes back is a constant.
    _choose_runner._dynamo_marked_constant = True  # type: ignore[attr-defined]
