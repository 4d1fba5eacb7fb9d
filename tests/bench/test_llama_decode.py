"""bench.llama_decode: its models agree, a wrong one is caught, ratios are what they say, the file holds all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import llama_decode
from bench.llama_model import TINY, Model, build
from qmm.nn import QuantLinear
from qmm.timing.clock import Taken


def tiny(**options: bool) -> Model:
    return build(TINY, 16, "cpu", torch.float16, **options)


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "times.json"
    few = ["--tiny", "--rounds", "1", "--replays", "1", "--compiler", "aot_eager", "--out", str(out)]
    assert llama_decode.main([*few, "--variants", "int4;int4 merged"]) == 0
    saved = json.loads(out.read_text())
    names = ["fp16", "int4", "int4 merged"]
    decodes = [f"{kind}, batch {b}" for kind in ("decode", "decode compiled", "linears") for b in (1, 16)]
    assert sorted(saved["figures"]) == sorted([*decodes, "prefill", "memory of linears"])
    assert all(list(of) == names for of in saved["figures"].values())
    assert len(saved["errors"]) == 8 and max(saved["errors"].values()) < 0.01
    assert len(saved["goals"]) == len(llama_decode.GOALS)
    assert (
        saved["figures"]["memory of linears"]["int4"] * 32
        == saved["figures"]["memory of linears"]["fp16"] * 9
    )
    assert "decode compiled, batch 16" in capsys.readouterr().out


def test_a_wrong_model_is_caught() -> None:
    models = {"fp16": tiny(quantised=False), "int4": tiny(quantised=True)}
    report = llama_decode.Report({}, {})
    with torch.no_grad():
        llama_decode.check(models, 2, 16, report, "right")
        layer = models["int4"].blocks[1].down_proj
        assert isinstance(layer, QuantLinear)
        layer.weight.scales.mul_(1.5)
        with pytest.raises(SystemExit, match="wrong, int4: logits differ"):
            llama_decode.check(models, 2, 16, report, "wrong")


def test_decode_continues_a_prompt() -> None:
    """The cache, the positions and the grouped heads of decode give what causal attention over all tokens gives."""
    model = tiny(quantised=True)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        whole = model(tokens, torch.arange(5), model.new_caches(1, 16))
        caches = model.new_caches(1, 16)
        model(tokens[:, :3], torch.arange(3), caches)
        for i in (3, 4):
            last = model(tokens[:, i : i + 1], torch.tensor([i]), caches)
    torch.testing.assert_close(last, whole, rtol=0, atol=2e-2)
    assert float((last - whole).norm() / whole.norm()) < 5e-3


def test_ratios() -> None:
    report = llama_decode.Report({}, {})
    report.times("decode compiled, batch 1", {"fp16": Taken((4.0,)), "int4": Taken((1.0, 2.5, 2.0))}, 1)
    report.times("prefill", {"fp16": Taken((4.0,)), "int4 merged": Taken((5.0,))}, 1)
    assert report.ratio("decode compiled, batch 1", "int4") == 2.0
    assert report.ratio("prefill", "int4 merged") == 1.25
    assert report.goals() == [
        "met    decode compiled, batch 1, int4: >= 2.0x: 2.000x",
        "MISSED prefill, int4 merged: <= 1.03x: 1.250x",
    ]
