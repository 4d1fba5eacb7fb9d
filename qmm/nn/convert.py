"""convert: the linear layers of a model, quantised and replaced in place, all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from qmm.nn.embedding import QuantEmbedding
from qmm.nn.find import Found, find
from qmm.nn.held import HeldWeight
from qmm.nn.linear import QuantLinear, as_bias
from qmm.nn.merge import merge as merge_layers
from qmm.nn.report import ConvertedLayer, ConvertReport
from qmm.quantize import quantize
from qmm.registry import AUTO
from qmm.weight import QuantizedWeight
from qmm.weight.dequantize import dequantize_columns
from qmm.weight.facts import has_values

Progress = Callable[[int, int, str], object]
_CODES_AT_ONCE = 1 << 22


@torch.no_grad()
def convert(
    model: nn.Module,
    bits: int = 4,
    group_size: int = 128,
    *,
    skip: str | Sequence[str] = (),
    modules: str | Sequence[str] | None = None,
    symmetric: bool = True,
    method: str = "minmax",
    scale_dtype: torch.dtype | None = None,
    embeddings: int | None = None,
    merge: bool | Sequence[Sequence[str]] = False,
    backend: str = AUTO,
    progress: bool | Progress = False,
) -> ConvertReport:
    """Replace ``nn.Linear`` layers by :class:`QuantLinear`, in place.

    Every layer is quantised before the first is replaced: when one fails, the model is as it was. (So the floating and
    the quantised weights are in memory together for a while.)

    Args:
        model: any module that contains the layers.
        bits: bits of a code, see :func:`qmm.quantize`.
        group_size: rows of K that share a scale. Where it doesn't divide K, the last group is short; where K is
            smaller, the group is K.
        skip: ``fnmatch`` patterns of names to leave alone, e.g. ``"*.lm_head"``.
        modules: ``fnmatch`` patterns of names to convert; None means all.
        symmetric: as in :func:`qmm.quantize`.
        method: as in :func:`qmm.quantize`.
        scale_dtype: as in :func:`qmm.quantize`.
        embeddings: bits for ``nn.Embedding`` tables, which become :class:`QuantEmbedding`, and for output layers tied
            to one, which share its weight. None leaves both alone.
        merge: join layers that read the same input, see :func:`qmm.nn.merge`: True for q/k/v and gate/up, or groups
            of names.
        backend: for the new layers, as in :func:`qmm.matmul`.
        progress: called as ``progress(done, total, name)``; True shows a bar (needs tqdm).

    Returns:
        A :class:`ConvertReport`: layers, bytes before and after, errors, and which layers were left, with the reason.

    Raises:
        TypeError: ``model`` is no module, or a layer itself.
        ValueError: a pattern matches no layer, or a layer cannot be quantised (its name, the rule, the value).

    Example:
        >>> import torch, qmm.nn
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        >>> report = qmm.nn.convert(model, group_size=32, skip="2")
        >>> [layer.name for layer in report.layers], list(report.skipped)
        (['0'], ['2'])
    """
    found, skipped = find(model, modules, skip, embeddings is not None)
    tell = _teller(progress, len(found))
    weights: list[QuantizedWeight] = []
    layers: list[ConvertedLayer] = []
    for i, each in enumerate(found):
        weight = cast(Tensor, each.modules[0].weight)
        table = any(isinstance(m, nn.Embedding) for m in each.modules)
        try:
            if not has_values(weight):
                raise ValueError(f"weight: must hold values; got a tensor on {weight.device}")
            w = quantize(
                weight,
                bits=embeddings if table and embeddings is not None else bits,
                group_size=group_size,
                symmetric=symmetric,
                method=method,
                scale_dtype=scale_dtype,
            )
        except (TypeError, ValueError) as error:
            raise type(error)(f"{each.label}: {error}") from error
        weights.append(w)
        layers.append(ConvertedLayer(each.label, w.spec, weight.nbytes, w.nbytes, relative_error(weight, w)))
        tell(i + 1, len(found), each.label)
    for each, w in zip(found, weights, strict=True):
        _replace(model, each, w, backend)
    merged: tuple[str, ...] = ()
    if merge:
        joined = merge_layers(model, None if merge is True else merge)
        merged, skipped = tuple(joined.merged), skipped | joined.left
    return ConvertReport(tuple(layers), skipped, merged)


def relative_error(weight_nk: Tensor, w: QuantizedWeight) -> float:
    """``|W - W'| / |W|`` by Frobenius norms; 0 where W is 0. Some columns at a time."""
    t, step = w.tensors, max(1, _CODES_AT_ONCE // w.in_features)
    difference = total = torch.zeros((), dtype=torch.float64, device=w.device)
    for start in range(0, w.out_features, step):
        stop = min(w.out_features, start + step)
        exact = weight_nk[start:stop].float()
        got = dequantize_columns(t, w.spec, start, stop).t()
        difference = difference + (exact - got).square().sum(dtype=torch.float64)
        total = total + exact.square().sum(dtype=torch.float64)
    return float((difference / total).sqrt()) if float(total) > 0 else 0.0


def _replace(model: nn.Module, found: Found, w: QuantizedWeight, backend: str) -> None:
    """New modules around one weight in every place of the old ones."""
    table = any(isinstance(m, nn.Embedding) for m in found.modules)
    held = HeldWeight(w, backend, release=not table)
    new: dict[int, nn.Module] = {}  # one module may stand in several places
    for name, old in zip(found.names, found.modules, strict=True):
        if id(old) not in new:
            if isinstance(old, nn.Embedding):
                made: nn.Module = QuantEmbedding(held, old.weight.dtype, old.padding_idx)
            else:
                made = QuantLinear.__new__(QuantLinear)
                made._setup(held, as_bias(cast("Tensor | None", old.bias), w))
            new[id(old)] = made.train(old.training)
        put(model, name, new[id(old)])


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule ``name``."""
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent)._modules[child] = module


def _teller(progress: bool | Progress, total: int) -> Progress:
    if progress is False:
        return lambda done, total, name: None
    if progress is not True:
        return progress
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError("progress=True needs tqdm (pip install tqdm); or pass a function") from None
    bar = tqdm(total=total, unit="layer")

    def tell(done: int, total: int, name: str) -> None:
        bar.set_postfix_str(name, refresh=False)
        bar.update(1)
        if done == total:
            bar.close()

    return tell
