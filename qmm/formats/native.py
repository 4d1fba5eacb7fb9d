"""qmm's own format: the canonical tensors as they are, so that nothing can be lost.

A safetensors file; a layer ``name`` has the tensors of :class:`qmm.weight.WeightTensors` that it needs, and ``facts``::

    name.qweight, name.scales [, name.scale2, name.zeros, name.zero2, name.codebook, name.g_idx]
    name.facts    int64 [8] = version, bits, group_size, K, zero kind (0 none, 1 int, 2 float, 3 bias),
                              scale2_ratio, zero2_ratio (-1 stands for None), whether scale2 divides

``__metadata__["quantization_config"]`` of the file (and of a folder's ``config.json``) is
``{"quant_method": "qmm", "version": 1}`` with whatever the writer added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qmm.weight import QuantizedWeight, WeightTensors
from qmm.weight.validate import require

VERSION = 1
KEY = "facts"
SUFFIXES = frozenset({KEY, *WeightTensors._fields})


def from_checkpoint(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, name: str
) -> QuantizedWeight:
    """One layer from its tensors by field name.

    Raises:
        WeightFormatError: another version of the format, a key is missing or unknown, or a rule does not hold.
    """
    version = config.get("version")
    require(
        type(version) is int and version == VERSION,
        "version",
        f"of qmm's format must be {VERSION} (a newer qmm may read it)",
        str(version)[:100],
    )
    return from_tensors(tensors)


def from_tensors(tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    """:meth:`qmm.QuantizedWeight.from_state_dict`.

    Raises:
        WeightFormatError: a key is missing or unknown, or a rule does not hold.
    """
    return QuantizedWeight.from_state_dict(tensors)


def to_tensors(w: QuantizedWeight) -> dict[str, Tensor]:
    """The inverse: every weight can be written."""
    return w.state_dict()
