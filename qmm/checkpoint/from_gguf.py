"""A GGUF file as a :class:`Checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from qmm.checkpoint.checkpoint import Checkpoint, LayerFacts
from qmm.formats import gguf
from qmm.weight import QuantizedWeight


class GGUFCheckpoint(Checkpoint):
    """See :class:`Checkpoint`; ``prefix`` as in :func:`qmm.load`."""

    method = "gguf"

    def __init__(self, path: Path, prefix: str | None) -> None:
        self.path = path
        self._file = gguf.read(path)
        self.config = self._file.metadata
        wanted = "" if prefix is None else prefix
        self._info = {name: info for name, info in self._file.info.items() if name.startswith(wanted)}
        self.unused = {name: why for name, why in self._file.unused.items() if name.startswith(wanted)}
        self.plain = tuple(name for name in self.unused if name in self._file.plain)

    def _layers(self) -> Mapping[str, gguf.TensorInfo]:
        return self._info

    def facts(self, name: str) -> LayerFacts:
        if name not in self._info:
            raise self._missing(name)
        info = self._info[name]
        # one row of the file is one column of W: everything but N
        column = gguf.from_blocks(self._file.blocks(name)[:1], info.qtype, info.in_features)
        spec = replace(column.spec, out_features=info.out_features)
        return LayerFacts(f"gguf {info.qtype}", spec, info.nbytes)

    def nbytes(self, name: str) -> int:
        return self._info[name].nbytes

    def tensor(self, name: str) -> Tensor:
        if name not in self.plain:
            raise KeyError(f"{self.path}: no tensor {name!r} that is not quantised")
        return self._file.plain_tensor(name)

    def __getitem__(self, name: str) -> QuantizedWeight:
        if name not in self._info:
            raise self._missing(name)
        return self._file[name]
