"""Safetensors files, written in one pass and atomically: tensors go to disk as they come, the header at the end.

Room for the header is left at the front and filled with spaces (which the format allows), because the sizes of tensors
that are still to be made are not known; so no more than one layer is ever in memory.

The format allows no gaps, and readers view tensors in place, which needs alignment. Tensors whose bytes are no multiple
of 8 (rare: an odd number of odd rows) therefore wait in memory and come last, those of the widest elements first.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from qmm.checkpoint.safetensors_read import DTYPES
from qmm.checkpoint.temporary import Temporary

_NAMES = {getattr(torch, name): tag for tag, (_, name) in DTYPES.items() if name and hasattr(torch, name)}
_ENTRY_BYTES = (
    200  # '"": {"dtype": ..., "shape": [...], "data_offsets": [...]}, ' of a tensor of up to 4 dimensions
)
_ALIGN = 64


class SafetensorsWriter:
    """Writes ``path``; use as a context manager. The file appears, whole, when the block ends without an exception.

    Until then the data stand in a hidden file beside it, which an exception removes; what a killed process leaves
    behind, the next writer of the same file removes.

    Args:
        path: the file; an existing one is replaced.
        names: every tensor that may be written; bounds the header.
        metadata: strings for the header.

    Attributes:
        nbytes: of the tensors so far.
    """

    def __init__(self, path: Path, names: Iterable[str], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        room = len(json.dumps(self._header)) + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
        self._start = -(-(8 + room) // _ALIGN) * _ALIGN
        self.nbytes = self._written = 0
        self._last: dict[str, Tensor] = {}
        self._temporary = Temporary(path)
        self._file = self._temporary.path.open("wb")
        self._file.seek(self._start)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor (from any device)."""
        self.nbytes += tensor.nbytes
        if tensor.nbytes % 8:
            self._last[name] = tensor
        else:
            self._write(name, tensor)

    def _write(self, name: str, tensor: Tensor) -> None:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy()
        begin, self._written = self._written, self._written + raw.nbytes
        self._file.write(raw.data)
        self._header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, self._written],
        }

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            self._temporary.close()

    def _finish(self) -> None:
        for name, tensor in sorted(self._last.items(), key=lambda item: -item[1].element_size()):
            self._write(name, tensor)
        header = json.dumps(self._header, separators=(",", ":")).encode()
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._start - 8) + header.ljust(self._start - 8))
        self._file.flush()
        os.fsync(self._file.fileno())  # otherwise the name may reach the disk before the data
        os.replace(self._temporary.path, self.path)
