"""Scales of compressed-tensors and fp8 files, by what shares one, to canonical ``[G, N]`` and back.

=========  ==============================  =============================================================
strategy   in the file                     here
=========  ==============================  =============================================================
tensor     ``[]``, ``[1]`` or ``[1, 1]``   ``[1, N]``, repeated
channel    ``[N, 1]`` or ``[N]``           ``[1, N]``
group      ``[N, ceil(K/g)]``              ``[ceil(K/g), N]``
block      ``[ceil(N/bn), ceil(K/bk)]``    ``[ceil(K/bk), N]``, each row repeated bn times along N
=========  ==============================  =============================================================
"""

from __future__ import annotations

import torch
from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.formats.ct_scheme import Scheme
from qmm.formats.layer import Layer
from qmm.formats.rows import turned


def group_values(
    layer: Layer, suffix: str, t: Tensor, scheme: Scheme, shape: tuple[int, int]
) -> tuple[Tensor, int]:
    """Values ``[G, N]``, one a group of each column, and the group size.

    Args:
        layer: for messages.
        suffix: name of the tensor.
        t: scales or zero points as in the file.
        scheme: strategy, group size, block.
        shape: ``(N, K)`` of the weight.

    Raises:
        WeightFormatError: the shape does not fit the strategy.
    """
    n, k = shape
    strategy = scheme.strategy or _strategy_of(t, scheme)
    if strategy == "tensor":
        layer.require(t.numel() == 1, suffix, "must have one value for strategy tensor", list(t.shape))
        return _repeated(t.reshape(1, 1), n), k
    if strategy == "channel":
        right = tuple(t.shape) in ((n, 1), (n,))
        layer.require(right, suffix, f"shape must be [N, 1] = [{n}, 1] for strategy channel", list(t.shape))
        return t.reshape(1, n).contiguous(), k
    if strategy == "block":
        assert scheme.block is not None
        bn, bk = scheme.block
        layer.shape(suffix, t, (-(-n // bn), -(-k // bk)), f"[ceil(N/{bn}), ceil(K/{bk})]")
        return _repeated(turned(t), bn)[:, :n].contiguous(), bk
    size = scheme.group_size or k
    layer.shape(suffix, t, (n, -(-k // size)), f"[N, ceil(K/{size})]")
    return turned(t), size


def _strategy_of(t: Tensor, scheme: Scheme) -> str:
    if scheme.block is not None:
        return "block"
    return "tensor" if t.numel() == 1 else "channel"


def _repeated(t: Tensor, times: int) -> Tensor:
    """Each column ``times`` times; any dtype."""
    if t.is_floating_point() and t.element_size() == 1:
        return t.view(torch.uint8).repeat_interleave(times, 1).view(t.dtype)
    return t.repeat_interleave(times, 1)


def file_values(
    values: Tensor, strategy: str, block: tuple[int, int] | None, one: tuple[int, ...] = (1,)
) -> Tensor:
    """The inverse: ``[G, N]`` as the file has it.

    Args:
        values: scales or zero points ``[G, N]``.
        strategy: as in the table above.
        block: ``(N, K)`` of a block.
        one: shape of the one value of strategy tensor.

    Raises:
        WeightFormatError: values that the strategy shares differ.
    """
    n = values.shape[1]
    if strategy not in ("tensor", "block"):
        return turned(values)
    width = n if strategy == "tensor" or block is None else block[0]
    whole = values.view(torch.uint8) if values.element_size() == 1 else values
    first = whole[:, torch.arange(0, n, width, device=whole.device)]  # a copy with plain strides
    same = _repeated(first, width)[:, :n]
    # by bytes, so that NaN equals itself and -0 is not 0
    if not torch.equal(same.contiguous().view(torch.uint8), whole.contiguous().view(torch.uint8)):
        raise WeightFormatError(
            f"scales: must be equal over {width} columns for strategy {strategy}; got some that differ"
        )
    out = first.view(values.dtype)
    return out.reshape(one) if strategy == "tensor" else turned(out)


def default_strategy(group_size: int, in_features: int) -> str:
    """``channel`` for one group, else ``group``."""
    return "channel" if group_size >= in_features else "group"
