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
from qmm.checkpoint.methods import METHODS, differs_by_layer, format_module, method_of
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
        self._specs: dict[
            object, WeightSpec
        ] = {}  # layers of equal headers are equal: there are few kinds of them
        self._by_name = differs_by_layer(config)
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
        tensors = {suffix: self._tensor(name, suffix) for suffix in self._parts[name].names}
        try:
            return self._module.from_checkpoint(tensors, self.config, name=name)
        except WeightFormatError as error:
            text = str(error)
            if name:  # some modules name it ("up.scales: ..."), some cannot
                text = text.removeprefix(f"{name}: ").removeprefix(f"{name}.")
            raise self._broken(name, text) from error

    def facts(self, name: str) -> LayerFacts:
        if name not in self._parts:
            raise self._missing(name)
        kind, index = self._kind(name)
        if kind not in self._specs:
            self._specs[kind] = self[name].spec
        return LayerFacts(self.method, self._with_index(name, self._specs[kind], index), self.nbytes(name))

    def _kind(self, layer: str) -> tuple[str, Tensor | None]:
        """What the facts of a layer follow from (dtypes, shapes, the values that describe it), and its group index.

        A model has few kinds of layers. One layer of each is read (torch's tensors without memory would do as well,
        but importing what they need takes longer than reading a layer).
        """
        kind: list[object] = [layer if self._by_name else None]
        index = None
        for suffix in self._parts[layer].names:
            entry = self._entry(layer, suffix)
            kind.append((suffix, entry.dtype, entry.shape))
            if suffix in METHODS[self.method].described_by:
                kind.append(self._tensor(layer, suffix).tolist())
            elif suffix in _GROUP_INDEX:
                index = self._tensor(layer, suffix)
        return repr(kind), index

    def _with_index(self, layer: str, spec: WeightSpec, index: Tensor | None) -> WeightSpec:
        """A layer's own group index: checked, and whether it reorders."""
        if index is None:
            return spec
        index = index.to(
            torch.int64
        )  # torch has no minimum of wide unsigned integers; past int64 is negative
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= spec.groups:
            got = low if low < 0 else high
            raise self._broken(
                layer, f"g_idx: must be in [0, G) with G={spec.groups} rows of scales; got {got}"
            )
        plain = torch.arange(spec.in_features, device=index.device) // spec.group_size
        return replace(spec, act_order=not torch.equal(index, plain))

    def _entry(self, layer: str, suffix: str) -> Entry:
        parts = self._parts[layer]
        entry = self._entries[parts.names[suffix]]
        return entry if parts.expert is None else entry.at(parts.expert)

    def _tensor(self, layer: str, suffix: str) -> Tensor:
        parts = self._parts[layer]
        name = parts.names[suffix]
        return self._files[name].tensor(name, parts.expert)

    def _broken(self, layer: str, text: str) -> WeightFormatError:
        file = self._files[next(iter(self._parts[layer].names.values()))].path
        return WeightFormatError(f"{file}: layer {layer!r}: {text}")
