"""What a compressed-tensors config says of a layer, and layers that break a rule: one error, tensor, rule and value."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import qmm
from qmm import WeightFormatError
from qmm.formats import compressed_tensors as ct
from qmm.formats import ct_scheme

# twenty codes of 7 at 3 bits: 60 bits of a stream, or ten codes a word
DENSE = torch.tensor([[-1, (1 << 28) - 1]], dtype=torch.int32)
LEGACY = torch.tensor([[(1 << 30) - 1, (1 << 30) - 1]], dtype=torch.int32)

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def two_groups(*targets: list[str]) -> dict[str, Any]:
    """A config with a group of 4 bits and one of 8."""
    groups = {f"group_{i}": {"targets": t, "weights": w, "format": f} for i, (t, w, f) in enumerate(
        zip(targets, (INT4, INT8), ("pack-quantized", "int-quantized"), strict=True)
    )}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}


@pytest.mark.parametrize(
    ("targets", "name", "bits"),
    [
        ((["Linear"], ["re:.*down_proj"]), "layers.0.down_proj", 8),
        ((["Linear"], ["re:.*down_proj"]), "layers.0.up_proj", 4),
        ((["Linear"], ["re:.*(q|k)_proj$"]), "layers.0.k_proj", 8),
        ((["Linear"], ["re:.*(q|k)_proj$"]), "layers.0.k_proj.base", 4),
        ((["layers.1"], ["layers.10"]), "layers.10", 8),
        ((["Linear"], [r"re:.*\.experts\.\d+\.(gate|up)_proj$"]), "m.experts.12.up_proj", 8),
        ((["Linear"], [r"re:.*\.experts\.\d+\.(gate|up)_proj$"]), "m.experts.shared.up_proj", 4),
        ((["Linear"], ["re:model[.]layers[.][0-3][.].*"]), "model.layers.2.up_proj", 8),
        ((["re:^layers\\.1\\..*"], ["re:layers.*"]), "layers.10.up", 8),
    ],
)
def test_groups_of_a_config(targets: tuple[list[str], list[str]], name: str, bits: int) -> None:
    assert ct_scheme.scheme_of(two_groups(*targets), name).bits == bits


def test_packing_by_width_then_by_version() -> None:
    """K=20 at 3 bits is two words either way: the version tells, else a bit that only dense words have, else no one."""
    layer = {"weight_scale": torch.ones(1, 1), "weight_shape": torch.tensor([1, 20])}
    config = {"format": "pack-quantized", "bits": 3, "group_size": -1}
    for dense, version in ((True, "0.18.0"), (False, "0.17.9"), (True, None)):
        layer["weight_packed"] = DENSE if dense else LEGACY
        w = ct.from_tensors(layer, **config, version=version)
        assert bool((w.unpack() == 7).all()), (dense, version)
    layer["weight_packed"] = LEGACY
    with pytest.raises(
        WeightFormatError, match=r"weight_packed: 2 words of K=20, bits=3 may be dense or padded"
    ):
        ct.from_tensors(layer, **config)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_zero_points_left_unpacked(dtype: torch.dtype) -> None:
    """With sign, in the shape of the scales; and those of a symmetric layer are dropped where they are 0."""
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    w = qmm.quantize(values, bits=4, group_size=32, symmetric=False)
    tensors = ct.to_tensors(w)
    zeros = w.unpack_zeros()
    assert zeros is not None
    tensors["weight_zero_point"] = (zeros.t().contiguous().to(torch.int8) - 8).to(dtype)
    got = ct.from_tensors(tensors, format="pack-quantized", bits=4, group_size=32, symmetric=False)
    assert torch.equal(got.dequantize(), w.dequantize())
    tensors["weight_zero_point"].zero_()
    got = ct.from_tensors(tensors, format="pack-quantized", bits=4, group_size=32, symmetric=True)
    assert got.zeros is None


# -- damaged or contradictory ----------------------------------------------------------------------------------------

NAME = "model.layers.3.up"
E4M3 = torch.float8_e4m3fn
# N = 6, K = 64: good layers, which each case changes in one place
GOOD: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "pack": (
        {"format": "pack-quantized", "bits": 4, "group_size": 32, "symmetric": False, "version": "0.20.1"},
        {
            "weight_packed": torch.zeros(6, 8, dtype=torch.int32),
            "weight_scale": torch.ones(6, 2),
            "weight_zero_point": torch.zeros(1, 2, dtype=torch.int32),
            "weight_shape": torch.tensor([6, 64]),
            "weight_g_idx": torch.arange(64, dtype=torch.int32).flip(0) // 32,
        },
    ),
    "pack5": (
        {"format": "pack-quantized", "bits": 5, "group_size": -1},
        {
            "weight_packed": torch.zeros(6, 11, dtype=torch.int32),  # six codes a word
            "weight_scale": torch.ones(6, 1),
            "weight_shape": torch.tensor([6, 64]),
        },
    ),
    "pack4": (
        {"format": "pack-quantized", "bits": 4, "group_size": 32},
        {
            "weight_packed": torch.zeros(6, 8, dtype=torch.int32),
            "weight_scale": torch.ones(6, 2),
            "weight_shape": torch.tensor([6, 64]),
        },
    ),
    "int": (
        {"format": "int-quantized", "bits": 4, "strategy": "channel"},
        {"weight": torch.zeros(6, 64, dtype=torch.int8), "weight_scale": torch.ones(6, 1)},
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [4, 32]},
        {"weight": torch.ones(6, 64).to(E4M3), "weight_scale_inv": torch.ones(2, 2)},
    ),
    "mxfp4": (
        {"format": "mxfp4-pack-quantized"},
        {
            "weight_packed": torch.zeros(6, 32, dtype=torch.uint8),
            "weight_scale": torch.zeros(6, 2, dtype=torch.uint8),
        },
    ),
    "nvfp4": (
        {"format": "nvfp4-pack-quantized"},
        {
            "weight_packed": torch.zeros(6, 32, dtype=torch.uint8),
            "weight_scale": torch.ones(6, 4).to(E4M3),
            "weight_global_scale": torch.tensor([3.0]),
        },
    ),
}


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# kind, key (of the layer's tensors, else of the config), its value (None: taken away), the message
DAMAGED: list[tuple[str, str, Any, str]] = [
    ("pack", "weight_packed", None, "weight_packed: must be there; got weight_g_idx"),
    ("pack", "weight_packed", torch.zeros(6, 8), "weight_packed: dtype must be one of int32; got float32"),
    ("pack", "weight_packed", torch.zeros(48, dtype=torch.int32), "weight_packed: must have 2 dimensions"),
    ("pack", "weight_packed", torch.zeros(5, 8, dtype=torch.int32), "weight_packed: must have N = 6 rows"),
    ("pack", "weight_packed", torch.zeros(6, 7, dtype=torch.int32), "weight_packed: must have 8 words a row"),
    ("pack", "weight_packed", [1], "weight_packed: must be a torch.Tensor; got list"),
    ("pack", "weight_scale", None, "weight_scale: must be there"),
    ("pack", "weight_scale", torch.ones(6, 3), "weight_scale: shape must be [N, ceil(K/32)] = [6, 2]; got [6, 3]"),
    ("pack", "weight_scale", torch.ones(6, 2).double(), "weight_scale: dtype must be one of float16"),
    ("pack", "weight_scale", torch.ones(0, 2), "weight_scale: must not be empty"),
    ("pack", "weight_shape", None, "weight_shape: must be there"),
    ("pack", "weight_shape", torch.tensor([6]), "weight_shape: shape must be [2] = [2]; got [1]"),
    ("pack", "weight_shape", torch.tensor([6, -64]), "weight_shape: must be two sizes N, K; got [6, -64]"),
    ("pack", "weight_shape", torch.tensor([6, 2**40]), "weight_shape: must be two sizes N, K"),
    ("pack", "weight_shape", torch.tensor([6, 65]), "weight_packed: must have 9 words a row"),
    ("pack", "weight_zero_point", None, "weight_zero_point: must be there where symmetric is false"),
    ("pack", "weight_zero_point", torch.zeros(2, 1, dtype=torch.int32), "weight_zero_point: shape must be [1 words"),
    ("pack", "weight_zero_point", i32(0, 1 << 24)[None], "weight_zero_point: bits past zero point 5 must be 0"),
    ("pack", "weight_zero_point", torch.zeros(1, 2), "weight_zero_point: must have the shape of weight_scale"),
    ("pack", "weight_zero_point", torch.full((6, 2), 0.5), "weight_zero_point: must be whole numbers"),
    ("pack", "weight_zero_point", torch.full((6, 2), torch.inf), "weight_zero_point: must be whole numbers"),
    ("pack", "weight_zero_point", torch.full((6, 2), 8.0), "weight_zero_point: must be in [-8, 7]; got [8, 8]"),
    ("pack", "symmetric", True, "weight_zero_point: must be 0 throughout where symmetric is true"),
    ("pack", "weight_g_idx", i32(*range(64)), "weight_g_idx: must be in [0, G) with G=2; got [0, 63]"),
    ("pack", "weight_g_idx", i32(*[0] * 63, -7), "weight_g_idx: must be in [0, G) with G=2; got [-7, 0]"),
    ("pack", "weight_g_idx", i32(0), "weight_g_idx: shape must be [K] = [64]; got [1]"),
    ("pack", "weight_g_idx", torch.zeros(64), "weight_g_idx: dtype must be one of int32, int64; got float32"),
    ("pack", "bits", 8, "weight_packed: must have 16 words a row"),
    ("pack", "bits", 9, "num_bits: must be from 1 to 8; got 9"),
    ("pack", "bits", "4", "num_bits: must be an integer; got '4'"),
    ("pack", "type", "float", "type: must be int for format pack-quantized; got float"),
    ("pack", "group_size", 0, "group_size: must be from 1"),
    ("pack", "strategy", "channel", "group_size: must be absent for strategy channel; got 32"),
    ("pack", "strategy", "rows", "strategy: must be one of tensor, channel"),
    ("pack", "format", "marlin-24", "format: must be one of pack-quantized"),
    ("pack", "format", None, "format: must be one of pack-quantized"),
    ("pack", "quant_method", "gptq", "quant_method: must be compressed-tensors, fp8 or modelopt here; got 'gptq'"),
    ("pack", "quant_method", "compressed-tensors", "config_groups: must be there"),
    ("pack", "packing", "tight", "packing: must be 'dense' or 'legacy'; got 'tight'"),
    ("pack5", "packing", "dense", "weight_packed: must have 10 words a row to be dense; got 11"),
    ("pack5", "weight_packed", torch.full((6, 11), 1 << 30, dtype=torch.int32), "weight_packed: bits that hold no"),
    ("pack5", "actorder", "group", "actorder: needs strategy group; got channel"),
    ("pack4", "actorder", "group", "weight_g_idx: must be there for actorder group"),
    ("int", "weight", torch.full((6, 64), 8, dtype=torch.int8), "weight: must be in [-8, 7]; got [8, 8]"),
    ("int", "weight", torch.zeros(6, 64), "weight: dtype must be one of int8; got float32"),
    ("int", "weight_scale", torch.ones(5, 1), "weight_scale: shape must be [N, 1] = [6, 1]"),
    ("int", "weight_zero_point", torch.zeros(6, 1, dtype=torch.int32), "weight_zero_point: dtype must be int8"),
    ("fp8", "weight", torch.zeros(6, 64).to(torch.float8_e5m2), "weight: dtype must be one of float8_e4m3fn"),
    ("fp8", "weight_scale_inv", None, "weight_scale: must be there"),
    ("fp8", "weight_scale_inv", torch.ones(1, 2), "weight_scale_inv: shape must be [ceil(N/4), ceil(K/32)] = [2, 2]"),
    ("fp8", "weight_scale", torch.ones(2, 2), "weight_scale: must not stand beside weight_scale_inv"),
    ("fp8", "weight_block_size", [128], "weight_block_size: must be two sizes [N, K], or null; got [128]"),
    ("fp8", "weight_block_size", None, "weight_scale_inv: shape must be [N, 1]"),
    ("fp8", "weight_block_size", [0, 32], "block_structure: must be from 1"),
    ("mxfp4", "weight_packed", torch.zeros(6, 24, dtype=torch.uint8), "weight_packed: must hold whole groups of 32"),
    ("mxfp4", "weight_scale", torch.ones(6, 2), "weight_scale: dtype must be one of uint8"),
    ("mxfp4", "group_size", 16, "group_size: must be 32 for mxfp4; got 16"),
    ("mxfp4", "bits", 8, "num_bits: must be 4 for mxfp4-pack-quantized; got 8"),
    ("mxfp4", "symmetric", False, "symmetric: must be true for mxfp4-pack-quantized"),
    ("nvfp4", "weight_global_scale", None, "weight_global_scale: must be there"),
    ("nvfp4", "weight_global_scale", torch.tensor([0.0]), "weight_global_scale: must be a finite number other"),
    ("nvfp4", "weight_global_scale", torch.tensor([torch.nan]), "weight_global_scale: must be a finite number other"),
    ("nvfp4", "weight_global_scale", torch.ones(2), "weight_global_scale: must be one number; got shape [2]"),
    ("nvfp4", "weight_scale", torch.ones(6, 2).to(E4M3), "weight_scale: shape must be [N, K/16] = [6, 4]"),
    ("nvfp4", "modelopt", True, "weight: must be there"),
    ("nvfp4", "quant_algo", "W4A8_AWQ", "quant_algo: must be one of FP8"),
]  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_undamaged(kind: str) -> None:
    config, tensors = GOOD[kind]
    assert ct.from_checkpoint(tensors, config).shape == (64, 6)


@pytest.mark.parametrize(
    ("kind", "key", "value", "text"), DAMAGED, ids=[f"{k}-{n}-{t}" for k, n, _, t in DAMAGED]
)
def test_damaged(kind: str, key: str, value: Any, text: str) -> None:
    config, tensors = GOOD[kind]
    changed = {key: value}
    if key in ct.SUFFIXES:
        tensors = {k: t for k, t in (tensors | changed).items() if t is not None}
    else:
        config = config | changed
    with pytest.raises(WeightFormatError, match=re.escape(NAME) + "[.:] ?" + re.escape(text)):
        ct.from_checkpoint(tensors, config, name=NAME)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([], "config_groups: must be an object of objects; got list"),
        ({"group_0": {"targets": ["Linear"], "weights": None}}, "weights: must be an object"),
        (two_groups(["layers.1"], ["layers.2"])["config_groups"], "config_groups: must have a target for layer"),
        (two_groups(["re:(?=a)b"], ["re:.*"])["config_groups"], "expression: must not have a group of the kind"),
        (two_groups(["re:" + "(a|b)" * 400], ["re:.*"])["config_groups"], "expression: must have at most 1000"),
        (two_groups(["Linear"], "re:.*")["config_groups"], "targets: must be a list; got str"),
    ],
)  # fmt: skip
def test_bad_groups(groups: Any, text: str) -> None:
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    with pytest.raises(WeightFormatError, match=re.escape(text)):
        ct.from_checkpoint(GOOD["pack"][1], config, name=NAME)
