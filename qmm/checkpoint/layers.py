"""Tensor names -> layers: which tensors make up one quantised matrix, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qmm.checkpoint.methods import METHODS, SIGNS, FormatModule, left_alone
from qmm.checkpoint.safetensors_read import Entry
from qmm.formats.patterns import matches

_PLAIN = ("F16", "BF16", "F32", "F64")  # what an unquantised weight is stored in
_COMMON = ("scale", "zero", "shape", "scales")  # names that a norm's tensor may have, too
_ACTIVATIONS = ("input_", "output_")  # compressed-tensors' and ModelOpt's scales of what is multiplied
_STACK_DIMS = 4  # gpt-oss: blocks [E, N, K/32, 16]


@dataclass(frozen=True)
class Parts:
    """Where one layer is.

    Attributes:
        names: ``{suffix: tensor name}``.
        expert: place along the first axis of every tensor, in a stack of experts; None where there is no such axis.
    """

    names: dict[str, str]
    expert: int | None = None


@dataclass
class Grouped:
    """The tensors of a file, sorted.

    Attributes:
        layers: where each layer is; an expert of a stack is a layer of its own, ``name[0]``.
        plain: ``{tensor name: reason}`` of tensors that are not quantised, or are not about the weight.
        strays: ``{tensor name: reason}`` of parts of quantised layers without the rest, or of another format.
    """

    layers: dict[str, Parts] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    strays: dict[str, str] = field(default_factory=dict)


def group(
    entries: Mapping[str, Entry], module: FormatModule, config: Mapping[str, Any], method: str
) -> Grouped:
    """Sort the tensors of a checkpoint.

    A layer is quantised where it has the format's key and something else of the format beside it, or the key in a
    dtype that only codes have. So ``weight`` in float16 is not, and one in float8 without its scale is (and will be
    refused when it is read).
    """
    keys = (module.KEY,) if isinstance(module.KEY, str) else module.KEY
    # a bias is no part of a weight, wherever its format puts it: it must not vanish inside one
    found, grouped = _by_layer(entries, module.SUFFIXES - {"bias"}, METHODS[method].underscored), Grouped()
    ignored = left_alone(config, method)
    for layer, all_parts in found.items():
        parts = {suffix: name for suffix, name in all_parts.items() if not suffix.startswith(_ACTIVATIONS)}
        for suffix, name in all_parts.items():
            if suffix not in parts:
                grouped.plain[name] = f"about activations, not the weight: {entries[name]}"
        key = next((k for k in keys if k in parts), None)
        beside = set(parts) - {key}
        listed = next((f" (listed in {k})" for k, p in ignored if matches(p, layer)), "")
        if key is not None and (beside or (entries[parts[key]].dtype not in _PLAIN and not listed)):
            grouped.layers |= _experts(layer, parts, entries)
            continue
        for suffix, name in parts.items():
            if suffix in keys or (len(parts) == 1 and suffix in _COMMON):
                grouped.plain[name] = f"not quantised{listed}: {entries[name]}"
            else:
                grouped.strays[name] = f"stands without {' or '.join(keys)}: {entries[name]}"
    mine = {name for parts in found.values() for name in parts.values()}
    for name, entry in entries.items():
        if name in mine:
            continue
        if name.rpartition(".")[2] in SIGNS:
            grouped.strays[name] = (
                f"of a quantised layer, but not one of {method}, which the config names: {entry}"
            )
        else:
            grouped.plain[name] = f"not quantised: {entry}"
    return grouped


def _experts(layer: str, parts: dict[str, str], entries: Mapping[str, Entry]) -> dict[str, Parts]:
    """The layer, or one for each of its experts."""
    blocks = entries[parts["blocks"]] if "blocks" in parts else None
    if blocks is None or len(blocks.shape) != _STACK_DIMS:
        return {layer: Parts(parts)}
    first = {entries[name].shape[:1] for name in parts.values()}
    if first != {blocks.shape[:1]}:  # which of them is wrong cannot be said: read whole, the format says it
        return {layer: Parts(parts)}
    return {f"{layer}[{i}]": Parts(parts, i) for i in range(blocks.shape[0])}


def _by_layer(
    entries: Mapping[str, Entry], suffixes: frozenset[str], underscored: frozenset[str]
) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name in entries:
        cut = _cut(name, suffixes, underscored)
        if cut is not None:
            found.setdefault(cut[0], {})[cut[1]] = name
    return found


def _cut(name: str, suffixes: frozenset[str], underscored: frozenset[str]) -> tuple[str, str] | None:
    """``(layer, suffix)`` by the longest suffix that fits, or None. A suffix alone belongs to the layer ``""``."""
    if name in suffixes:
        return "", name
    at = name.find(".")
    while at >= 0:
        if name[at + 1 :] in suffixes:
            return name[:at], name[at + 1 :]
        at = name.find(".", at + 1)
    layer, _, suffix = name.rpartition("_")
    return (layer, suffix) if suffix in underscored else None
