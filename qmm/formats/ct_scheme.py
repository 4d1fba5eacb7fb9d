"""What a quantisation config says about one layer: compressed-tensors, HF fp8 and ModelOpt, brought to one form.

=====================  ============================================  ===================================
``quant_method``       where it says so                              tensors of a layer
=====================  ============================================  ===================================
compressed-tensors     ``config_groups.*.weights``, ``format``       ``weight_packed`` or ``weight``,
                                                                     ``weight_scale``, ...
fp8                    ``weight_block_size``, ``scale_fmt``          ``weight``, ``weight_scale_inv`` (or
                                                                     ``weight_scale``): both multiply
modelopt               ``quant_algo``                                ``weight``, ``weight_scale``,
                                                                     ``weight_scale_2``
=====================  ============================================  ===================================

Source: compressed_tensors.quantization (QuantizationArgs, QuantizationScheme), transformers' FineGrainedFP8Config,
ModelOpt's export.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qmm.errors import WeightFormatError
from qmm.formats.expressions import expression
from qmm.weight.validate import is_minus_one, require, whole_number

INT_PACKED, INT, FP8, MXFP4, NVFP4 = "pack-quantized", "int-quantized", "float-quantized", "mxfp4", "nvfp4"
FORMATS = (INT_PACKED, INT, FP8, MXFP4, NVFP4)
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
_FIRST_DENSE = (0, 18)  # the version of compressed-tensors that packs without gaps

# name in a config -> format, and the type of its codes where the name tells
_CT_FORMATS = {
    "pack-quantized": (INT_PACKED, "int"),
    "int-quantized": (INT, "int"),
    "naive-quantized": (INT, None),  # fp8 where the type is float
    "float-quantized": (FP8, "float"),
    "mxfp8-quantized": (FP8, "float"),
    "mxfp4-pack-quantized": (MXFP4, "float"),
    "nvfp4-pack-quantized": (NVFP4, "float"),
}
_MODELOPT = {"FP8": FP8, "FP8_PER_CHANNEL_PER_TOKEN": FP8, "NVFP4": NVFP4, "MXFP4": MXFP4}


@dataclass(frozen=True)
class Scheme:
    """How a layer is stored.

    Attributes:
        format: one of ``FORMATS``.
        bits: bits of a code.
        symmetric: whether there are no zero points; None where the config does not say.
        strategy: one of ``STRATEGIES``: what shares a scale; None where the shape of the scales tells.
        group_size: rows of K that share a scale (strategies group and tensor_group).
        block: ``(N, K)`` of a block (strategy block).
        act_order: whether ``weight_g_idx`` has to be there.
        packing: ``"dense"`` or ``"legacy"`` where the caller says so.
        dense_version: whether the config's version packs densely; None where it names none.
        modelopt: tensors named and multiplied as ModelOpt does.
        e8m0_scales: whether scales of dtype uint8 are exponents.
    """

    format: str
    bits: int
    symmetric: bool | None = True
    strategy: str | None = None
    group_size: int | None = None
    block: tuple[int, int] | None = None
    act_order: bool = False
    packing: str | None = None
    dense_version: bool | None = None
    modelopt: bool = False
    e8m0_scales: bool = False


def scheme_of(config: Mapping[str, Any], name: str = "") -> Scheme:
    """The scheme of layer ``name``.

    Args:
        config: a ``quantization_config``, or flat options: ``format``, ``bits`` (or ``num_bits``), ``type``,
            ``symmetric``, ``strategy``, ``group_size``, ``block_structure``, ``actorder``, ``version``, ``packing``,
            ``modelopt``.
        name: the layer, for configs with several groups.

    Raises:
        WeightFormatError: contradictory or unsupported; names key, rule and value.
    """
    try:
        return _scheme(config, name)
    except WeightFormatError as error:
        raise WeightFormatError(f"{name}: {error}" if name else str(error)) from None


def _scheme(config: Mapping[str, Any], name: str) -> Scheme:
    method = config.get("quant_method")
    nested = config.get("quantization")  # ModelOpt's own hf_quant_config.json
    if method == "modelopt" or "quant_algo" in config or isinstance(nested, Mapping):
        return _modelopt(nested if isinstance(nested, Mapping) else config)
    if method == "fp8":
        return _hf_fp8(config)
    if method not in (None, "compressed-tensors"):
        raise WeightFormatError(
            f"quant_method: must be compressed-tensors, fp8 or modelopt here; got {method!r}"
        )
    if "config_groups" not in config:
        require(method is None, "config_groups", "must be there", sorted(map(str, config)))
        return _compressed_tensors(config, config.get("format"), config)
    group = _group_of(config["config_groups"], name)
    weights: Any = group.get("weights")
    require(isinstance(weights, Mapping), "weights", "must be an object: the layer is not quantised", weights)
    return _compressed_tensors(weights, group.get("format") or config.get("format"), config)


def _group_of(groups: Any, name: str) -> Mapping[str, Any]:
    """The group whose targets name the layer; a class such as ``Linear`` counts where nothing more exact does."""
    ok = isinstance(groups, Mapping) and groups and all(isinstance(g, Mapping) for g in groups.values())
    require(bool(ok), "config_groups", "must be an object of objects", type(groups).__name__)
    if len(groups) == 1:
        (only,) = groups.values()
        found: Mapping[str, Any] = only
        return found
    by_class: Mapping[str, Any] | None = None
    for group in groups.values():
        targets = group.get("targets") or ()
        require(isinstance(targets, list | tuple), "targets", "must be a list", type(targets).__name__)
        for target in map(str, targets):
            if _names(target, name):
                chosen: Mapping[str, Any] = group
                return chosen
            if "." not in target and not target.startswith("re:") and by_class is None:
                by_class = group
    require(by_class is not None, "config_groups", f"must have a target for layer {name!r}", sorted(groups))
    assert by_class is not None
    return by_class


def _names(target: str, name: str) -> bool:
    if not target.startswith("re:"):
        return target == name
    try:
        return expression(target[3:]).match(name)
    except WeightFormatError as error:
        raise WeightFormatError(f"targets: {error}") from None


def _compressed_tensors(weights: Mapping[str, Any], given: Any, config: Mapping[str, Any]) -> Scheme:
    known = {**_CT_FORMATS, MXFP4: (MXFP4, "float"), NVFP4: (NVFP4, "float")}
    if not isinstance(given, str) or given not in known:
        raise WeightFormatError(f"format: must be one of {', '.join(_CT_FORMATS)}; got {given!r}")
    format, kind = known[given]
    stated = weights.get("type")
    if stated is not None:
        require(stated in ("int", "float"), "type", "must be int or float", repr(stated))
        require(kind in (None, stated), "type", f"must be {kind} for format {given}", stated)
        format = FP8 if format == INT and stated == "float" else format
    width = 4 if format in (MXFP4, NVFP4) else 8
    bits = whole_number(weights.get("num_bits", weights.get("bits", width)), "num_bits", 1, 8)
    require(format in (INT_PACKED, INT) or bits == width, "num_bits", f"must be {width} for {given}", bits)
    strategy, group_size = _strategy(weights, format)
    actorder, packing = weights.get("actorder"), weights.get("packing")
    require(packing in (None, "dense", "legacy"), "packing", "must be 'dense' or 'legacy'", repr(packing))
    symmetric = weights.get("symmetric")
    require(symmetric in (None, True, False), "symmetric", "must be true or false", repr(symmetric))
    require(
        symmetric is not False or format in (INT_PACKED, INT),
        "symmetric",
        f"must be true for {given}",
        symmetric,
    )
    scheme = Scheme(
        format,
        bits,
        symmetric=symmetric,
        strategy=strategy,
        group_size=group_size,
        block=_block(weights.get("block_structure")) if strategy in ("block", None) else None,
        act_order=actorder in (True, "group", "dynamic"),  # "weight"/"static" changes no layout
        packing=packing,
        dense_version=_is_dense(config.get("version")),
        modelopt=bool(weights.get("modelopt", False)),
        e8m0_scales=given == "mxfp8-quantized" or weights.get("scale_dtype") == "torch.uint8",
    )
    if scheme.act_order:
        require(strategy in ("group", None), "actorder", "needs strategy group", strategy)
    require(strategy != "block" or scheme.block is not None, "block_structure", "must be there", None)
    return scheme


def _strategy(weights: Mapping[str, Any], format: str) -> tuple[str | None, int | None]:
    """Strategy and group size; compressed-tensors derives a strategy that is not said from the group size."""
    strategy, given = weights.get("strategy"), weights.get("group_size")
    require(
        strategy is None or strategy in STRATEGIES,
        "strategy",
        f"must be one of {', '.join(STRATEGIES)}",
        strategy,
    )
    fixed = {MXFP4: 32, NVFP4: 16}.get(format)
    if fixed is not None:
        right = strategy in (None, "group", "tensor_group")
        require(right, "strategy", f"must be group or tensor_group for {format}", strategy)
        require(given in (None, fixed), "group_size", f"must be {fixed} for {format}", given)
        return "group", fixed
    if given is None or is_minus_one(given):
        needs = strategy in ("group", "tensor_group")
        require(not needs, "group_size", f"must be a positive integer for strategy {strategy}", given)
        return strategy or (None if given is None else "channel"), None
    size = whole_number(given, "group_size", 1)
    require(
        strategy in (None, "group", "tensor_group"),
        "group_size",
        f"must be absent for strategy {strategy}",
        size,
    )
    return "group", size


def _block(given: Any) -> tuple[int, int] | None:
    """``[128, 128]``, or the older ``"128x128"``."""
    if given is None:
        return None
    parts = given.split("x") if isinstance(given, str) else given
    if isinstance(given, str) and all(p.strip().isdigit() for p in parts):
        parts = [int(p) for p in parts]
    two = isinstance(parts, list | tuple) and len(parts) == 2
    require(two, "block_structure", "must be two sizes [N, K]", repr(given))
    n, k = (whole_number(p, "block_structure", 1) for p in parts)
    return n, k


def _is_dense(version: Any) -> bool | None:
    found = re.match(r"(\d{1,6})\.(\d{1,6})", version) if isinstance(version, str) else None
    return None if found is None else (int(found[1]), int(found[2])) >= _FIRST_DENSE


def _hf_fp8(config: Mapping[str, Any]) -> Scheme:
    block = config.get("weight_block_size")
    two = block is None or (isinstance(block, list | tuple) and len(block) == 2)
    require(two, "weight_block_size", "must be two sizes [N, K], or null", repr(block))
    sizes = None if block is None else _block(block)
    ue8m0 = config.get("scale_fmt") == "ue8m0"
    return Scheme(FP8, 8, strategy=None if block is None else "block", block=sizes, e8m0_scales=ue8m0)


def _modelopt(config: Mapping[str, Any]) -> Scheme:
    algorithm = config.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT:
        raise WeightFormatError(f"quant_algo: must be one of {', '.join(_MODELOPT)}; got {algorithm!r}")
    format = _MODELOPT[algorithm]
    size = {MXFP4: 32, NVFP4: 16}.get(format)
    given = config.get("group_size")
    require(given in (None, size), "group_size", f"must be {size} for {algorithm}", given)
    strategy = None if size is None else "group"
    return Scheme(format, 8 if size is None else 4, strategy=strategy, group_size=size, modelopt=True)
