"""bitsandbytes: NF4 and FP4 (absmax plain or nested), and LLM.int8.

4 bits, N rows of K, blocks of ``blocksize`` elements of the **flat** weight (element ``n*K + k``)::

    weight                  uint8 [ceil(N*K/2), 1], or the same bytes as another dtype (quant_storage):
                            byte j   | element 2j | element 2j+1 |      (bit 7 ... bit 0): even in the high nibble
    weight.absmax           float32 [ceil(N*K/blocksize)], or uint8 where nested
    weight.quant_map        float32 [16], value of each code
    weight.nested_absmax    float32 [ceil(blocks/nested_blocksize)]     only nested
    weight.nested_quant_map float32 [256]                               only nested
    weight.quant_state.bitsandbytes__nf4 (or __fp4)    uint8, JSON: quant_type, blocksize, dtype, shape [N, K], and
                            nested_blocksize, nested_dtype, nested_offset where nested

    w = quant_map[code] * absmax[block]
    nested: absmax[i] = nested_quant_map[stored[i]] * nested_absmax[i // nested_blocksize] + nested_offset

Here: 4 bits with ``quant_map`` as codebook. Where K is no multiple of the blocksize, blocks cross rows; the group is
then gcd(K, blocksize), which says the same exactly and takes more memory (a float32 a group). The second level has an
offset and is no product, so nested absmax are kept as float32: 1.09 times the file for blocks of 64 within rows.

8 bits::

    weight                  int8 [N, K]
    SCB                     float32 [N], the largest magnitude of a row
    weight_format           uint8 [], 0 (row-major; other layouts of the past are refused)

    w = weight * SCB / 127: ``scales`` = SCB, ``scale2`` = float32(1/127)

Exactness: 4 bits bit-equal to bitsandbytes in float32. int8 is ``q * fl(SCB * c)`` for the peer's ``fl(q * SCB) * c``:
within 1 unit in the last place where SCB came from a 16-bit weight.

:func:`to_tensors` gives identical bytes for plain absmax and int8; nested absmax are written plain, the same values.

Source: bitsandbytes 0.50.2 (functional.QuantState, nn.modules), by its files. (Its CPU kernel is wrong where blocks
cross rows; the flat rule is what its other kernels and its quantiser do.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor

from qmm.checkpoint.json_text import parse_object
from qmm.errors import WeightFormatError
from qmm.formats.layer import Layer
from qmm.formats.rows import rows_from_words, turned, words_from_rows
from qmm.weight import QuantizedWeight, ZeroKind, bitstream
from qmm.weight.facts import has_values
from qmm.weight.spec import dtype_name
from qmm.weight.validate import require, whole_number

KEY = "weight"
_STATES = {f"weight.quant_state.bitsandbytes__{kind}": kind for kind in ("nf4", "fp4")}
SUFFIXES = frozenset(
    {
        *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *_STATES,
        *("SCB", "weight_format"),
    }
)
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_STORAGE = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_INT8_FACTOR = 7.874015718698502e-3  # 1/127, as bitsandbytes writes it

_FP4 = tuple(v / 12 for v in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
CODEBOOKS = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (*_FP4, *(-v for v in _FP4)),
}


def from_checkpoint(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None, *, name: str = ""
) -> QuantizedWeight:
    """One layer of a checkpoint; what it is stands in its tensors.

    Args:
        tensors: by suffix (``SUFFIXES``).
        config: the ``quantization_config``; its ``bnb_4bit_quant_type`` is not needed and not read.
        name: the layer's name, for errors.

    Raises:
        WeightFormatError: names layer, tensor, rule and value.
    """
    layer = Layer(tensors, name)
    states = [suffix for suffix in _STATES if layer.get(suffix) is not None]
    if layer.get("SCB") is not None:
        layer.require(not states, "SCB", "must not stand beside a quant_state", states)
        return _int8(layer)
    if not states:
        there = ", ".join(sorted(map(str, tensors))) or "nothing"
        raise WeightFormatError(
            f"{layer.field('weight')}: must have {' or '.join(_STATES)} (4 bits), or SCB (int8); got {there}"
        )
    layer.require(len(states) == 1, states[0], "must be the only quant_state", states)
    return _four_bits(layer, states[0])


def from_tensors(tensors: Mapping[str, Tensor], **config: Any) -> QuantizedWeight:
    """:func:`from_checkpoint`, the config's keys as keywords.

    Raises:
        WeightFormatError: as :func:`from_checkpoint`.

    Example:
        >>> import torch, qmm
        >>> from qmm.formats import bitsandbytes
        >>> values = torch.tensor(bitsandbytes.CODEBOOKS["nf4"])
        >>> codes, scales = torch.randint(0, 16, (64, 8)), torch.ones(1, 8)
        >>> w = qmm.QuantizedWeight.from_codes(codes, scales, bits=4, group_size=64, codebook=values)
        >>> torch.equal(bitsandbytes.from_tensors(bitsandbytes.to_tensors(w)).unpack(), w.unpack())
        True
    """
    return from_checkpoint(tensors, config)


def _four_bits(layer: Layer, state_name: str) -> QuantizedWeight:
    state, (n, k), block = _state(layer, state_name)
    packed = layer.take("weight", _STORAGE).contiguous().reshape(-1).view(torch.uint8)
    count = -(-n * k // 2)
    rule = f"must hold ceil(N*K/2) = {count} bytes for shape {[n, k]}"
    layer.require(packed.numel() == count, "weight", rule, packed.numel())
    codebook = layer.take("weight.quant_map", (torch.float32,), 1)
    layer.shape("weight.quant_map", codebook, (16,), "[16]")
    if has_values(codebook):
        # bitsandbytes' kernels use their own table, its generic code this one: they have to agree
        table = codebook.new_tensor(CODEBOOKS[_STATES[state_name]])
        close = bool(((codebook - table).abs() <= 1e-6).all())
        layer.require(close, "weight.quant_map", f"must hold {_STATES[state_name]}'s values", "others")
    absmax = _absmax(layer, state_name, state, -(-n * k // block))
    group = gcd(k, block)
    if group < block:
        absmax = absmax.repeat_interleave(block // group)[: n * k // group]
    return layer.build(
        _words(packed, n, k),
        absmax.view(n, k // group).t().contiguous(),
        bits=4,
        group_size=group,
        in_features=k,
        codebook=codebook,
    )


def _state(layer: Layer, name: str) -> tuple[dict[str, Any], tuple[int, int], int]:
    """The JSON of a quant_state, ``(N, K)`` and the blocksize."""
    stored = layer.take(name, (torch.uint8,), 1)
    layer.require(has_values(stored), name, "must hold values", stored.device)
    state = parse_object(bytes(stored.cpu().numpy()), layer.field(name))
    kind = state.get("quant_type")
    layer.require(kind == _STATES[name], name, f"quant_type must be {_STATES[name]}", repr(kind))
    shape = state.get("shape")
    two = isinstance(shape, list) and len(shape) == 2
    layer.require(two, name, "shape must be two sizes [N, K]", repr(shape))
    assert isinstance(shape, list)
    n, k = (_size(layer, name, "shape", v) for v in shape)
    return state, (n, k), _size(layer, name, "blocksize", state.get("blocksize"))


def _size(layer: Layer, name: str, key: str, value: Any) -> int:
    try:
        return whole_number(value, key, 1)
    except WeightFormatError as error:
        raise WeightFormatError(f"{layer.field(name)}: {error}") from None


def _absmax(layer: Layer, state_name: str, state: Mapping[str, Any], blocks: int) -> Tensor:
    """float32 ``[blocks]``."""
    nested = "nested_blocksize" in state
    stored = layer.take("weight.absmax", (torch.uint8 if nested else torch.float32,), 1)
    layer.shape("weight.absmax", stored, (blocks,), "[ceil(N*K/blocksize)]")
    if not nested:
        return stored
    size = _size(layer, state_name, "nested_blocksize", state["nested_blocksize"])
    second = layer.take("weight.nested_absmax", (torch.float32,), 1)
    layer.shape("weight.nested_absmax", second, (-(-blocks // size),), "[ceil(blocks/nested_blocksize)]")
    table = layer.take("weight.nested_quant_map", (torch.float32,), 1)
    layer.shape("weight.nested_quant_map", table, (256,), "[256]")
    offset = state.get("nested_offset")
    is_number = isinstance(offset, int | float) and not isinstance(offset, bool)
    layer.require(is_number, state_name, "nested_offset must be a number", repr(offset))
    assert isinstance(offset, int | float)
    if stored.is_meta:
        return torch.empty(blocks, device="meta")
    value = table[stored.int()]
    value *= second.repeat_interleave(size)[:blocks]
    value += torch.tensor(offset, dtype=torch.float32, device=value.device)
    return value


def _words(packed: Tensor, n: int, k: int) -> Tensor:
    if k % 2 == 0:
        return words_from_rows(packed.view(n, k // 2), _swap)
    codes = torch.stack([packed >> 4, packed & 15], -1).view(-1)
    return bitstream.pack(codes[: n * k].view(n, k).t(), 4)


def _swap(packed: Tensor) -> Tensor:
    """Nibbles exchanged."""
    return packed << 4 | packed >> 4


def _int8(layer: Layer) -> QuantizedWeight:
    weight = layer.take("weight", (torch.int8,), 2)
    n, k = weight.shape
    largest = layer.take("SCB", (torch.float32,))
    layer.shape("SCB", largest, (n,), "[N]")
    layout = layer.get("weight_format")
    if layout is not None:
        layout = layer.take("weight_format", (torch.uint8,))
        row = layout.numel() == 1 and (not has_values(layout) or int(layout) == 0)
        layer.require(
            row, "weight_format", "must be 0 (row-major)", layout.tolist() if has_values(layout) else layout
        )
    return layer.build(
        words_from_rows(weight.contiguous().view(torch.uint8), lambda part: part ^ 128),
        largest.view(1, n),
        bits=8,
        group_size=k,
        in_features=k,
        scale2=torch.tensor([_INT8_FACTOR], dtype=torch.float32, device=weight.device),
    )


def to_tensors(
    w: QuantizedWeight,
    *,
    blocksize: int | None = None,
    dtype: torch.dtype = torch.float16,
    storage: torch.dtype = torch.uint8,
) -> dict[str, Tensor]:
    """Weight -> tensors by suffix, with no loss: NF4 or FP4 with plain absmax, or int8 where it came from there.

    Args:
        w: the weight.
        blocksize: None takes the one of bitsandbytes' that needs the fewest absmax.
        dtype: what the quant_state says the weight was in (4 bits): float16, bfloat16 or float32.
        storage: dtype that the packed bytes are shown as (4 bits; bitsandbytes' quant_storage).

    Raises:
        WeightFormatError: bitsandbytes cannot hold this weight; says which field and why.

    Example:
        >>> import torch, qmm
        >>> from qmm.formats import bitsandbytes
        >>> values = torch.tensor(bitsandbytes.CODEBOOKS["nf4"])
        >>> codes, scales = torch.randint(0, 16, (64, 8)), torch.ones(1, 8)
        >>> w = qmm.QuantizedWeight.from_codes(codes, scales, bits=4, group_size=64, codebook=values)
        >>> sorted(bitsandbytes.to_tensors(w))
        ['weight', 'weight.absmax', 'weight.quant_map', 'weight.quant_state.bitsandbytes__nf4']
    """
    require(w.g_idx is None, "g_idx", "must be absent for bitsandbytes", "act-order")
    if w.bits == 8 and w.codebook is None:
        return _write_int8(w)
    require(w.bits == 4 and w.codebook is not None, "codebook", "must be nf4's or fp4's", f"bits={w.bits}")
    assert w.codebook is not None
    values = w.codebook.float().cpu()
    kind = next((k for k, v in CODEBOOKS.items() if torch.equal(values, values.new_tensor(v))), None)
    if kind is None:
        raise WeightFormatError("codebook: must be nf4's or fp4's; got another")
    require(w.scale2 is None, "scale2", "must be absent for 4 bits", "a second level")
    name = next((name for name, d in _DTYPES.items() if d == dtype), None)
    require(name is not None, "dtype", f"must be one of {', '.join(_DTYPES)}", dtype_name(dtype))
    k, n = w.shape
    block, absmax = _blocks(w, blocksize)
    state = {"quant_type": kind, "blocksize": block, "dtype": name, "shape": [n, k]}
    if k % 2 == 0:
        packed = _swap(rows_from_words(w.qweight, k // 2))
    else:
        zero = CODEBOOKS[kind].index(0.0)  # what the odd nibble at the end holds
        codes = torch.nn.functional.pad(w.unpack().t().reshape(-1), (0, n * k % 2), value=zero).view(-1, 2)
        packed = codes[:, 0] << 4 | codes[:, 1]
    packed = packed.reshape(-1)
    require(storage in _STORAGE, "storage", f"must be one of {', '.join(map(dtype_name, _STORAGE))}", storage)
    rule = f"must have elements that divide the {packed.numel()} bytes"
    require(packed.numel() % storage.itemsize == 0, "storage", rule, dtype_name(storage))
    return {
        "weight": packed.view(storage).view(-1, 1),
        "weight.absmax": absmax,
        "weight.quant_map": w.codebook.float().clone(),
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8, device="cpu"
        ),
    }


def _blocks(w: QuantizedWeight, wanted: int | None) -> tuple[int, Tensor]:
    """A blocksize that holds the scales, and float32 absmax ``[ceil(N*K/blocksize)]``."""
    k, n = w.shape
    group = min(w.group_size, k)
    require(k % group == 0, "group_size", f"must divide K={k} for bitsandbytes", group)
    scales = turned(w.scales.float())  # [N, G]
    sizes = BLOCK_SIZES if wanted is None else (whole_number(wanted, "blocksize", 1),)
    starts = torch.arange(n * k // group, device=scales.device) * group
    best: tuple[int, Tensor] | None = None
    for size in sizes:
        if size % group:
            continue
        block = starts // size
        absmax = scales.new_zeros(-(-n * k // size))
        absmax[block] = scales.view(-1)
        same = torch.equal(absmax[block].view(torch.int32), scales.view(-1).view(torch.int32))
        if same and (best is None or len(absmax) < len(best[1])):
            best = size, absmax
    if best is not None:
        return best
    raise WeightFormatError(
        f"blocksize: must be one of {', '.join(map(str, sizes))}, with one scale a block of the flat weight; "
        f"got groups of {group} in rows of {k}"
    )


def _write_int8(w: QuantizedWeight) -> dict[str, Tensor]:
    k, n = w.shape
    require(w.zero_kind is ZeroKind.NONE, "zeros", "must be absent for int8", f"zero kind {w.zero_kind}")
    require(w.spec.groups == 1, "group_size", f"must be K={k} for int8", w.group_size)
    require(w.scales.dtype == torch.float32, "scales", "dtype must be float32 for int8", w.scales.dtype)
    factor = torch.tensor([_INT8_FACTOR], dtype=torch.float32, device="cpu")
    ok = w.scale2 is not None and not w.spec.scale2_divides and torch.equal(w.scale2.cpu(), factor)
    require(ok, "scale2", "must be 1/127 for int8 (other scales would be rounded)", w.scale2)
    return {
        "weight": (rows_from_words(w.qweight, k) ^ 128).view(torch.int8),
        "SCB": w.scales.reshape(n).clone(),
        "weight_format": torch.tensor(0, dtype=torch.uint8, device="cpu"),
    }
