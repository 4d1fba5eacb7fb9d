"""Checkpoint: the quantised layers of a model's files, one at a time, and what became of every other tensor."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.weight import QuantizedWeight, WeightSpec


@dataclass(frozen=True)
class LayerFacts:
    """What a layer is, without its values.

    Attributes:
        format: e.g. ``"gptq"`` or ``"gguf Q4_K"``.
        spec: bits, group size, K, N and the rest.
        nbytes: bytes in the file.
    """

    format: str
    spec: WeightSpec
    nbytes: int


class Checkpoint(Mapping[str, QuantizedWeight], abc.ABC):
    """An open checkpoint: layer name -> weight, made anew at each look, one layer at a time, from mapped files.

    Made by :func:`qmm.load`.

    Attributes:
        path: what was opened.
        method: how its layers are stored: ``"gptq"``, ``"gguf"``, ... (the config's ``quant_method``).
        config: the quantisation config as it stands in the file (a GGUF file's metadata).
        unused: ``{tensor name: reason}`` of every tensor that is in no layer.
        plain: names of those that are no fault: not quantised (embeddings, norms, biases), or about activations.

    Example:
        >>> import tempfile, torch, qmm
        >>> folder = tempfile.mkdtemp()
        >>> qmm.save(f"{folder}/w.safetensors", {"up": qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)})
        >>> checkpoint = qmm.load(f"{folder}/w.safetensors")
        >>> list(checkpoint), checkpoint.method, checkpoint.unused
        (['up'], 'qmm', {})
        >>> checkpoint["up"].shape
        (64, 8)
    """

    path: Path
    method: str
    config: dict[str, Any]
    unused: dict[str, str]
    plain: tuple[str, ...]

    @abc.abstractmethod
    def facts(self, name: str) -> LayerFacts:
        """What a layer is, from the headers; of layers whose headers are equal one is read.

        (Only the values can show that a GPTQ v1 layer has zero points of 2**b, which take the kind float.)

        Raises:
            KeyError: no such layer.
            WeightFormatError: as for ``checkpoint[name]``, as far as the headers show it.
        """

    @abc.abstractmethod
    def nbytes(self, name: str) -> int:
        """Bytes of a layer in the file."""

    @abc.abstractmethod
    def tensor(self, name: str) -> Tensor:
        """A tensor that is not quantised, as it stands in the file.

        Raises:
            KeyError: not one of ``plain``.
            WeightFormatError: its dtype is unknown to this torch.
        """

    @abc.abstractmethod
    def __getitem__(self, name: str) -> QuantizedWeight:
        """Read a layer.

        Raises:
            KeyError: no such layer.
            WeightFormatError: the layer is damaged; names the file, the layer and the rule. The others stay readable.
        """

    @abc.abstractmethod
    def _layers(self) -> Mapping[str, object]:
        """Something by layer name, in the file's order."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers())

    def __len__(self) -> int:
        return len(self._layers())

    def __contains__(self, name: object) -> bool:  # Mapping's would read the layer
        return name in self._layers()

    def _missing(self, name: str) -> KeyError | WeightFormatError:
        """What asking for ``name`` raises where it is no layer."""
        if name in self.unused:
            return WeightFormatError(f"{self.path}: tensor {name!r}: {self.unused[name]}")
        close = [layer for layer in self if name in layer][:3]
        hint = f" (there is {', '.join(close)})" if close else f" among {len(self)}"
        return KeyError(f"{self.path}: no layer {name!r}{hint}")

    def __repr__(self) -> str:
        return (
            f"Checkpoint({str(self.path)!r}: {len(self)} {self.method} layers, "
            f"{len(self.unused)} tensors not used, {len(self.unused) - len(self.plain)} of them for a fault)"
        )
