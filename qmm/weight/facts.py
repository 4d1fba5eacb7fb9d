"""Facts of a weight as a tensor (so that a state_dict describes itself), and rebuilding from a state_dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from qmm.errors import WeightFormatError
from qmm.weight.spec import WeightSpec, ZeroKind, dtype_name
from qmm.weight.tensors import WeightTensors

if TYPE_CHECKING:
    from qmm.weight.quantized_weight import QuantizedWeight

# facts = int64 [version, bits, group_size, K, zero kind, scale2_ratio, zero2_ratio, scale2_divides]; -1 stands for None
VERSION = 1
_KINDS = (ZeroKind.NONE, ZeroKind.INT, ZeroKind.FLOAT, ZeroKind.BIAS)
_LENGTH = 8


def has_values(t: Tensor) -> bool:
    """Whether ``t`` holds numbers: not a meta or fake tensor."""
    return t.device.type != "meta" and not isinstance(t, FakeTensor)


def encode(spec: WeightSpec) -> Tensor:
    """The facts that the tensors alone do not tell, as int64 ``[8]`` on the CPU."""
    ratios = [-1 if r is None else r for r in (spec.scale2_ratio, spec.zero2_ratio)]
    kind = _KINDS.index(spec.zero_kind)
    numbers = [VERSION, spec.bits, spec.group_size, spec.in_features, kind, *ratios, int(spec.scale2_divides)]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")  # also where the default device is another


def picklable(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Arguments of :func:`rebuild`: 8-bit floats as bytes, which pickle (unlike torch.save) does not know, and no
    views, since those would be pickled with the whole buffer that they are part of.
    """
    tensors, dtypes = {}, {}
    for name, t in state.items():
        part = has_values(t) and t.untyped_storage().nbytes() != t.numel() * t.element_size()
        tensors[name] = t.clone() if part else t
        if t.is_floating_point() and t.element_size() == 1:
            tensors[name], dtypes[name] = tensors[name].view(torch.uint8), dtype_name(t.dtype)
    return tensors, dtypes


def arguments_from_state(state: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """Arguments of ``QuantizedWeight`` from a state_dict; every key under ``prefix`` must be known."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state_dict: must be a mapping of names to tensors; got {type(state).__name__}")
    mine = {key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)}
    known = (*WeightTensors._fields, "facts")
    missing = [prefix + key for key in ("qweight", "scales", "facts") if key not in mine]
    if missing:
        raise WeightFormatError(f"state_dict: must have {', '.join(missing)}; got {_shown(state)}")
    unknown = sorted(set(mine) - set(known))
    if unknown:
        raise WeightFormatError(
            f"state_dict: keys under {prefix!r} must be among {', '.join(known)}; got {unknown}"
        )
    facts = mine.pop("facts")
    if not isinstance(facts, Tensor):
        raise WeightFormatError(f"facts: must be a torch.Tensor; got {type(facts).__name__}")
    if facts.dtype != torch.int64 or tuple(facts.shape) != (_LENGTH,):
        raise WeightFormatError(
            f"facts: must be int64 [{_LENGTH}]; got {dtype_name(facts.dtype)} {list(facts.shape)}"
        )
    if not has_values(facts):
        raise WeightFormatError(f"facts: must hold values; got a tensor on {facts.device}")
    version, bits, group_size, k, kind, scale2_ratio, zero2_ratio, divides = facts.tolist()
    if version != VERSION:
        raise WeightFormatError(f"facts: version must be {VERSION}; got {version}")
    if not 0 <= kind < len(_KINDS):
        raise WeightFormatError(f"facts: zero kind must be from 0 to {len(_KINDS) - 1}; got {kind}")
    if divides not in (0, 1):
        raise WeightFormatError(f"facts: scale2_divides must be 0 or 1; got {divides}")
    return {
        **mine,
        "bits": bits,
        "group_size": group_size,
        "in_features": k,
        "zero_kind": _KINDS[kind],
        "scale2_ratio": None if scale2_ratio < 0 else scale2_ratio,
        "zero2_ratio": None if zero2_ratio < 0 else zero2_ratio,
        "scale2_divides": bool(divides),
    }


def _shown(state: Mapping[str, Tensor]) -> str:
    names = sorted(map(str, state))
    return f"keys {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}" if names else "an empty dict"


def first_difference(mine: WeightSpec, other: WeightSpec) -> str | None:
    """``"bits 4 here and 8 there"``, or None where the facts agree."""
    for field in fields(WeightSpec):
        a, b = getattr(mine, field.name), getattr(other, field.name)
        if a != b:
            return f"{field.name} {a} here and {b} there"
    return None


def rebuild(state: dict[str, Tensor], dtypes: dict[str, str]) -> QuantizedWeight:
    """Unpickling: named at module level so that ``torch.load(weights_only=True)`` can allow it."""
    from qmm.weight.quantized_weight import QuantizedWeight

    views = {name: state[name].view(getattr(torch, dtype)) for name, dtype in dtypes.items()}
    return QuantizedWeight.from_state_dict(state | views)


torch.serialization.add_safe_globals([rebuild])
