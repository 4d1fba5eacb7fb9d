"""Facts of a weight as one line of text and back: what a traced program keeps of a weight besides its tensors.

``bits=4;group_size=128;in_features=4096;...;zero_kind=int;scale_dtype=float16;...;fits_float16=1``: every field of
:class:`~qmm.WeightSpec` by its name, ``-`` for None, and what is known of the values: whether all lie inside float16's
range, and whether every group has its rows (``even_groups=1``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

import torch

from qmm.weight.spec import WeightSpec, ZeroKind, dtype_name

_NONE = "-"
_FITS = "fits_float16"
_FLAGS = ("act_order", "scale2_divides")
_EVEN = "even_groups"


@lru_cache(maxsize=1024)
def to_text(spec: WeightSpec, fits_float16: bool, even_groups: bool) -> str:
    """The facts as text; :func:`from_fields` is the inverse."""
    pairs = [f"{f.name}={_word(getattr(spec, f.name))}" for f in fields(WeightSpec)]
    return ";".join([*pairs, f"{_FITS}={int(fits_float16)}", f"{_EVEN}={int(even_groups)}"])


def split(text: str) -> dict[str, str]:
    """``"a=1;b=2"`` as a mapping."""
    return dict(pair.partition("=")[::2] for pair in text.split(";"))


def from_fields(found: Mapping[str, str]) -> tuple[WeightSpec, bool, bool]:
    """The facts, whether all values lie inside float16's range, and whether every group has its rows.

    Other names are left alone.

    Raises:
        ValueError: a field is missing or no fact of a weight.
    """
    values: dict[str, Any] = {}
    for field in fields(WeightSpec):
        word = found.get(field.name)
        if word is None and field.default is MISSING:
            raise ValueError(f"spec: must have {field.name}; got {', '.join(sorted(found))}")
        if word is not None:
            values[field.name] = _value(field.name, word)
    spec = WeightSpec(**values)
    return spec, found.get(_FITS) == "1", not spec.act_order or found.get(_EVEN) == "1"


def _word(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, ZeroKind):
        return value.value
    return _NONE if value is None else str(int(value))


def _value(name: str, word: str) -> Any:
    if word == _NONE:
        return None
    if name == "zero_kind":
        return ZeroKind(word)
    if name.endswith("_dtype"):
        dtype = getattr(torch, word, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"spec: {name} must be a dtype of torch; got {word!r}")
        return dtype
    return bool(int(word)) if name in _FLAGS else int(word)
