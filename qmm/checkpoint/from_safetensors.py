"""One or several safetensors files, and the config that says what they hold, as a :class:`Checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qmm.checkpoint.checkpoint import Checkpoint, LayerFacts
from qmm.checkpoint.folder import Found
from qmm.checkpoint.layers import Grouped, Parts, group
from qmm.checkpoint.methods import METHODS, format_module, method_of
from qmm.checkpoint.safetensors_read import Entry
from qmm.errors import WeightFormatError
from qmm.weight import QuantizedWeight, WeightSpec

# which group a row belongs to: K small numbers, read even where values are not, since they can break a kernel
_GROUP_INDEX = ("g_idx", "weight_g_idx")


class SafetensorsCheckpoint(Checkpoint):
    """See :class:`Checkpoint`.

    Args:
        path: what the user named.
        found: the files.
        config: the quantisation config; empty where the model is not quantised.
        where: the file that it stands in.
    """

    def __init__(self, path: Path, found: Found, config: dict[str, Any], where: str) -> None:
        self.path, self.config, self._files = path, config, found.files
        self._entries = {name: file.entries[name] for name, file in found.files.items()}
        if config:
            self.method = method_of(config, where)
            self._module = format_module(self.method)
            grouped = group(self._entries, self._module, config, self.method)
        else:
            self.method = "unquantised"
            grouped = Grouped(plain={n: f"not quantised: {e}" for n, e in self._entries.items()})
        self._parts = grouped.layers
        reasons = grouped.plain | grouped.strays
        self.unused = {name: reasons[name] for name in self._entries if name in reasons} | found.unindexed
        self.plain = tuple(name for name in self._entries if name in grouped.plain)

    def _layers(self) -> Mapping[str, Parts]:
        return self._parts

    def nbytes(self, name: str) -> int:
        return sum(self._entry(name, suffix).nbytes for suffix in self._parts[name].names)

    def tensor(self, name: str) -> Tensor:
        if name not in self.plain:
            raise KeyError(f"{self.path}: no tensor {name!r} that is not quantised")
        return self._files[name].tensor(name)

    def __getitem__(self, name: str) -> QuantizedWeight:
        if name not in self._parts:
            raise self._missing(name)
        return self._read(name, {suffix: self._tensor(name, suffix) for suffix in self._parts[name].names})

    def facts(self, name: str) -> LayerFacts:
        if name not in self._parts:
            raise self._missing(name)
        try:
            spec = self._spec_of_header(name)
        except (ValueError, TypeError, RuntimeError):
            # this format needs values to say what the layer is, or the layer is damaged: the layer itself tells
            spec = self[name].spec
        return LayerFacts(self.method, spec, self.nbytes(name))

    def _entry(self, layer: str, suffix: str) -> Entry:
        parts = self._parts[layer]
        entry = self._entries[parts.names[suffix]]
        return entry if parts.expert is None else entry.at(parts.expert)

    def _tensor(self, layer: str, suffix: str) -> Tensor:
        parts = self._parts[layer]
        name = parts.names[suffix]
        return self._files[name].tensor(name, parts.expert)

    def _read(self, layer: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        try:
            return self._module.from_checkpoint(tensors, self.config, name=layer)
        except WeightFormatError as error:
            file = self._files[next(iter(self._parts[layer].names.values()))].path
            text = str(error)
            if layer:  # some modules name it ("up.scales: ..."), some cannot
                text = text.removeprefix(f"{layer}: ").removeprefix(f"{layer}.")
            raise WeightFormatError(f"{file}: layer {layer!r}: {text}") from error

    def _spec_of_header(self, layer: str) -> WeightSpec:
        """The facts, from tensors without memory in the place of the large ones."""
        tensors: dict[str, Tensor] = {}
        index: Tensor | None = None
        for suffix in self._parts[layer].names:
            entry = self._entry(layer, suffix)
            if (
                suffix in METHODS[self.method].described_by or entry.torch_dtype is None
            ):  # read: says what is wrong
                tensors[suffix] = self._tensor(layer, suffix)
                continue
            if suffix in _GROUP_INDEX:
                index = self._tensor(layer, suffix)
            tensors[suffix] = torch.empty(entry.shape, dtype=entry.torch_dtype, device="meta")
        spec = self._read(layer, tensors).spec
        if index is None:
            return spec
        if int(index.min()) < 0 or int(index.max()) >= spec.groups:
            raise WeightFormatError("g_idx: out of range")
        plain = torch.arange(spec.in_features) // spec.group_size
        return replace(spec, act_order=not torch.equal(index.to(plain.dtype), plain))
