"""What is fuzzed: a variant (all that a kernel is compiled for) and a call of it, and how they are drawn.

Drawing asks ``pick(options)`` for everything, simplest option first: hypothesis answers (and shrinks), or a seeded
``random.Random``. New sizes of one variant compile nothing new, or little: that is what makes many calls cheap.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import torch

from qmm.testing import Case, Target
from qmm.weight.spec import SCALE_DTYPES, ZeroKind, dtype_name

T = TypeVar("T")
Pick = Callable[[Sequence[Any]], Any]

# Inside one set no kernel changes its configuration, so that a new M compiles nothing.
ROWS = (
    *((1, 0, 2, 3, 4), (8, 5, 7, 11, 13, 16), (32, 17, 19, 29, 31)),
    *((64, 33, 61), (128, 67, 97), (257, 131, 300)),
)
ROWS_SMALL = ((1, 0, 2), (3, 5, 7, 17))
# Inside one set a compiler that looks for multiples of 16 sees the same.
COLUMNS = ((64, 16, 48, 128, 256, 512), (21, 7, 37, 101, 131, 331), (8, 24, 40, 72, 136), (1,))
COLUMNS_SMALL = ((16, 32), (21, 7), (8, 24), (1,))
DEPTHS = ((64, 96), (512, 1024), (70, 101), (33, 59), (160, 416), (257, 859), (1096, 1000), (1,))
DEPTHS_SMALL = ((64, 96), (70, 101), (33, 59), (160,), (1,))
GROUPS = (32, 64, 128, -1, 16, 8, 1, 3, 7, 24, 256)
GROUPS_OF_TENSOR_CORES = (128, 64, 32, -1, 256)

A_VIEWS = ("plain", "rows", "rows16", "columns", "transposed", "expanded", "one-d", "3-d", "folded")
OUTS = ("new", "rows", "rows16", "columns", "transposed")
DATA = ("normal", "exact", "one-hot", "zero", "huge", "tiny", "bad row")
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Variant:
    """All that a kernel may be compiled for. ``m``, ``n``, ``k`` are the sizes to draw from.

    Attributes:
        a_view, out: how A and the result lie in memory (fuzz_layout.py); ``out="new"`` gives no ``out``.
        offset: elements by which operands stand off from 16-byte alignment.
        config: what of the kernel's configuration is forced (fuzz_config.py); None: nothing.
    """

    backend: str
    kernel: str
    device: str
    dtype: str
    bits: int
    group_size: int
    zero_kind: str
    scales: str
    two_level: str | None
    scale2_divides: bool
    codebook: str | None
    act_order: bool
    bias: str | None
    activation: str | None
    deterministic: bool | str
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    a_view: str
    out: str
    offset: int
    config: tuple[tuple[str, Any], ...] | None

    @property
    def target(self) -> str:
        """``triton.tiled:cuda``."""
        return str(Target(self.backend, self.kernel, self.device))


@dataclass(frozen=True)
class Call:
    """One call: a variant, sizes, what stands in A, and the seeds of the numbers."""

    variant: Variant
    m: int
    n: int
    k: int
    data: str
    w_seed: int
    a_seed: int

    def case(self) -> Case:
        """The facts as :class:`qmm.testing.Case` has them."""
        v = self.variant
        return Case(
            m=self.m,
            n=self.n,
            k=self.k,
            bits=v.bits,
            group_size=v.group_size,
            dtype=getattr(torch, v.dtype),
            zero_kind=ZeroKind(v.zero_kind),
            scale_dtype=getattr(torch, v.scales),
            two_level=v.two_level,
            divides=v.scale2_divides,
            codebook=None if v.codebook is None else getattr(torch, v.codebook),
            act_order=v.act_order,
            bias=None if v.bias is None else getattr(torch, v.bias),
            activation=v.activation,
        )

    def to_json(self) -> str:
        """One line from which :meth:`from_json` makes the same call."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Call:
        """The call of such a line."""
        facts = json.loads(text)
        variant = facts.pop("variant")
        for name in ("m", "n", "k"):
            variant[name] = tuple(variant[name])
        if variant["config"] is not None:
            variant["config"] = tuple((name, value) for name, value in variant["config"])
        assert set(variant) == {field.name for field in fields(Variant)}
        return cls(Variant(**variant), **facts)


def mostly(usual: T, rest: Sequence[T], times: int = 3) -> list[T]:
    """Options of which the first is drawn more often."""
    return [usual, *rest, *[usual] * times]


def draw_variant(pick: Pick, target: Target, *, small: bool) -> Variant:
    """Any variant that the kernel might take; some of them it refuses. ``small``: sizes for slow machines."""
    from fuzz_config import forced  # it imports backends, which only the targets that are here can

    rows, columns, depths = (ROWS_SMALL, COLUMNS_SMALL, DEPTHS_SMALL) if small else (ROWS, COLUMNS, DEPTHS)
    dense = target.kernel in ("decode", "wgmma")
    dtype = pick(DTYPES[:2] if dense else DTYPES)
    codebook = None if dense else pick(mostly(None, DTYPES, 9))
    zero_kind = "none" if codebook else pick([str(kind) for kind in ZeroKind])
    two_level = None if dense else pick(mostly(None, ("one", "rows"), 6))
    if two_level:
        scales = pick([dtype_name(d) for d in SCALE_DTYPES])
    elif dense:
        scales = pick(DTYPES)
    else:
        scales = pick(mostly("float16", ("bfloat16", "float32", "float8_e4m3fn", "float8_e8m0fnu"), 2))
    m = pick(rows)
    if target.kernel == "decode":
        m = pick(rows[:2])
    elif target.kernel == "wgmma":
        m = pick(rows[1:])
    # 4-bit factors are packed down G, which an order of activations has no use for
    act_order = not dense and scales != "uint4" and pick(mostly(False, (True,), 3))
    return Variant(
        target.backend,
        target.kernel,
        target.device,
        dtype,
        pick(mostly(4, (8,), 1) if dense else mostly(4, (8, 1, 2, 3, 5, 6, 7), 2)),
        pick(GROUPS_OF_TENSOR_CORES if dense else GROUPS),
        zero_kind,
        scales,
        two_level,
        two_level is not None and pick((False, False, True)),
        codebook,
        act_order,
        pick(mostly(None, (*DTYPES, "float64"), 2)),
        pick(mostly(None, ("relu", "gelu", "gelu_tanh", "silu"), 4)),
        pick(mostly(True, (False, "batch"), 6)),
        m,
        pick(columns),
        pick(depths),
        pick(mostly(*_first_and_rest(A_VIEWS))),
        pick(mostly(*_first_and_rest(OUTS))),
        pick(mostly(0, (1, 4), 2)),
        forced(pick, target),
    )


def _first_and_rest(options: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    return options[0], options[1:]


def draw_call(pick: Pick, variant: Variant) -> Call:
    """A call of the variant. Few weights, so that their references are worked out once; any activations."""
    return Call(
        variant,
        pick(variant.m),
        pick(variant.n),
        pick(variant.k),
        pick(mostly(*_first_and_rest(DATA))),
        pick(range(2)),
        pick(range(1 << 16)),
    )
