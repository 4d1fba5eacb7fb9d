"""Merged layers: the same bits, one product for all parts, and nothing of it in what is saved."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qmm
from qmm.nn import QuantLinear, convert, merge, unmerge
from qmm.nn.merge import MergedLinear, QuantLinearPart


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.o_proj = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = (self.k_proj(x) + self.v_proj(x)).repeat_interleave(2, -1)
        return x + self.o_proj(torch.tanh(self.q_proj(x)) * values)


def pair() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def plain(seed: int = 0) -> Block:
    torch.manual_seed(seed)
    block = Block()
    convert(block, group_size=16)
    return block


@torch.no_grad()
def test_exact_and_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    block, want = plain(), plain()
    done = merge(block)
    assert done.merged == ["q_proj_and_k_proj_and_v_proj"] and done.left == {}
    assert isinstance(block.q_proj, QuantLinearPart) and isinstance(block.o_proj, QuantLinear)
    calls = []
    whole = block.q_proj_and_k_proj_and_v_proj
    forward = MergedLinear.forward
    monkeypatch.setattr(MergedLinear, "forward", lambda self, x: calls.append(1) or forward(self, x))
    for _ in range(2):
        x = torch.randn(2, 3, 32)
        for name in ("q_proj", "k_proj", "v_proj"):
            assert torch.equal(getattr(block, name)(x), getattr(want, name)(x))
    assert len(calls) == 2 and whole._now is None  # nothing is kept once all were answered
    x = torch.randn(2, 3, 32)
    block.q_proj(x)
    block.q_proj(x)  # the same part again: computed anew
    assert len(calls) == 4
    x.add_(1)  # another value in the same tensor
    assert torch.equal(block.k_proj(x), want.k_proj(x)) and len(calls) == 5
    assert torch.equal(block(x), want(x))
    assert sum(t.nbytes for t in block.buffers()) == sum(t.nbytes for t in want.buffers())


@torch.no_grad()
def test_saved_as_if_unmerged() -> None:
    block, want, other = plain(), plain(), plain(seed=1)
    merge(block)
    saved = block.state_dict()
    reference = want.state_dict()
    assert saved.keys() == reference.keys()
    assert all(torch.equal(saved[k], reference[k]) for k in saved)
    x = torch.randn(1, 2, 32)
    assert block.load_state_dict(other.state_dict()).missing_keys == []
    assert torch.equal(block(x), other(x)) and not torch.equal(block(x), want(x))
    copied = copy.deepcopy(block)
    assert copied.q_proj._whole[0] is copied.q_proj_and_k_proj_and_v_proj
    assert torch.equal(copied.half()(x.half()), copy.deepcopy(other).half()(x.half()))
    back = unmerge(block)
    assert type(back.q_proj) is QuantLinear and not hasattr(back, "q_proj_and_k_proj_and_v_proj")
    assert torch.equal(back(x), other(x))
    wrong = nn.Linear(32, 16)
    saved |= QuantLinear.from_linear(wrong, bits=8, group_size=16).state_dict(prefix="k_proj.")
    merge(back)
    with pytest.raises(RuntimeError, match="k_proj: other: must have the facts of this weight; got bits"):
        back.load_state_dict(saved)


@torch.no_grad()
def test_parts_keep_their_own_bias() -> None:
    block = Block()
    block.k_proj = nn.Linear(32, 16, bias=False)
    convert(block, group_size=16)
    want = copy.deepcopy(block)
    merge(block)
    x = torch.randn(4, 32)
    assert block.k_proj.bias is None and torch.equal(block.k_proj(x), want.k_proj(x))
    assert "k_proj.bias" not in block.state_dict() and torch.equal(block.v_proj.bias, want.v_proj.bias)


def test_what_cannot_be_joined_is_left() -> None:
    for change, reason in (
        (lambda b: setattr(b, "k_proj", QuantLinear.from_linear(nn.Linear(32, 16), 8, 16)), "bits"),
        (lambda b: setattr(b, "k_proj", QuantLinear.from_linear(nn.Linear(48, 16), 4, 16)), "in_features"),
        (lambda b: b.v_proj.register_forward_hook(lambda *_: None), "hooks"),
        (lambda b: setattr(b.v_proj, "activation", "relu"), "activation"),
        (lambda b: setattr(b, "q_proj_and_k_proj_and_v_proj", 3), "attribute"),
        (lambda b: b.v_proj.half(), "biases differ"),
    ):
        block = plain()
        change(block)
        done = merge(block)
        assert done.merged == [] and reason in done.left["q_proj_and_k_proj_and_v_proj"], done
        assert type(block.q_proj) is QuantLinear


@torch.no_grad()
def test_by_convert() -> None:
    model, want, x = pair(), pair(), torch.randn(2, 32)
    report = convert(model, group_size=16, merge=True)
    convert(want, group_size=16)
    assert report.merged == ("0.q_proj_and_k_proj_and_v_proj", "1.q_proj_and_k_proj_and_v_proj")
    assert "merged: 0.q" in str(report)
    assert torch.equal(model(x), want(x))
    pairs = pair()
    assert len(convert(pairs, group_size=16, merge=[("k_proj", "v_proj")]).merged) == 2
    assert torch.equal(pairs(x), want(x))


def test_columns_by_number() -> None:
    w = qmm.quantize(torch.randn(12, 40), bits=3, group_size=16, symmetric=False)
    index = torch.tensor([5, 0, 11, 5])
    assert torch.equal(w[:, index].dequantize(), w.dequantize()[:, index])
    assert torch.equal(w[16:, [1, 2]].dequantize(), w.dequantize()[16:, [1, 2]])
    for bad, error in (
        (torch.tensor([12]), qmm.WeightFormatError),
        (torch.tensor([-1]), qmm.WeightFormatError),
        (torch.tensor([], dtype=torch.int64), qmm.WeightFormatError),
        (torch.tensor([0.5]), TypeError),
        (torch.tensor([[1]]), TypeError),
    ):
        with pytest.raises(error, match="index"):
            w[:, bad]
