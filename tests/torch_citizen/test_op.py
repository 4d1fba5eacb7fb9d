"""``qmm::matmul`` itself: opcheck, fake tensors, specs, weights found again by their tensors, transforms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import qmm
from qmm import Backend, Kernel, Limits, PreparedLayout, QuantizedWeight, Tier, WeightSpec, registry
from qmm.op import parts, spec
from qmm.testing import CASES, Case, Target, make_inputs, targets
from qmm.weight import ZeroKind, text
from qmm.weight.store import groups_of, layout_of

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
OP = torch.ops.qmm.matmul
each_target = pytest.mark.parametrize("target", targets(), ids=str)


def op_arguments(w: QuantizedWeight, backend: str, kernel: str | None = None) -> tuple[list[Tensor], str]:
    held = w._store.held
    runner = spec.runner_text(backend, kernel)
    return list(held.parts), spec.write(w._facts, held.layout, runner)


OPCHECKED = [
    Case(m=1, bits=3, zero_kind=ZeroKind.INT),
    Case(m=3, dtype=BF16, zero_kind=ZeroKind.BIAS, bias=FLOAT),
    Case(m=0, zero_kind=ZeroKind.NONE),
    Case(m=2, act_order=True, group_size=16, activation="gelu"),
    Case(m=2, codebook=FLOAT, zero_kind=ZeroKind.NONE, dtype=FLOAT),
    Case(m=2, two_level="rows", scale_dtype=torch.int8, k=100, group_size=16, zero_kind=ZeroKind.BIAS),
    Case(m=2, scale_dtype=torch.float8_e4m3fn, two_level="one", zero_kind=ZeroKind.FLOAT),
]


@pytest.mark.parametrize("case", OPCHECKED, ids=str)
def test_opcheck(case: Case) -> None:
    """Schema, autograd registration, fake tensors and aot dispatch with dynamic shapes."""
    x = make_inputs(case)
    tensors, text_ = op_arguments(x.w, "torch")
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if case.scale_dtype == torch.float8_e4m3fn:
        checks.remove("test_schema")  # torch cannot compare float8 tensors with each other
    found = torch.library.opcheck(
        OP.default, (x.a, tensors, text_, x.bias, case.activation), test_utils=checks
    )
    assert set(found.values()) == {"SUCCESS"}


@each_target
def test_opcheck_of_each_kernel(target: Target) -> None:
    x = make_inputs(Case(m=2, n=9, k=40), target.device)
    tensors, text_ = op_arguments(x.w, target.backend, target.kernel)
    found = torch.library.opcheck(OP.default, (x.a[None], tensors, text_))
    assert set(found.values()) == {"SUCCESS"}


@each_target
def test_the_same_bits_as_the_call(target: Target) -> None:
    x = make_inputs(Case(m=3, bias=HALF, activation="silu"), target.device)
    tensors, text_ = op_arguments(x.w, target.backend, target.kernel)
    expected = qmm.matmul(
        x.a, x.w, bias=x.bias, activation="silu", backend=target.backend, kernel=target.kernel
    )
    assert torch.equal(OP(x.a, tensors, text_, x.bias, "silu"), expected)


SHAPES = {
    "rows": lambda a: a,
    "vector": lambda a: a[0],
    "empty": lambda a: a[:0],
    "leading": lambda a: a.view(2, 3, 2, -1),
    "column strides": lambda a: a.t().contiguous().t(),
    "expanded": lambda a: a[:1].expand(12, -1),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_fake_equals_real(shape: str) -> None:
    """Shape, dtype, strides and device; for any strides of A."""
    x = make_inputs(Case(m=12))
    a = SHAPES[shape](x.a)
    real = qmm.matmul(a, x.w)
    with FakeTensorMode() as mode:
        fake = qmm.matmul(mode.from_tensor(a), x.w)
    assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
    assert fake.stride() == real.stride() and fake.storage_offset() == real.storage_offset()


def test_fake_weight() -> None:
    """A weight made of fake tensors, as a model is built without memory."""
    with FakeTensorMode():
        w = QuantizedWeight(
            torch.zeros(8, 8, dtype=torch.int32), torch.ones(2, 8), bits=4, group_size=32, in_features=64
        )
        result = qmm.matmul(torch.empty(5, 64), w, activation="relu")
    assert result.shape == (5, 8) and result.dtype == FLOAT


@pytest.mark.parametrize(
    ("a", "bias", "told"),
    [
        (torch.empty(3, 63), None, ("last size", "63")),
        (torch.empty(()), None, ("last size",)),
        (torch.empty(3, 64), torch.empty(9), ("bias", "(9,)")),
    ],
    ids=["K", "scalar", "bias"],
)
def test_fake_refuses_what_real_refuses(a: Tensor, bias: Tensor | None, told: tuple[str, ...]) -> None:
    w = make_inputs(Case(k=64, n=8)).w
    mode = FakeTensorMode()
    fake = mode.from_tensor(a), None if bias is None else mode.from_tensor(bias)
    for a_given, bias_given in (fake, (a, bias)):
        with pytest.raises(ValueError) as caught:
            qmm.matmul(a_given, w, bias=bias_given)
        assert all(word in str(caught.value) for word in told)


# -- specs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c.m], ids=str)
def test_spec_round_trip(case: Case) -> None:
    w = make_inputs(case).w
    _, line = op_arguments(w, "torch", "blocks")
    found = spec.parse(line)
    assert found.weight == w.spec
    assert (found.fits_float16, found.even_groups) == (w.fits_float16, w.even_groups)
    assert (found.backend, found.kernel) == ("torch", "blocks")
    assert found.layout == (("", tuple(w.tensors.present())),)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "layout"),
        ("layout=:qweight;backend=torch;kernel=-", "bits"),
        ("bits=4;group_size=8;in_features=8;out_features=1;groups=1;zero_kind=none;scale_dtype=load;"
         "layout=:qweight;backend=torch;kernel=-", "scale_dtype"),
    ],
    ids=["empty", "no facts", "no dtype"],
)  # fmt: skip
def test_bad_specs(line: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        spec.parse(line)


def test_layout_text() -> None:
    groups = [("", ("qweight", "scales")), ("triton", ("words",))]
    assert layout_of(groups) == ":qweight,scales|triton:words" and groups_of(layout_of(groups)) == groups
    assert text.split("a=1;b=x=y") == {"a": "1", "b": "x=y"}


def test_wrong_number_of_parts() -> None:
    x = make_inputs(Case())
    tensors, line = op_arguments(x.w, "torch")
    with pytest.raises(ValueError, match="parts"):
        OP(x.a, [t.clone() for t in tensors[:-1]], line)


# -- states of the weight ---------------------------------------------------------------------------------------------


class Flipped(PreparedLayout):
    """Every tensor flipped along its rows."""

    layout = "flipped"

    def __init__(self, spec: WeightSpec, tensors: Mapping[str, Tensor]) -> None:
        self.spec, self._tensors = spec, tensors

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def restore(self) -> Mapping[str, Tensor | None]:
        return {name: t.flip(0) for name, t in self._tensors.items()}

    def refill(self, canonical: Mapping[str, Tensor | None]) -> None:
        for name, t in self._tensors.items():
            t.copy_(canonical[name].flip(0))  # type: ignore[union-attr]


class Flips(Backend):
    """Multiplies out of its own layout; ``adopts`` says whether it knows it again."""

    name = "flips"
    kernels = (Kernel("only", "a toy", Tier.TEXTBOOK, Limits(devices=("cpu",))),)
    adopts = True

    def environment(self) -> list[qmm.Reason]:
        return []

    def prepare(self, w: QuantizedWeight) -> PreparedLayout:
        return Flipped(w.spec, {name: t.flip(0) for name, t in w.tensors.present().items()})

    def adopt(self, spec: WeightSpec, tensors: Mapping[str, Tensor]) -> PreparedLayout | None:
        return Flipped(spec, tensors) if self.adopts else None

    def run(self, call: Any, kernel: Any, config: Any, a: Tensor, w: Any, bias: Any, out: Tensor) -> None:
        layout = w.prepare_for(self)
        out.copy_(a.float() @ w._same_meaning(type(w.tensors)(**layout.restore())).dequantize())


@pytest.fixture
def flips(monkeypatch: pytest.MonkeyPatch) -> Flips:
    backend = Flips()
    monkeypatch.setattr(registry, "_found", {**qmm.backends(), "flips": backend})
    return backend


@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
@pytest.mark.parametrize("living", [True, False])
def test_prepared_weights(flips: Flips, release: bool, living: bool) -> None:
    """Found by their tensors, or made of them where the weight is gone (a saved program)."""
    x = make_inputs(Case(dtype=FLOAT))
    expected = qmm.matmul(x.a, x.w.clone(), backend="flips")
    x.w.prepare_for(flips, release=release)
    assert torch.equal(qmm.matmul(x.a, x.w, backend="flips"), expected)
    tensors, line = op_arguments(x.w, "flips")
    assert len(spec.parse(line).layout) == (1 if release else 2)
    if living:
        parts.remember(x.w)
        assert parts.weight_of(tensors, spec.parse(line)) == (x.w, True)
    else:
        tensors = [t.clone() for t in tensors]
        made, found = parts.weight_of(tensors, spec.parse(line))
        assert not found and made.state == ("released: flips" if release else "kept: flips")
    assert torch.equal(OP(x.a, tensors, line), expected)


def test_a_layout_that_is_not_known_again(flips: Flips) -> None:
    """Kept: the canonical tensors serve. Released: an error that says what to do."""
    flips.adopts = False
    x = make_inputs(Case(dtype=FLOAT))
    expected = qmm.matmul(x.a, x.w, backend="torch")
    x.w.prepare_for(flips)
    tensors, line = op_arguments(x.w, "torch")
    assert torch.equal(OP(x.a, [t.clone() for t in tensors], line), expected)
    x.w.prepare_for(flips, release=True)
    tensors, line = op_arguments(x.w, "flips")
    with pytest.raises(qmm.UnsupportedError, match=r"w\.restore\(\)"):
        OP(x.a, [t.clone() for t in tensors], line)


def test_a_weight_that_is_gone_is_not_found() -> None:
    """Identities are used again; nothing keeps a weight alive."""
    x = make_inputs(Case())
    parts.remember(x.w)
    tensors, line = op_arguments(x.w, "torch")
    expected = OP(x.a, tensors, line)
    x.w = make_inputs(Case(bias=HALF)).w
    assert parts.weight_of(tensors, spec.parse(line))[1] is False
    assert torch.equal(OP(x.a, tensors, line), expected)


# -- who looks --------------------------------------------------------------------------------------------------------


class Names(TorchDispatchMode):
    """Writes down which operators it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_one_operator() -> None:
    x = make_inputs(Case())
    expected = qmm.matmul(x.a, x.w)  # remembered
    with Names() as names:
        result = qmm.matmul(x.a, x.w)
    assert names.seen == ["qmm.matmul.default"] and torch.equal(result, expected)


def test_eager_goes_past_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain call costs no trip through the dispatcher."""
    x = make_inputs(Case())
    monkeypatch.setattr("qmm.op.way_in.matmul", lambda *_, **__: pytest.fail("the operator was called"))
    qmm.matmul(x.a, x.w)
    qmm.matmul(x.a, x.w)


def test_make_fx() -> None:
    x = make_inputs(Case(m=2))
    program = make_fx(lambda a: qmm.matmul(a, x.w) * 2)(x.a)
    assert "torch.ops.qmm.matmul.default" in program.code
    assert torch.equal(program(x.a), qmm.matmul(x.a, x.w) * 2)


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap(dim: int) -> None:
    """A batch of A is one more leading dimension."""
    x = make_inputs(Case(m=12))
    a = x.a.view(4, 3, -1)
    result = torch.vmap(lambda t: qmm.matmul(t, x.w, activation="relu"), in_dims=dim, out_dims=dim)(a)
    assert torch.equal(result, qmm.matmul(a, x.w, activation="relu"))
