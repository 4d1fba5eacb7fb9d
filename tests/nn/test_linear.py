"""QuantLinear as a module: saved, loaded, moved, copied and cast like any other, and always the same weight."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qmm
from qmm import Backend, Kernel, Limits, PreparedLayout, QuantizedWeight, Reason, Tier, ZeroKind
from qmm.nn import QuantLinear
from qmm.testing import Case, make_weight

K, N = 64, 24
CASES = {
    "symmetric": Case(k=K, n=N, zero_kind=ZeroKind.NONE),
    "int zeros": Case(bits=3, k=K, n=N, group_size=16),
    "bias, two levels": Case(
        k=K, n=N, group_size=16, zero_kind=ZeroKind.BIAS, scale_dtype=torch.int8, two_level="rows"
    ),
    "e4m3, one factor": Case(
        k=K, n=N, zero_kind=ZeroKind.NONE, scale_dtype=torch.float8_e4m3fn, two_level="one"
    ),
    "codebook": Case(k=K, n=N, codebook=torch.float32, zero_kind=ZeroKind.NONE),
    "act-order": Case(act_order=True, k=K, n=N, group_size=16),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def weight(case: Case = CASES["symmetric"], seed: int = 0) -> QuantizedWeight:
    return make_weight(case, np.random.default_rng(seed))


def layer(case: Case = CASES["symmetric"], seed: int = 0) -> QuantLinear:
    generator = torch.Generator().manual_seed(seed)
    return QuantLinear.from_weight(weight(case, seed), torch.randn(N, generator=generator))


def same(x: QuantLinear, y: QuantLinear) -> bool:
    a, b = x.state_dict(), y.state_dict()
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a
    )


class Flipped(PreparedLayout):
    layout = "flipped"

    def __init__(self, w: QuantizedWeight) -> None:
        self._tensors = {name: t.flip(0) for name, t in w.tensors.present().items()}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def restore(self) -> Mapping[str, Tensor | None]:
        return {name: t.flip(0) for name, t in self._tensors.items()}

    def refill(self, canonical: Mapping[str, Tensor | None]) -> None:
        for name, t in self._tensors.items():
            source = canonical[name]
            assert source is not None
            t.copy_(source.flip(0))


class Toy(Backend):
    name = "toy"
    kernels = (Kernel("only", "a toy", Tier.TEXTBOOK, Limits(devices=("cpu",))),)

    def environment(self) -> list[Reason]:
        return []

    def prepare(self, w: QuantizedWeight) -> PreparedLayout:
        return Flipped(w)

    def run(self, *_: object) -> None:
        raise AssertionError("not run here")


def released(seed: int = 0) -> QuantLinear:
    """A layer whose weight is in a backend's layout alone, as on a GPU."""
    w = weight(seed=seed)
    w.prepare_for(Toy(), release=True)
    generator = torch.Generator().manual_seed(seed)
    return QuantLinear.from_weight(w, torch.randn(N, generator=generator))


def test_is_a_linear_of_the_quantised_weight() -> None:
    linear = nn.Linear(K, N)
    mine = QuantLinear.from_linear(linear, bits=8, group_size=32, symmetric=False)
    x = torch.randn(2, 3, K)
    want = nn.functional.linear(x, mine.weight.dequantize().t(), linear.bias)
    torch.testing.assert_close(mine(x), want)
    assert (mine(x) - linear(x)).abs().max() < 0.02
    assert isinstance(mine, nn.Linear) and (mine.in_features, mine.out_features) == (K, N)
    assert mine.weight.bits == 8 and mine.weight.device == linear.weight.device
    assert mine.bias is not None and mine.bias.data_ptr() == linear.bias.data_ptr()
    assert not any(p.requires_grad for p in mine.parameters())
    assert mine(x.half()).dtype == torch.float16
    assert "int8, group 32" in repr(mine) and "bias=True" in repr(mine)
    plain = QuantLinear.from_linear(nn.Linear(K, N, bias=False).eval(), activation="silu", group_size=K)
    assert plain.bias is None and not plain.training and (plain(x) >= -0.3).all()


