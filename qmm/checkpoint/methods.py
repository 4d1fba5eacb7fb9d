"""Which module reads which ``quant_method``, and what its config calls the layers it left alone."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.weight import QuantizedWeight


class FormatModule(Protocol):
    """What a module of ``qmm.formats`` offers the loader.

    Attributes:
        KEY: the suffix (or suffixes) of a tensor's name that marks a quantised layer.
        SUFFIXES: every suffix that belongs to a layer.
    """

    KEY: str | tuple[str, ...]
    SUFFIXES: frozenset[str]

    def from_checkpoint(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, name: str
    ) -> QuantizedWeight:
        """One layer from its tensors by suffix."""


@dataclass(frozen=True)
class Method:
    """One line of the table.

    Attributes:
        module: under ``qmm.formats``.
        ignore: config keys that list layers left in floating point.
        described_by: suffixes of tensors whose values say what a layer is (the others only say how much).
        underscored: suffixes that an underscore parts from the layer's name, where others have a dot.
    """

    module: str
    ignore: tuple[str, ...] = ("modules_to_not_convert",)
    described_by: frozenset[str] = frozenset()
    underscored: frozenset[str] = frozenset()


_HQQ_FACTS = (
    *(
        "shape",
        "nbits",
        "axis",
        "group_size",
        "packing",
        "compute_dtype",
        "unpack_view_dtype",
        "view_as_float",
    ),
    *("quant_scale", "quant_zero", "channel_wise", "optimize", "round_zero", "offload_meta"),
    *("encoded_state_dict", "stores_quant_config"),
)
_BNB_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")

METHODS = {
    "qmm": Method("native", described_by=frozenset({"facts"})),
    "gptq": Method("gptq"),
    "awq": Method("awq"),
    "hqq": Method("hqq", ("skip_modules",), frozenset(_HQQ_FACTS)),
    "compressed-tensors": Method("compressed_tensors", ("ignore",), frozenset({"weight_shape"})),
    "bitsandbytes": Method("bitsandbytes", ("llm_int8_skip_modules",), frozenset(_BNB_STATES)),
    "fp8": Method("compressed_tensors"),
    "modelopt": Method("compressed_tensors", ("ignore", "exclude_modules")),
    "mxfp4": Method("mx", underscored=frozenset({"blocks", "scales"})),
    "seed": Method("seed"),
}

# last parts of tensor names that only quantised layers have, of whatever format
SIGNS = frozenset({"qweight", "weight_packed", "W_q", "weight_scale", "weight_scale_inv", "absmax", "SCB"})


def method_of(config: Mapping[str, Any], where: str) -> str:
    """The ``quant_method`` of a quantisation config.

    Raises:
        WeightFormatError: it names none, or one that is not in the table.
    """
    name = config.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        raise WeightFormatError(
            f"{where}: quant_method must be one of {', '.join(METHODS)}; got {str(name)[:100]!r}"
        )
    return name


def format_module(method: str) -> FormatModule:
    """The module that reads ``method``, loaded now."""
    return cast(FormatModule, importlib.import_module(f"qmm.formats.{METHODS[method].module}"))


def differs_by_layer(config: Mapping[str, Any]) -> bool:
    """Whether a config gives layers settings by their names (GPTQModel, compressed-tensors, HQQ)."""
    groups, tags = config.get("config_groups"), config.get("quant_config")
    return (
        bool(config.get("dynamic"))
        or (isinstance(groups, Mapping) and len(groups) > 1)
        or (isinstance(tags, Mapping) and "weight_quant_params" not in tags)
    )


def left_alone(config: Mapping[str, Any], method: str) -> list[tuple[str, str]]:
    """``(key, pattern)`` of every entry of the config's lists of layers that were not quantised."""
    found = []
    for key in METHODS[method].ignore:
        patterns = config.get(key)
        if isinstance(patterns, (list, tuple)):
            found += [(key, p) for p in patterns if isinstance(p, str) and p]
    return found
