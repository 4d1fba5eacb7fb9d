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
from qmm.checkpoint.layers import Grouped, group
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

    def _layers(self) -> Mapping[str, dict[str, str]]:
        return self._parts

    def nbytes(self, name: str) -> int:
        return sum(entry.nbytes for entry in self._of(name).values())

    def tensor(self, name: str) -> Tensor:
        if name not in self.plain:
            raise KeyError(f"{self.path}: no tensor {name!r} that is not quantised")
        return self._files[name].tensor(name)

    def __getitem__(self, name: str) -> QuantizedWeight:
        if name not in self._parts:
            raise self._missing(name)
        return self._read(name, {s: self._files[t].tensor(t) for s, t in self._parts[name].items()})

    def facts(self, name: str) -> LayerFacts:
        if name not in self._parts:
            raise self._missing(name)
        try:
            spec = self._spec_of_header(name)
        except (ValueError, TypeError, RuntimeError):
            # this format needs values to say what the layer is, or the layer is damaged: the layer itself tells
            spec = self[name].spec
        return LayerFacts(self.method, spec, self.nbytes(name))

    def _of(self, layer: str) -> dict[str, Entry]:
        return {suffix: self._entries[name] for suffix, name in self._parts[layer].items()}

    def _read(self, layer: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        try:
            return self._module.from_checkpoint(tensors, self.config, name=layer)
        except WeightFormatError as error:
            file = self._files[next(iter(self._parts[layer].values()))].path
            text = str(error).removeprefix(f"{layer}: ")  # some modules name the layer, some cannot
            raise WeightFormatError(f"{file}: layer {layer!r}: {text}") from error

    def _spec_of_header(self, layer: str) -> WeightSpec:
        """The facts, from tensors without memory in the place of the large ones."""
        tensors: dict[str, Tensor] = {}
        index: Tensor | None = None
        for suffix, name in self._parts[layer].items():
            entry = self._entries[name]
            if suffix in METHODS[self.method].described_by:
                tensors[suffix] = self._files[name].tensor(name)
                continue
            if suffix in _GROUP_INDEX:
                index = self._files[name].tensor(name)
            if entry.torch_dtype is None:
                raise WeightFormatError(f"tensor {name!r}: torch has no dtype {entry.dtype}")
            tensors[suffix] = torch.empty(entry.shape, dtype=entry.torch_dtype, device="meta")
        spec = self._read(layer, tensors).spec
        if index is None:
            return spec
        if int(index.min()) < 0 or int(index.max()) >= spec.groups:
            raise WeightFormatError("g_idx: out of range")
        plain = torch.arange(spec.in_features) // spec.group_size
        return replace(spec, act_order=not torch.equal(index.to(plain.dtype), plain))
