"""What an HQQ layer says about itself: tensors of one number or of the bytes of a string, and the model's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.formats.packed import flag, setting
from qmm.weight.facts import has_values
from qmm.weight.validate import require, whole_number

_LONGEST = 64  # bytes of a string


@dataclass(frozen=True)
class Packing:
    """How codes of one width stand in ``W_q``: its name in files, the integers, and codes in each."""

    name: str
    dtype: torch.dtype
    fields: int


PACKINGS = {
    8: Packing("8bit_u8", torch.uint8, 1),
    6: Packing("8bit_u8", torch.uint8, 1),
    5: Packing("8bit_u8", torch.uint8, 1),
    4: Packing("4bit_u8", torch.uint8, 2),
    3: Packing("3bit_32", torch.int32, 10),
    2: Packing("2bit_u8", torch.uint8, 4),
    1: Packing("1bit_u8", torch.uint8, 8),
}

NUMBERS = ("nbits", "axis", "group_size")
FLAGS = (
    *("view_as_float", "quant_scale", "quant_zero", "channel_wise", "optimize", "round_zero"),
    *("offload_meta", "encoded_state_dict", "stores_quant_config"),
)
STRINGS = ("packing", "compute_dtype", "unpack_view_dtype")
FACTS = frozenset({"shape", *NUMBERS, *FLAGS, *STRINGS})


@dataclass(frozen=True)
class Facts:
    """A layer: code width, axis of the groups, their size, the weight ``[n, k]``, whether W_q is viewed as float."""

    bits: int
    axis: int
    group_size: int
    n: int
    k: int
    view_as_float: bool

    def __post_init__(self) -> None:
        whole = self.n * self.k % self.group_size == 0
        rule = f"must divide the {self.n} * {self.k} numbers of the weight"
        require(whole, "group_size", rule, self.group_size)
        fields = PACKINGS[self.bits].fields
        fits = self.bits == 3 or self.rows % fields == 0
        rule = f"rows of codes must be a multiple of {fields} for {self.bits} bits"
        require(fits, "W_q", rule, f"{self.rows} rows for a group size of {self.group_size}")

    @property
    def rows(self) -> int:
        """R, rows of the matrix of codes."""
        return self.n * self.k // self.columns

    @property
    def columns(self) -> int:
        """C, its columns."""
        return self.group_size if self.axis == 1 else self.n * self.k // self.group_size

    @property
    def packed_rows(self) -> int:
        """P, rows of W_q."""
        return -(-self.rows // PACKINGS[self.bits].fields)


def facts_of(found: Mapping[str, Tensor], config: Mapping[str, Any], layer: str) -> Facts:
    """The facts of a layer.

    Raises:
        WeightFormatError: one is missing, malformed or not supported, or tensors and config contradict each other.
    """
    given = _settings(config, layer)
    bits = whole_number(
        _agreed("nbits", _number(found, "nbits"), setting(given, "nbits", "bits")), "nbits", 1, 8
    )
    require(bits in PACKINGS, "nbits", f"must be one of {', '.join(map(str, PACKINGS))}", bits)
    axis = whole_number(_agreed("axis", _number(found, "axis"), given.get("axis")), "axis", 0, 1)
    shape = _agreed("shape", _shape(found), given.get("shape"))
    pair = isinstance(shape, (list, tuple)) and len(shape) == 2
    require(pair, "shape", "must be [N, K] (stacks of experts are not supported yet)", shape)
    n, k = (whole_number(v, "shape", 1) for v in shape)
    group = _agreed("group_size", _number(found, "group_size"), given.get("group_size"), needed=False)
    whole_side = k if axis == 1 else n
    group_size = whole_side if group in (None, -1) else whole_number(group, "group_size", 1)
    view = _agreed("view_as_float", _flag(found, "view_as_float"), flag(given, "view_as_float"), needed=False)
    for key in ("quant_scale", "quant_zero"):
        require(not _flag(found, key), key, "must be false (quantised scales are not supported)", True)
    packing = _string(found, "packing")
    expected = PACKINGS[bits].name
    require(packing in (None, expected), "packing", f"must be {expected!r} for {bits} bits", repr(packing))
    return Facts(bits, axis, group_size, n, k, bool(view))


def facts_to_tensors(facts: Facts, dtype: str) -> dict[str, Tensor]:
    """The facts as hqq's encoded state_dict holds them; ``dtype`` is the compute dtype's name."""
    packing = PACKINGS[facts.bits]
    numbers = {"nbits": facts.bits, "axis": facts.axis, "group_size": facts.group_size}
    # how the weight was found is not known: hqq's defaults
    true = {"channel_wise", "optimize", "encoded_state_dict", "stores_quant_config"}
    flags = {key: key in true for key in FLAGS} | {"view_as_float": facts.view_as_float}
    strings = {
        "packing": packing.name,
        "compute_dtype": f"torch.{dtype}",
        "unpack_view_dtype": str(packing.dtype),
    }
    return {
        "shape": torch.tensor([facts.n, facts.k], dtype=torch.int64, device="cpu"),
        **{key: torch.tensor(value, dtype=torch.int32, device="cpu") for key, value in numbers.items()},
        **{key: torch.tensor(int(value), dtype=torch.uint8, device="cpu") for key, value in flags.items()},
        **{
            key: torch.tensor(list(value.encode()), dtype=torch.uint8, device="cpu")
            for key, value in strings.items()
        },
    }


def _settings(config: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """``weight_quant_params`` of the config: for all layers, by the layer's tag, or the config's own entries."""
    outer = config.get("quant_config", config)
    require(isinstance(outer, Mapping), "quant_config", "must be a mapping", type(outer).__name__)
    if "weight_quant_params" not in outer and outer is not config:
        tags = [str(tag) for tag in outer if f".{layer}".endswith(f".{tag}")]
        outer = outer.get(max(tags, key=len), {}) if tags else {}
        require(isinstance(outer, Mapping), "quant_config", "must map tags to settings", type(outer).__name__)
    inner = outer.get("weight_quant_params", outer)
    require(isinstance(inner, Mapping), "weight_quant_params", "must be a mapping", type(inner).__name__)
    assert isinstance(inner, Mapping)
    return inner


def _agreed(key: str, stored: Any, declared: Any, needed: bool = True) -> Any:
    """The layer's own value, or the config's where the layer has none."""
    if stored is None:
        require(declared is not None or not needed, key, "must be in the layer or the config", "neither")
        return declared
    declared = list(declared) if isinstance(declared, tuple) else declared
    whole_side = key == "group_size" and declared == -1
    same = declared is None or whole_side or stored == declared
    require(same, key, f"must agree with the config's {declared}", stored)
    return stored


def _number(found: Mapping[str, Tensor], key: str) -> int | None:
    t = found.get(key)
    if t is None:
        return None
    plain = t.numel() == 1 and not t.is_floating_point() and not t.is_complex() and has_values(t)
    require(plain, key, "must be one integer", f"{t.dtype} {list(t.shape)} on {t.device}")
    return int(t.reshape(()))


def _flag(found: Mapping[str, Tensor], key: str) -> bool | None:
    value = _number(found, key)
    require(value in (None, 0, 1), key, "must be 0 or 1", value)
    return None if value is None else bool(value)


def _shape(found: Mapping[str, Tensor]) -> list[int] | None:
    t = found.get("shape")
    if t is None:
        return None
    plain = t.dim() == 1 and t.numel() <= 8 and t.dtype in (torch.int32, torch.int64) and has_values(t)
    require(plain, "shape", "must be a few integers", f"{t.dtype} {list(t.shape)} on {t.device}")
    return [int(v) for v in t]


def _string(found: Mapping[str, Tensor], key: str) -> str | None:
    t = found.get(key)
    if t is None:
        return None
    plain = t.dtype == torch.uint8 and t.dim() == 1 and t.numel() <= _LONGEST and has_values(t)
    require(plain, key, f"must be a string as at most {_LONGEST} bytes", f"{t.dtype} {list(t.shape)}")
    try:
        return bytes(t.tolist()).decode("ascii")
    except UnicodeDecodeError:
        raise WeightFormatError(f"{key}: must be ASCII; got {bytes(t.tolist())!r}") from None