@each_case
def test_saved_and_loaded_in_every_way(case: Case) -> None:
    source = layer(case)
    saved = {name: t.clone() for name, t in source.state_dict().items()}
    onto = layer(case, seed=1)
    held = onto.weight.qweight
    assert onto.load_state_dict(saved).missing_keys == []
    assert same(onto, source) and onto.weight.qweight is held  # in place: captured graphs see it
    assigned = QuantLinear(K, N, device="meta")  # other facts than those of the weight to come
    assigned.load_state_dict(saved, assign=True)
    assert same(assigned, source) and assigned.weight.qweight.data_ptr() == saved["qweight"].data_ptr()
    x = torch.randn(3, K)
    assert torch.equal(assigned(x), source(x)) and torch.equal(onto(x), source(x))


@each_case
def test_copies_and_pickles_are_independent_and_equal(case: Case) -> None:
    source = layer(case)
    for other in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert same(other, source) and repr(other) == repr(source)
        assert not {t.data_ptr() for t in other.buffers()} & {t.data_ptr() for t in source.buffers()}
        other.load_state_dict(layer(case, seed=1).state_dict())
        assert not same(other, source)


def test_what_is_in_memory_are_plain_buffers() -> None:
    for made in (layer(CASES["bias, two levels"]), released()):
        buffers = dict(made.named_buffers())
        assert sum(t.nbytes for t in buffers.values()) == made.weight.nbytes
        assert all(type(t) is Tensor and t.is_contiguous() for t in buffers.values())
        assert len({t.untyped_storage().data_ptr() for t in buffers.values()}) == len(buffers)
        saved = made.state_dict()
        assert all(type(t) is Tensor and t.is_contiguous() for t in saved.values())
        assert len({t.untyped_storage().data_ptr() for t in saved.values()}) == len(saved)


def test_a_prepared_layout_is_invisible_to_saving() -> None:
    plain, hidden = layer(), released()
    assert sorted(dict(hidden.named_buffers())) == ["toy_qweight", "toy_scales"]
    assert same(hidden, plain)
    assert same(copy.deepcopy(hidden), plain) and same(pickle.loads(pickle.dumps(hidden)), plain)
    memory = {name: t.data_ptr() for name, t in hidden.named_buffers()}
    hidden.load_state_dict(layer(seed=1).state_dict())  # refills the layout in place
    assert {name: t.data_ptr() for name, t in hidden.named_buffers()} == memory
    assert same(hidden, layer(seed=1)) and hidden.weight.released_to == "toy"
    before = hidden.weight
    hidden.half()
    assert hidden.weight is before and hidden.weight.released_to == "toy"  # nothing moved: nothing restored
    moved = hidden.to("meta")
    assert moved.weight.device.type == "meta" and "qweight" in dict(moved.named_buffers())


@pytest.mark.parametrize(
    "cast",
    [nn.Module.half, nn.Module.double, lambda m: m.to(torch.bfloat16), lambda m: m.type(torch.float16)],
)
@each_case
def test_no_cast_touches_the_weight(case: Case, cast: object) -> None:
    made, before = layer(case), layer(case)
    cast(made)  # type: ignore[operator]
    assert made.bias is not None and made.bias.dtype != torch.float32
    assert made.weight.spec == before.weight.spec
    made.bias = before.bias
    assert same(made, before)


def test_moves() -> None:
    made = layer()
    x = torch.randn(2, K)
    want = made(x)
    shared = made.share_memory()
    assert shared.weight.qweight.is_shared() and torch.equal(shared(x), want)
    saved = made.state_dict()
    made.to("meta")
    assert made.weight.device.type == "meta" and made(x.to("meta")).shape == (2, N)
    with pytest.warns(UserWarning, match="assign=True"):
        made.load_state_dict(saved)
    empty = made.to_empty(device="cpu")
    empty.load_state_dict(saved)
    assert torch.equal(empty(x), want)
    assert torch.equal(nn.Sequential(made).to("cpu")[0](x), want)


