"""Every format's file, damaged in the same ways: one error that names the file, the layer or tensor, and the rule.

The sound files are the peers' own (tests/data/vectors), so that nothing is refused for another reason.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qmm

DATA = Path(__file__).parent.parent / "data" / "vectors"
Tensors = dict[str, tuple[str, list[int], bytes]]  # dtype, shape, data


class Kind:
    """A vector, its codes and scales by name, and what contradicts it in a config that says anything of a layer."""

    def __init__(self, vector: str, codes: str, scales: str, config: dict[str, Any] | None = None) -> None:
        self.vector, self.codes, self.scales, self.config = vector, codes, scales, config


NINE_BITS = {"config_groups": {"all": {"targets": ["Linear"], "weights": {"num_bits": 9, "type": "int"}}}}
HQQ_8 = {"quant_config": {"weight_quant_params": {"nbits": 8}}}
FP4 = {form: {"format": f"{form}-pack-quantized"} for form in ("mxfp4", "nvfp4")}
STACK = "experts.gate_up_proj"
CT = ("weight_packed", "weight_scale")
GPTQ = ("qweight", "scales")
KINDS = {
    "gptq": Kind("gptq-autogptq-b4-g32-asym-act-K128-N64", *GPTQ, {"bits": 8}),
    "gptq v2": Kind("gptq_v2-gptqmodel-b8-g128-asym-act-K256-N96", *GPTQ, {"bits": 4}),
    "gptq planar": Kind("gptq_p-gptqmodel-b5-g32-sym-K128-N64", *GPTQ, {"bits": 6}),
    "awq": Kind("awq-autoawq-b4-g32-asym-K128-N64", *GPTQ, {"version": "gemm_fast"}),
    "hqq": Kind("hqq-b4-g64-axis1-float16-K208-N64", "W_q", "scale", HQQ_8),
    "pack-quantized": Kind("ctpack-ct0.20.1-b4-g32-asym-float16-K128-N64", *CT, NINE_BITS),
    "int-quantized": Kind(
        "ctint-ct0.20.1-b8-chan-sym-bfloat16-K128-N64", "weight", "weight_scale", {"format": "marlin-24"}
    ),
    "float-quantized": Kind(
        "ctfp8-ct0.20.1-channel-bfloat16-K96-N40", "weight", "weight_scale", {"format": "pack-quantized"}
    ),
    "mxfp4-pack-quantized": Kind("ctmxfp4-ct0.20.1-g32-bfloat16-K256-N96", *CT, FP4["nvfp4"]),
    "nvfp4-pack-quantized": Kind("ctnvfp4-ct0.20.1-g16-bfloat16-K256-N96", *CT, FP4["mxfp4"]),
    "fp8": Kind(
        "fp8-hf5.24.0-block128x128-K256-N128", "weight", "weight_scale_inv", {"weight_block_size": [64, 64]}
    ),
    "modelopt": Kind(
        "nvfp4-modelopt-g16-float16-K208-N40", "weight", "weight_scale", {"quant_algo": "MXFP4"}
    ),
    "nf4": Kind("bnb-nf4-bs64-float16-K256-N96", "weight", "weight.absmax", {"quant_method": "hqq"}),
    "nf4 nested": Kind(
        "bnb-nf4-bs64-nested-bfloat16-K256-N96", "weight", "weight.nested_absmax", {"quant_method": "awq"}
    ),
    "int8": Kind("bnb-int8-K128-N64", "weight", "SCB", {"quant_method": "gptq"}),
    "mxfp4": Kind("mxfp4-gptoss-gate_up_proj-E2-K128-N64", f"{STACK}_blocks", f"{STACK}_scales"),
}
OTHER = {"I32": "F32", "U8": "BOOL", "I8": "BOOL", "F8_E4M3": "U8", "F16": "I16", "BF16": "I16", "F32": "I32"}


def read(path: Path) -> Tensors:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name.startswith("layer.")
    }


def image(tensors: Tensors) -> bytes:
    header, data = {}, b""
    for name, (dtype, shape, part) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def wrong_dtype(t: Tensors, name: str) -> None:
    dtype, shape, data = t[name]
    t[name] = OTHER[dtype], shape, data


def wrong_shape(t: Tensors, name: str) -> None:
    dtype, shape, data = t[name]
    rest = len(data) // shape[0]
    t[name] = dtype, [shape[0] + 1, *shape[1:]], data + data[:rest]


def flat(t: Tensors, name: str) -> None:
    dtype, shape, data = t[name]
    t[name] = dtype, [1, 1, *shape, 1], data


def empty(t: Tensors, name: str) -> None:
    t[name] = t[name][0], [0, *t[name][1][1:]], b""


DAMAGE: dict[str, tuple[str, Callable[[Tensors, str], Any]]] = {
    "codes of another dtype": ("codes", wrong_dtype),
    "scales of another dtype": ("scales", wrong_dtype),
    "scales with a row more": ("scales", wrong_shape),
    "scales with more dimensions": ("scales", flat),
    "no scales": ("scales", Tensors.pop),
    "empty codes": ("codes", empty),
    "empty scales": ("scales", empty),
}


def folder(path: Path, tensors: Tensors, config: Any) -> Path:
    (path / "model.safetensors").write_bytes(image(tensors))
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def config_of(kind: Kind) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{kind.vector}.json").read_text())["quantization_config"]
    return found


def fault(path: Path) -> str:
    """What opening says, or reading every layer, or the reason given for the tensors that make up none."""
    with pytest.raises(qmm.WeightFormatError) as caught:  # noqa: PT012
        checkpoint = qmm.load(path)
        for name in checkpoint:
            checkpoint[name]
        alone = [
            f"{tensor}: {why}" for tensor, why in checkpoint.unused.items() if tensor not in checkpoint.plain
        ]
        if alone:
            raise qmm.WeightFormatError(f"{path / 'model.safetensors'}: {'; '.join(alone)}")
    return str(caught.value)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::qmm.FormatWarning")
def test_damaged_layer(tmp_path: Path, kind: str, damage: str) -> None:
    about = KINDS[kind]
    tensors = read(DATA / f"{about.vector}.safetensors")
    which, harm = DAMAGE[damage]
    suffix = getattr(about, which)
    harm(tensors, f"layer.{suffix}")
    text = fault(folder(tmp_path, tensors, config_of(about)))
    assert "model.safetensors" in text and "layer" in text, text
    assert suffix.removeprefix("experts.gate_up_proj_").removesuffix("_inv").split(".")[-1] in text, text


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.config])
@pytest.mark.filterwarnings("ignore::qmm.FormatWarning")
def test_contradictory_config(tmp_path: Path, kind: str) -> None:
    about = KINDS[kind]
    tensors = read(DATA / f"{about.vector}.safetensors")
    assert about.config is not None
    text = fault(folder(tmp_path, tensors, config_of(about) | about.config))
    assert "model.safetensors" in text or "config.json" in text, text


@pytest.mark.parametrize("kind", KINDS)
def test_truncated(tmp_path: Path, kind: str) -> None:
    about = KINDS[kind]
    path = (
        folder(tmp_path, read(DATA / f"{about.vector}.safetensors"), config_of(about)) / "model.safetensors"
    )
    path.write_bytes(path.read_bytes()[:-1])
    text = fault(tmp_path)
    assert "model.safetensors" in text and "truncated" in text and "'layer." in text, text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::qmm.FormatWarning")
def test_the_sound_one(tmp_path: Path, kind: str) -> None:
    about = KINDS[kind]
    tensors = read(DATA / f"{about.vector}.safetensors")
    for w in qmm.load(folder(tmp_path, tensors, config_of(about))).values():
        assert w.dequantize().isfinite().all()
