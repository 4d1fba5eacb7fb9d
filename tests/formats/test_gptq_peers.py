"""Layers packed by auto-gptq and gptqmodel (tests/data/gptq) give the weights that those libraries read from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import qmm
from qmm.formats import gptq

FILES = sorted((Path(__file__).parent.parent / "data" / "gptq").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_layers_of_the_peers(path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    config = json.loads(path.read_text())["quantization_config"]
    tensors = safetensors.load_file(path.with_suffix(".safetensors"))
    layer = {name: tensors["layer." + name] for name in ("qweight", "qzeros", "scales", "g_idx")}
    w = gptq.from_checkpoint(layer, config)
    assert torch.equal(w.dequantize().t(), tensors["expected.weight"])
    assert w.spec.act_order == ("-act-" in path.stem)
    a = tensors["expected.a"]
    torch.testing.assert_close(
        qmm.matmul(a, w, backend="torch"), a @ tensors["expected.weight"].t(), rtol=1e-4, atol=1e-4
    )
