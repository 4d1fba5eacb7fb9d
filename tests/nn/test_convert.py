"""convert: in place, all or nothing, by name, and honest about what it left."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qmm
from qmm.nn import QuantEmbedding, QuantLinear, convert


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, 16)
        self.v_proj = nn.Linear(width, 16)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.o_proj(torch.tanh(self.q_proj(x)) * (self.k_proj(x) + self.v_proj(x)).repeat(1, 1, 2))


class Model(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(32, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


IDS = torch.tensor([[1, 7, 3]])


def kinds(model: nn.Module) -> dict[str, type]:
    return {name: type(m) for name, m in model.named_modules()}


@torch.no_grad()
def test_report_and_result() -> None:
    model, steps = Model(), []
    want = model(IDS)
    report = convert(model, bits=8, group_size=16, progress=lambda *step: steps.append(step))
    assert (model(IDS) - want).abs().max() < 0.1
    assert len(report.layers) == 8 and [s[0] for s in steps] == list(range(1, 9)) and steps[-1][1] == 8
    first = report.layers[0]
    assert (first.name, first.bytes_before, first.bytes_after) == ("blocks.0.q_proj", 4096, 1024 + 2 * 2 * 32)
    exact, got = Model().blocks[0].q_proj.weight, model.blocks[0].q_proj.weight.dequantize().t()
    assert first.error == pytest.approx(float((exact - got).norm() / exact.norm()), rel=1e-4)
    assert report.worst_error >= first.error > 0
    assert report.bytes_before == sum(layer.bytes_before for layer in report.layers)
    assert report.skipped == {"lm_head": "its weight is tied to embed"}
    text = str(report)
    assert (
        "blocks.1.o_proj" in text
        and "8 layers" in text
        and "left as it is: lm_head: its weight is tied" in text
    )
    again = convert(model)
    assert again.layers == () and again.worst_error == 0 and "0 layers" in str(again)


def test_patterns() -> None:
    model = Model(tied=False)
    report = convert(model, group_size=16, modules=["blocks.*", "lm_head"], skip="*.[kv]_proj")
    assert [layer.name for layer in report.layers] == [
        "blocks.0.q_proj", "blocks.0.o_proj", "blocks.1.q_proj", "blocks.1.o_proj", "lm_head",
    ]  # fmt: skip
    assert report.skipped["blocks.0.k_proj"] == "asked for by skip="
    for argument in ({"modules": "nosuch*"}, {"skip": ["blocks.*", "nosuch*"]}, {"modules": "embed"}):
        model = Model()
        before = kinds(model)
        with pytest.raises(
            ValueError, match=r"must match a layer \(.* and \d more\); got '(nosuch\*|embed)'"
        ):
            convert(model, **argument)
        assert kinds(model) == before


def test_tied_tables() -> None:
    model = Model()
    want = model(IDS)
    report = convert(model, group_size=16, bits=8, embeddings=8)
    assert {layer.name for layer in report.layers} >= {"embed, lm_head"}
    assert isinstance(model.embed, QuantEmbedding) and isinstance(model.lm_head, QuantLinear)
    assert model.embed.weight is model.lm_head.weight
    assert (model(IDS) - want).abs().max() < 0.5
    untied = Model(tied=False)
    convert(untied, group_size=16, embeddings=4)
    assert untied.embed.weight is not untied.lm_head.weight
    left = convert(Model(), skip="embed", embeddings=4).skipped  # a table left alone keeps its output layer
    assert left == {"embed": "asked for by skip=", "lm_head": "its weight is tied to embed"}


def test_one_layer_in_two_places_and_two_layers_of_one_weight() -> None:
    one, two = nn.Linear(32, 32), nn.Linear(32, 32)
    two.weight = one.weight
    model = nn.Sequential(one, nn.ReLU(), one, two)
    report = convert(model, group_size=16)
    assert [layer.name for layer in report.layers] == ["0, 2, 3"]
    assert model[0] is model[2] and model[0] is not model[3] and model[0].weight is model[3].weight


def test_nothing_is_half_converted() -> None:
    model = Model()
    with torch.no_grad():
        model.blocks[1].v_proj.weight[3, 4] = float("nan")
    before, values = kinds(model), copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"^blocks\.1\.v_proj: weight_nk: must be finite; got nan at \[3, 4\]"
    ):
        convert(model)
    assert kinds(model) == before
    assert all(
        torch.equal(v, values[k]) or k.endswith("v_proj.weight") for k, v in model.state_dict().items()
    )
    with pytest.raises(
        ValueError, match=r"^blocks\.0\.q_proj: weight: must hold values; got a tensor on meta"
    ):
        convert(Model().to("meta"))
    with pytest.raises(TypeError, match=r"^0: weight_nk: dtype"):
        convert(nn.Sequential(nn.Linear(4, 4).double()))
    with pytest.raises(ValueError, match="bits"):
        convert(Model(), bits=9)


def test_any_k_is_converted() -> None:
    model = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 200), nn.Linear(200, 1))
    report = convert(model, group_size=128)
    assert [layer.spec.group_size for layer in report.layers] == [128, 128, 128]
    assert [layer.spec.groups for layer in report.layers] == [1, 1, 2]
    assert model(torch.randn(3, 7)).shape == (3, 1)


def test_layers_that_would_break_are_left_with_the_reason() -> None:
    hooked, patched, normed = nn.Linear(8, 8), nn.Linear(8, 8), nn.utils.weight_norm(nn.Linear(8, 8))
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.Sequential(
        hooked, patched, normed, nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
        nn.MultiheadAttention(8, 2), nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(0, 8), nn.Linear(8, 8),
    )  # fmt: skip
    report = convert(model)
    assert [layer.name for layer in report.layers] == ["7"]
    for name, reason in {
        "0": "hooks", "1": "forward is replaced", "2": "no parameter of its own", "3": "a kind of its own",
        "4.out_proj": "a kind of its own", "5.linear1": "reads its weight", "6": "empty",
    }.items():  # fmt: skip
        assert reason in report.skipped[name], (name, report.skipped[name])
    assert model[5].eval()(torch.randn(3, 2, 8)).shape == (3, 2, 8)


def test_bad_models() -> None:
    with pytest.raises(TypeError, match=r"use QuantLinear\.from_linear"):
        convert(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"must be an nn\.Module; got int"):
        convert(3)  # type: ignore[arg-type]


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm", reason="progress=True needs tqdm")
    convert(Model(), progress=True)
    assert "8/8" in capsys.readouterr().err


def test_reached_from_the_package() -> None:
    assert qmm.nn.convert is convert