def test_bad_loads_say_what_is_wrong_and_change_nothing() -> None:
    made, before = layer(), layer()
    other = {f"0.{k}": t for k, t in layer(CASES["int zeros"]).state_dict().items()}
    model = nn.Sequential(made)
    with pytest.raises(
        RuntimeError, match=r"0: other: must have the facts of this weight; got bits 4 here and 3"
    ):
        model.load_state_dict(other)
    small = QuantLinear.from_linear(nn.Linear(K, 8), group_size=32).state_dict(prefix="0.")
    with pytest.raises(RuntimeError, match=r"must be \(K, N\) = \(64, 24\); got \(64, 8\)"):
        model.load_state_dict(small, assign=True)
    part = {
        k: t
        for k, t in layer(seed=1).state_dict(prefix="0.").items()
        if "scales" not in k and "bias" not in k
    }
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.bias", "0.scales"'):
        model.load_state_dict(part)
    assert model.load_state_dict(part, strict=False).missing_keys == ["0.bias", "0.scales"]
    assert same(made, before)
    extra = before.state_dict(prefix="0.") | {"0.weight": torch.zeros(N, K)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "0.weight"'):
        model.load_state_dict(extra)
    assert model.load_state_dict(extra, strict=False).unexpected_keys == ["0.weight"]
    damaged = before.state_dict(prefix="0.") | {"0.scales": torch.zeros(2, 3)}
    with pytest.raises(RuntimeError, match=r"0: scales: shape must be \[G, N\]"):
        model.load_state_dict(damaged)


def test_bad_arguments() -> None:
    w = weight()
    for call, error, text in (
        (lambda: QuantLinear.from_linear(nn.Bilinear(2, 2, 2)), TypeError, "got Bilinear"),
        (lambda: QuantLinear.from_linear(layer()), TypeError, "got QuantLinear"),
        (lambda: QuantLinear.from_linear(nn.Linear(K, N), bits=9), ValueError, "bits"),
        (lambda: QuantLinear.from_weight(torch.zeros(2)), TypeError, "must be a qmm.QuantizedWeight"),
        (lambda: QuantLinear.from_weight(w, torch.zeros(3)), ValueError, r"shape must be \(24,\)"),
        (lambda: QuantLinear.from_weight(w, torch.zeros(N, dtype=torch.int32)), TypeError, "floating"),
        (lambda: QuantLinear.from_weight(w, torch.zeros(N, device="meta")), ValueError, "one device"),
        (lambda: QuantLinear(0, 4), ValueError, "in_features"),
        (lambda: setattr(layer(), "weight", torch.zeros(N, K)), TypeError, "QuantizedWeight"),
        (lambda: setattr(layer(), "weight", w[:32]), ValueError, r"\(64, 24\); got \(32, 24\)"),
        (lambda: setattr(layer(), "weight", nn.Parameter(torch.zeros(N, K))), KeyError, "weight"),
        (lambda: layer().reset_parameters(), NotImplementedError, "load a state_dict"),
        (lambda: QuantLinear.from_weight(w, backend="nosuch")(torch.zeros(1, K)), ValueError, "nosuch"),
    ):
        with pytest.raises(error, match=text):
            call()


def test_backend_and_autocast() -> None:
    made, x = layer(), torch.randn(2, K)
    named = QuantLinear.from_weight(made.weight, made.bias, backend="torch", deterministic="batch")
    assert torch.equal(named(x), qmm.matmul(x, made.weight, bias=made.bias, deterministic="batch"))
    assert "backend=torch" in repr(named)
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype == torch.bfloat16
        assert torch.equal(made(x), made(x.bfloat16()))
    made.weight = weight(seed=5)
    assert same(made, QuantLinear.from_weight(weight(seed=5), made.bias))


def test_zeros_until_loaded() -> None:
    for symmetric in (True, False):
        made = QuantLinear(K, N, bits=3, group_size=-1, symmetric=symmetric)
        assert torch.equal(made(torch.randn(2, K)), torch.zeros(2, N))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.device("meta"):
            assert QuantLinear(K, N, bias=False).weight.device.type == "meta"
