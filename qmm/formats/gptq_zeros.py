"""GPTQ's zero points, which version 1 stores minus one, and the three readings of a v1 field that is all ones.

A true zero point of 0 wraps to all ones in v1, and the libraries read that differently (bits 4, field 15)::

    reading     who                                     z of the field 15    its neighbours
    "masked"    gptqmodel with 3, 5, 6, 7 bits; qmm     0                    untouched
    "unmasked"  auto-gptq                               16 (a float zero)    untouched
    "word"      gptqmodel with 2, 4, 8 bits             0                    the next field of the word gets the carry:
                                                                             one more than stored + 1

Fields that are not all ones read the same everywhere, unless a carry reaches them. A file's writer is told by
``meta.quantizer``, or else by keys that only one library writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.formats import gptq_planar
from qmm.formats.packed import pack_along, turn_along, turn_down, unpack_along, whole_zeros
from qmm.weight import QuantizedWeight, ZeroKind
from qmm.weight.facts import has_values
from qmm.weight.spec import WORD_BITS
from qmm.weight.validate import require

READINGS = ("masked", "unmasked", "word")


@dataclass(frozen=True)
class Layout:
    """How the fields of ``qzeros`` stand.

    Attributes:
        bits: of a field.
        n: fields of a row.
        minus_one: version 1.
        planar: in planes, not as one dense stream.
    """

    bits: int
    n: int
    minus_one: bool
    planar: bool

    @property
    def top(self) -> int:
        """A field of ones."""
        return (1 << self.bits) - 1

    @property
    def ones(self) -> int:
        """A word with 1 in each field, for widths that divide 32."""
        word = sum(1 << at for at in range(0, WORD_BITS, self.bits))
        return word - (1 << WORD_BITS) if word >> (WORD_BITS - 1) else word  # as int32

    def fields(self, words: Tensor) -> Tensor:
        """Rows of words -> fields uint8 ``[rows, N]``."""
        if self.planar:
            return gptq_planar.unpack(words.t().contiguous(), self.bits).t()
        return unpack_along(words, self.bits, self.n)

    def words(self, fields: Tensor) -> Tensor:
        """The inverse of :meth:`fields`."""
        if self.planar:
            return gptq_planar.pack(fields.t(), self.bits).t()
        return pack_along(fields, self.bits)


def check_reading(reading: object, bits: int) -> str | None:
    """A reading's name, or None.

    Raises:
        WeightFormatError: unknown, or "word" for a width that gptqmodel adds to field by field.
    """
    require(
        reading is None or reading in READINGS,
        "zero_reading",
        f"must be one of {', '.join(READINGS)} or None",
        repr(reading),
    )
    whole = WORD_BITS % bits == 0
    rule = f"must not be 'word' for bits={bits}: fields that cross words are read one by one (use 'masked')"
    require(whole or reading != "word", "zero_reading", rule, repr(reading))
    return None if reading is None else str(reading)


def reading_of_writer(config: Mapping[str, Any], bits: int) -> str | None:
    """The reading of the library that wrote the file, or None where the config does not tell it."""
    meta = config.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    names = quantizer if isinstance(quantizer, (list, tuple)) else [] if quantizer is None else [quantizer]
    text = " ".join(str(n).lower().replace("_", "-") for n in names)
    if "gptqmodel" in text or (not names and "pack_dtype" in config):
        return "word" if WORD_BITS % bits == 0 else "masked"
    if "auto-gptq" in text or "autogptq" in text or (not names and "model_file_base_name" in config):
        return "unmasked"
    return None


def read(words: Tensor, layout: Layout, reading: str) -> tuple[Tensor, ZeroKind, int]:
    """``qzeros`` -> canonical zeros, their kind, and the number of columns with an all-ones field of v1.

    Args:
        words: int32 ``[G, ceil(N*bits/32)]``.
        layout: of its fields.
        reading: one of :data:`READINGS`.

    Returns:
        Packed zeros down G (kind int), or float16 ``[G, N]`` (kind float) where "unmasked" meets an all-ones field.
    """
    bits, top = layout.bits, layout.top
    if not layout.minus_one:
        return turn_down(words, bits, layout.n, layout.fields), ZeroKind.INT, 0
    hazard = torch.zeros(layout.n, dtype=torch.bool, device=words.device)

    def decode(rows: Tensor) -> Tensor:
        fields = layout.fields(rows)
        hazard.logical_or_((fields == top).any(0))
        return layout.fields(rows + layout.ones) if reading == "word" else (fields + 1) & top

    zeros = turn_down(words, bits, layout.n, decode)
    columns = int(hazard.sum()) if has_values(words) else 0
    if columns and reading == "unmasked":  # at most 256, which float16 holds
        return layout.fields(words).half().add_(1).contiguous(), ZeroKind.FLOAT, columns
    return zeros, ZeroKind.INT, columns


@dataclass(frozen=True)
class Written:
    """Zero points as a file holds them.

    Attributes:
        qzeros: int32 ``[G, ceil(N*bits/32)]``.
        reading: of v1, by which they are read back.
        rounded: whether they are not all the weight's own.
        columns: number of columns that readers of v1 disagree on; 0 where a reading was asked for.
    """

    qzeros: Tensor
    reading: str = "masked"
    rounded: bool = False
    columns: int = 0


def write(w: QuantizedWeight, layout: Layout, reading: str | None, lossy: bool) -> Written:
    """The inverse of :func:`read`.

    Args:
        w: the weight.
        layout: of the fields to write.
        reading: by whom a v1 file will be read; None: by "unmasked" where a zero point is 2**bits, else "masked".
        lossy: round zero points that are not whole numbers in range.

    Raises:
        WeightFormatError: the version cannot hold these zero points.
    """
    bits, top, groups = layout.bits, layout.top, w.spec.groups
    if w.zero_kind is ZeroKind.INT and not layout.minus_one and w.zeros is not None:
        return Written(turn_along(w.zeros, bits, groups, layout.words))
    low, high = {None: (0, top + 1), "unmasked": (1, top + 1)}.get(reading, (0, top))
    zeros, rounded = whole_zeros(w, low, high if layout.minus_one else top, lossy)
    if not layout.minus_one:
        return Written(layout.words(zeros).contiguous(), rounded=rounded)
    has_zero, past = bool((zeros == 0).any()), bool((zeros > top).any())
    if has_zero and past:
        raise WeightFormatError(
            f"zeros: 0 and {top + 1} are one field in GPTQ v1; got both (gptq_v2 holds 0, 'unmasked' v1 {top + 1})"
        )
    if reading == "word":
        return Written(layout.words(zeros).sub(layout.ones).contiguous(), reading, rounded)
    stored = (zeros - 1) & top
    columns = int((stored == top).any(0).sum()) if reading is None else 0
    read_by = reading or ("unmasked" if past else "masked")
    return Written(layout.words(stored).contiguous(), read_by, rounded, columns)
