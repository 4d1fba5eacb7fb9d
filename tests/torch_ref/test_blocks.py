"""The torch backend's extra memory: what the module's docstring promises, measured; never the whole W."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qmm import QuantizedWeight, ZeroKind
from qmm.backends.torch_ref import blocks
from qmm.call import make_call
from qmm.testing import Case, make_inputs

HALF, FLOAT = torch.float16, torch.float32


class Peak(TorchDispatchMode):
    """Most bytes that were alive at once in tensors made inside; storages that came from outside do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._outside: set[int] = set()
        self._users: dict[int, int] = {}
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._outside.update(s for s in map(_storage, _tensors((args, kwargs))) if s not in self._users)
        result = func(*args, **(kwargs or {}))
        for t in _tensors(result):
            ident = _storage(t)
            if ident not in self._outside:
                self._users[ident] = self._users.get(ident, 0) + 1
                self._bytes[ident] = t.untyped_storage().nbytes()
                weakref.finalize(t, self._let_go, ident)
        self.most = max(self.most, sum(self._bytes.values()))
        return result

    def _let_go(self, ident: int) -> None:
        self._users[ident] -= 1
        if not self._users[ident]:
            del self._users[ident], self._bytes[ident]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def test_the_measure_measures() -> None:
    a = torch.ones(1000)
    with Peak() as peak:
        b = a + 1  # 4000 bytes
        b = b.view(10, 100).double()  # 8000 beside it, then alone
        a.mul_(2)
        _ = b + 1
    assert peak.most == 16000


CASES = (
    Case(m=3, k=256, n=2048),
    Case(m=40, k=250, n=2000, bits=3, two_level="rows", zero_kind=ZeroKind.BIAS, group_size=48),
    Case(m=100, k=256, n=2048, zero_kind=ZeroKind.NONE, codebook=HALF, act_order=True, bias=HALF, activation="gelu"),
    Case(m=1, k=256, n=2048, bits=7, zero_kind=ZeroKind.FLOAT, group_size=30, act_order=True, dtype=FLOAT),
    Case(m=200, k=250, n=2000, bits=8, dtype=FLOAT, activation="silu", bias=FLOAT),
    Case(m=5, k=40_000, n=50, activation="gelu_tanh"),  # one column alone is more than a block
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_extra_memory_is_within_the_bound(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blocks.BLOCK_CODES, "cpu", 1 << 13)
    x = make_inputs(case)
    call = make_call(x.a, x.w, bias=x.bias, activation=case.activation)
    config = blocks.choose(call)
    assert config.block_n < case.n
    out = torch.empty(case.m, case.n, dtype=case.dtype)
    with Peak() as peak:
        blocks.run(call, config, x.a, x.w, x.bias, out)
    bound = blocks.memory_bound(call, config)
    assert bound / 8 < peak.most <= bound
    if case.n > 50:
        assert bound < case.k * case.n  # half of what W takes in float16


def test_the_bound_does_not_grow_with_n_or_m() -> None:
    """At sizes that are really used: K = 8192, N = 2**20, where W in float16 would take 16 GiB."""
    words = torch.empty(1024, 2**20, dtype=torch.int32, device="meta")
    scales = torch.empty(64, 2**20, dtype=HALF, device="meta")
    w = QuantizedWeight(words, scales, bits=4, group_size=128, in_features=8192)
    for m in (1, 100_000):
        call = make_call(torch.empty(m, 8192, dtype=HALF, device="meta"), w)
        for device, most in (("cpu", 64 << 20), ("cuda", 512 << 20)):
            there = replace(call, device=torch.device(device))
            assert blocks.memory_bound(there, blocks.choose(there)) <= most
