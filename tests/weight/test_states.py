"""Kept and released states with a toy layout: lossless, at most once, refilled in place."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

import qmm
from qmm import Backend, Kernel, Limits, PreparedLayout, QuantizedWeight, Reason, Tier, ZeroKind
from qmm.testing import Case, make_weight

CASES = {
    "int zeros": Case(bits=3, k=70),
    "symmetric": Case(zero_kind=ZeroKind.NONE),
    "act-order": Case(act_order=True, k=64, group_size=16),
    "two levels": Case(
        k=100, group_size=16, zero_kind=ZeroKind.BIAS, scale_dtype=torch.int8, two_level="rows"
    ),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


class Reversed(PreparedLayout):
    """Every tensor flipped along its rows."""

    layout = "reversed"

    def __init__(self, w: QuantizedWeight) -> None:
        self._tensors = {name: t.flip(0) for name, t in w.tensors.present().items()}
        self.restored = 0

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def restore(self) -> Mapping[str, Tensor | None]:
        self.restored += 1
        return {name: t.flip(0) for name, t in self._tensors.items()}

    def refill(self, canonical: Mapping[str, Tensor | None]) -> None:
        for name, t in self._tensors.items():
            source = canonical[name]
            assert source is not None
            t.copy_(source.flip(0))


class Toy(Backend):
    """Multiplies out of its own layout, by way of the canonical form."""

    name = "toy"
    kernels = (Kernel("only", "a toy", Tier.TEXTBOOK, Limits(devices=("cpu",))),)

    def __init__(self, name: str = "toy") -> None:
        self.name = name  # type: ignore[misc]
        self.prepared = 0
        self.delay = 0.0

    def environment(self) -> list[Reason]:
        return []

    def prepare(self, w: QuantizedWeight) -> PreparedLayout:
        self.prepared += 1
        time.sleep(self.delay)
        return Reversed(w)

    def run(self, call, kernel, config, a, w, bias, out) -> None:  # type: ignore[no-untyped-def]
        layout = w.prepare_for(self)
        restored = {name: t.flip(0) for name, t in layout.tensors.items()}
        out.copy_(a.float() @ w._same_meaning(type(w.tensors)(**restored)).dequantize())


class Declines(Toy):
    """Reads the canonical form."""

    def prepare(self, w: QuantizedWeight) -> None:  # type: ignore[override]
        self.prepared += 1


def made(case: Case, seed: int = 0) -> QuantizedWeight:
    return make_weight(case, np.random.default_rng(seed))


def assert_same(x: QuantizedWeight, y: QuantizedWeight) -> None:
    assert x.spec == y.spec
    for name, t in x.tensors.present().items():
        assert torch.equal(t, y.tensors.present()[name]), name


@each_case
def test_kept(case: Case) -> None:
    w, toy = made(case), Toy()
    before, size = w.clone(), w.nbytes
    layout = w.prepare_for(toy)
    assert w.prepare_for(toy) is layout and toy.prepared == 1
    assert w.state == "kept: toy" and w.released_to is None and w.nbytes == 2 * size
    assert "kept: toy" in repr(w)
    assert_same(w, before)
    assert layout is not None and layout.restored == 0  # type: ignore[attr-defined]
    assert {"w.qweight", "w.toy.qweight"} <= w.stored_tensors().keys()


@each_case
def test_released_restores_bit_for_bit(case: Case) -> None:
    w, toy = made(case), Toy()
    before, size = w.clone(), w.nbytes
    layout = w.prepare_for(toy, release=True)
    assert w.state == "released: toy" and w.released_to == "toy" and w.nbytes == size
    assert not any(name.startswith("w.q") for name in w.stored_tensors())
    assert w.prepare_for(toy) is layout and w.prepare_for(toy, release=True) is layout and toy.prepared == 1
    assert_same(w, before)
    assert w.state == "released: toy", "looking at the tensors must not change the state"
    assert w.restore() is w and w.state == "canonical"
    assert_same(w, before)


@each_case
@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_leaving_restores_the_canonical_form(case: Case, release: bool) -> None:
    w = made(case)
    before = w.clone()
    w.prepare_for(Toy(), release=release)
    ways = {
        "to": w.to("cpu", copy=True),
        "clone": w.clone(),
        "deepcopy": copy.deepcopy(w),
        "pickle": pickle.loads(pickle.dumps(w)),
        "state_dict": QuantizedWeight.from_state_dict(w.state_dict()),
        "slice": w[:, :],
    }
    for name, other in ways.items():
        assert other.state == "canonical", name
        assert_same(other, before)
    assert w.to("meta").spec == w.spec
    assert w.to("cpu") is w and w.state != "canonical"


@each_case
@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
@pytest.mark.parametrize("way", ["copy_", "load_state_dict"])
def test_updates_refill_the_same_storage(case: Case, release: bool, way: str) -> None:
    w, other = made(case), made(case, seed=1)
    layout = w.prepare_for(Toy(), release=release)
    assert layout is not None
    addresses = {name: t.data_ptr() for name, t in w.stored_tensors().items()}
    if way == "copy_":
        w.copy_(other)
    else:
        w.load_state_dict(other.state_dict())
    assert {name: t.data_ptr() for name, t in w.stored_tensors().items()} == addresses
    assert_same(w, other)
    for name, t in other.tensors.present().items():
        assert torch.equal(layout.tensors[name], t.flip(0)), name


def test_copy_from_a_released_weight_and_from_itself() -> None:
    w, other = made(Case()), made(Case(), seed=1)
    other.prepare_for(Toy(), release=True)
    assert_same(w.copy_(other), other)
    assert_same(other.copy_(other), w)


def test_two_backends() -> None:
    w, one, two = made(Case()), Toy("one"), Toy("two")
    before = w.clone()
    w.prepare_for(two)
    w.prepare_for(one)
    assert w.state == "kept: one, two"
    w.prepare_for(one, release=True)
    assert w.state == "released: one"
    w.prepare_for(two)  # only one layout at a time is the weight: the canonical form comes back
    assert w.state == "kept: two"
    w.prepare_for(one, release=True)
    w.prepare_for(two, release=True)
    assert w.state == "released: two"
    assert_same(w, before)


def test_a_backend_that_declines_is_asked_once() -> None:
    w, declines = made(Case()), Declines()
    assert w.prepare_for(declines) is None and w.prepare_for(declines, release=True) is None
    assert declines.prepared == 1 and w.state == "canonical"
    w.prepare_for(Toy("other"), release=True)
    w.prepare_for(declines)
    assert w.state == "released: other"


def test_a_failing_preparation_changes_nothing() -> None:
    class Fails(Toy):
        def prepare(self, w: QuantizedWeight) -> PreparedLayout:
            raise MemoryError("no room")

    w = made(Case())
    before = w.clone()
    with pytest.raises(MemoryError, match="no room"):
        w.prepare_for(Fails(), release=True)
    assert w.state == "canonical"
    assert_same(w, before)


@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_threads_prepare_once(release: bool) -> None:
    w, toy = made(Case()), Toy()
    toy.delay = 0.02
    with ThreadPoolExecutor(8) as pool:
        layouts = list(pool.map(lambda _: w.prepare_for(toy, release=release), range(16)))
    assert toy.prepared == 1 and all(layout is layouts[0] for layout in layouts)


def test_readers_while_states_change() -> None:
    """Reading from one thread while another prepares, releases, restores and copies: always the same weight."""
    w, toy = made(Case(n=5)), Toy()
    before = w.clone()
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                assert_same(w, before)
                assert w.state.partition(":")[0] in {"canonical", "kept", "released"}
                assert (
                    w.nbytes > 0
                    and w.stored_tensors()
                    and repr(w)
                    and w.released_to in (None, "toy", "second")
                )
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for r in readers:
        r.start()
    for _ in range(150):
        w.prepare_for(toy)
        w.prepare_for(Toy("second"))
        w.prepare_for(toy, release=True)
        w.copy_(before)
        w.restore()
    stop.set()
    for r in readers:
        r.join()
    assert not failures, failures[0]


def test_prepare_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy()
    monkeypatch.setattr("qmm.registry._found", {**qmm.backends(), "toy": toy})
    w = made(Case(dtype=torch.float32))
    a = torch.randn(2, w.in_features)
    expected = a @ w.dequantize()
    assert qmm.prepare(w, "toy") is w and w.state == "kept: toy"
    torch.testing.assert_close(qmm.matmul(a, w, backend="toy"), expected)
    qmm.prepare(w, "toy", release=True)
    assert w.state == "released: toy"
    torch.testing.assert_close(qmm.matmul(a, w, backend="toy"), expected)
    torch.testing.assert_close(qmm.matmul(a, w, backend="torch"), expected)
    told = qmm.explain(a, w, backend="torch")
    assert any("released to toy" in text for text in told.copies) and told.call.released_to == "toy"
    assert not qmm.explain(a, w, backend="toy").copies
    assert toy.prepared == 1


def test_out_may_not_overlap_a_prepared_layout() -> None:
    w = made(Case(m=1, k=64, n=8, group_size=16))
    layout = w.prepare_for(Toy(), release=True)
    assert layout is not None
    out = layout.tensors["scales"].view(-1)[:8].view(1, 8)
    with pytest.raises(
        ValueError, match=r"out: must not share memory with an input; got out overlapping w\.toy\.scales"
    ):
        qmm.matmul(torch.zeros(1, 64, dtype=torch.float16), w, out=out, backend="torch")
