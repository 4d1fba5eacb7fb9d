"""What ``qmm.save`` can write: for each format the tensors of a layer and the config that describes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qmm.checkpoint.checkpoint import Checkpoint
from qmm.errors import WeightFormatError
from qmm.formats import native
from qmm.weight import QuantizedWeight, WeightSpec, ZeroKind

GPTQ_BITS = range(2, 9)


@dataclass(frozen=True)
class Target:
    """A format to write.

    Attributes:
        config: the quantisation config of the file.
        suffixes: of the tensors that a layer may have.
        tensors: ``(layer, weight) -> {suffix: tensor}``.
    """

    config: dict[str, Any]
    suffixes: tuple[str, ...]
    tensors: Callable[[str, QuantizedWeight], dict[str, Tensor]]


def _qmm(weights: Mapping[str, QuantizedWeight], config: dict[str, Any], lossy: bool) -> Target:
    mine = {"quant_method": "qmm", "version": native.VERSION}
    return Target(_merged(mine, config), tuple(sorted(native.SUFFIXES)), lambda _, w: native.to_tensors(w))


def _gptq_v2(weights: Mapping[str, QuantizedWeight], config: dict[str, Any], lossy: bool) -> Target:
    from qmm.formats import gptq

    specs = {layer: _spec(weights, layer) for layer in weights}
    for layer, spec in specs.items():
        _check_gptq(layer, spec)
    bits = _commonest([[s.bits] for s in specs.values()], 4)
    group_size = _commonest([_group_sizes(s) for s in specs.values() if s.bits == bits], -1)
    mine: dict[str, Any] = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": bits,
        "group_size": group_size,
        "desc_act": any(s.act_order for s in specs.values()),
        "sym": all(s.zero_kind is ZeroKind.NONE for s in specs.values()),
        "lm_head": "lm_head" in specs,
    }
    # GPTQModel's way to say that a layer differs
    different = {
        f"+:^{layer.replace('.', chr(92) + '.')}$": {"bits": s.bits, "group_size": _group_sizes(s)[0]}
        for layer, s in specs.items()
        if s.bits != bits or group_size not in _group_sizes(s)
    }
    if different:
        mine["dynamic"] = different

    def tensors(layer: str, w: QuantizedWeight) -> dict[str, Tensor]:
        try:
            return gptq.to_tensors(w, version="v2", lossy=lossy)
        except WeightFormatError as error:
            raise WeightFormatError(f"layer {layer!r}: {error}") from error

    return Target(_merged(mine, config), tuple(sorted(gptq.SUFFIXES)), tensors)


TARGETS: dict[str, Callable[[Mapping[str, QuantizedWeight], dict[str, Any], bool], Target]] = {
    "qmm": _qmm,
    "gptq_v2": _gptq_v2,
}


def _spec(weights: Mapping[str, QuantizedWeight], layer: str) -> WeightSpec:
    return weights.facts(layer).spec if isinstance(weights, Checkpoint) else weights[layer].spec


def _check_gptq(layer: str, s: WeightSpec) -> None:
    """Before anything is read or written, what the facts alone show; the format's module checks the rest."""
    for ok, field, rule, got in (
        (s.bits in GPTQ_BITS, "bits", f"from {GPTQ_BITS[0]} to {GPTQ_BITS[-1]}", s.bits),
        (s.codebook_dtype is None, "codebook", "absent", "a codebook"),
        (
            s.zero_kind is not ZeroKind.BIAS,
            "zeros",
            "zero points",
            "a bias, as of GGUF's types with a minimum",
        ),
        (s.scale2_ratio is None, "scale2", "absent", "two-level scales"),
    ):
        if not ok:
            raise WeightFormatError(
                f"layer {layer!r}: {field}: must be {rule} to be written as gptq_v2; got {got}"
            )


def _group_sizes(s: WeightSpec) -> list[int]:
    """What a config may call this layer's group size."""
    return [s.group_size, -1] if s.group_size >= s.in_features else [s.group_size]


def _commonest(values: list[list[int]], default: int) -> int:
    counted = Counter(v for each in values for v in each).most_common(1)
    return counted[0][0] if counted else default


def _merged(mine: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    for key, value in mine.items():
        if given.get(key, value) != value:
            raise ValueError(f"config: {key} must be {value!r} for these weights; got {given[key]!r}")
    return given | mine
