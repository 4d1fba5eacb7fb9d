"""Layers that read the same input (q/k/v, gate/up) as one product, exactly, without touching the model's code.

The parts stay where they are in the model; the first one called with an input computes the joint product, and the
others return their columns of it. Each part gives one answer for one product, so that a later call computes anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qmm.errors import WeightFormatError
from qmm.nn.linear import QuantLinear
from qmm.weight import QuantizedWeight

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass
class Merged:
    """What :func:`merge` did: names of the joint layers, and ``{name: reason}`` of groups that could not be joined."""

    merged: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


class MergedLinear(QuantLinear):
    """The joint layer: a :class:`QuantLinear` of all columns. Saved and loaded by its parts, under their names."""

    edges: tuple[int, ...]
    _now: tuple[Tensor, Tensor, frozenset[int], Any] | None

    @classmethod
    def of(cls, layers: Sequence[QuantLinear]) -> MergedLinear:
        """Join layers along N.

        Raises:
            WeightFormatError: one weight cannot hold them.
        """
        first = layers[0]
        w = QuantizedWeight.cat([layer.weight for layer in layers])
        bias = None
        if any(layer.bias is not None for layer in layers):
            dtype = next(layer.bias.dtype for layer in layers if layer.bias is not None)
            bias = torch.cat(
                [
                    torch.zeros(layer.out_features, dtype=dtype, device=w.device)
                    if layer.bias is None
                    else layer.bias.detach()
                    for layer in layers
                ]
            )
        whole = cls.from_weight(
            w, bias, backend=first.backend, activation=first.activation, deterministic=first.deterministic
        )
        assert isinstance(whole, MergedLinear)
        edges = [0]
        for layer in layers:
            edges.append(edges[-1] + layer.out_features)
        whole.edges, whole._now = tuple(edges), None
        if whole.bias is not None:
            whole.bias.requires_grad_(any(x.bias is not None and x.bias.requires_grad for x in layers))
        whole.train(first.training)
        return whole

    def columns(self, input: Tensor, part: int) -> Tensor:
        """Columns of one part for ``input``."""
        state = self._state_of(input)
        now = self._now
        if now is not None and now[0] is input and part in now[2] and now[3] == state:
            result, left = now[1], now[2] - {part}
        else:
            result, left = self(input), frozenset(range(len(self.edges) - 1)) - {part}
        self._now = (input, result, left, state) if left else None
        return result[..., self.edges[part] : self.edges[part + 1]]

    def _state_of(self, input: Tensor) -> Any:
        """What else decides the result."""
        if torch.compiler.is_compiling() or input.is_inference():
            return torch.is_grad_enabled()
        return (torch.is_grad_enabled(), input._version)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_now": None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing: the parts do."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Nothing: the parts do."""


class QuantLinearPart(nn.Module):
    """One of the layers that were joined. Saved as the layer that it was.

    Attributes:
        in_features: K.
        out_features: of this part.
    """

    def __init__(self, whole: MergedLinear, part: int, bias: bool) -> None:
        super().__init__()
        self._whole = (whole,)  # a tuple, so that it is no submodule: it stands in the model once
        self.part, self.has_bias = part, bias
        self.in_features = whole.in_features
        self.out_features = whole.edges[part + 1] - whole.edges[part]

    @property
    def _columns(self) -> slice:
        edges = self._whole[0].edges
        return slice(edges[self.part], edges[self.part + 1])

    @property
    def weight(self) -> QuantizedWeight:
        """A copy of this part's weight."""
        return self._whole[0].weight[:, self._columns]

    @property
    def bias(self) -> Tensor | None:
        """This part of the joint bias."""
        whole = self._whole[0].bias
        return whole[self._columns] if whole is not None and self.has_bias else None

    def forward(self, input: Tensor) -> Tensor:
        """``[..., K] -> [..., N]``: a view of the joint result."""
        return self._whole[0].columns(input, self.part)

    def split(self) -> QuantLinear:
        """The layer that this was before."""
        whole, bias = self._whole[0], self.bias
        layer = QuantLinear.from_weight(
            self.weight,
            None if bias is None else bias.detach().clone(),
            backend=whole.backend,
            activation=whole.activation,
            deterministic=whole.deterministic,
        )
        layer.train(self.training)
        return layer

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        bias = self.bias
        if bias is not None:
            destination[prefix + "bias"] = bias if keep_vars else bias.detach().clone()
        destination.update(self.weight.state_dict(prefix))

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        layer = self.split()  # knows how to load
        layer._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        whole = self._whole[0]
        edges, own = whole.edges, self.part
        parts = [
            layer.weight if i == own else whole.weight[:, a:b]
            for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False))
        ]
        try:
            whole.weight.copy_(QuantizedWeight.cat([w.to(whole.weight.device) for w in parts]))
        except WeightFormatError as error:
            error_msgs.append(f"{prefix.removesuffix('.')}: merged layers must stay alike: {error}")
        if layer.bias is not None and whole.bias is not None:
            with torch.no_grad():
                whole.bias[self._columns] = layer.bias.to(whole.bias.device)

    def extra_repr(self) -> str:
        """Size and place."""
        where = self._columns
        return f"in_features={self.in_features}, out_features={self.out_features}, columns={where.start}:{where.stop}"


def merge(model: nn.Module, groups: Sequence[Sequence[str]] | None = None) -> Merged:
    """Join :class:`QuantLinear` layers that stand side by side and read the same input, exactly.

    Args:
        model: changed in place.
        groups: names of children that belong together; None means ``q_proj, k_proj, v_proj`` and ``gate_proj,
            up_proj``.

    Returns:
        Which were joined, and which could not be, with the reason: their weights differ in a fact, or have hooks.

    The parts must be called with the same tensor object, one after the other, as models of transformers do; otherwise
    results are right but the whole product is computed for each. For inference: PEFT finds no layers in the parts
    (:func:`unmerge` brings them back). A state_dict has the same keys and values as before.

    Example:
        >>> import torch, qmm
        >>> block = torch.nn.Module()
        >>> block.gate_proj, block.up_proj = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8)
        >>> report = qmm.nn.convert(block, group_size=32)
        >>> qmm.nn.merge(block).merged
        ['gate_proj_and_up_proj']
    """
    done = Merged()
    for name, parent in list(model.named_modules()):
        for group in GROUPS if groups is None else groups:
            layers = [parent._modules.get(child) for child in group]
            if len(group) < 2 or not all(type(layer) is QuantLinear for layer in layers):
                continue
            mine = [layer for layer in layers if isinstance(layer, QuantLinear)]
            joint = "_and_".join(group)
            label = f"{name}.{joint}" if name else joint
            reason = _why_not(mine, hasattr(parent, joint))
            if reason is None:
                try:
                    whole = MergedLinear.of(mine)
                except WeightFormatError as error:
                    reason = str(error)
            if reason is not None:
                done.left[label] = reason
                continue
            parent.add_module(joint, whole)
            for i, (child, layer) in enumerate(zip(group, mine, strict=True)):
                parent._modules[child] = QuantLinearPart(whole, i, layer.bias is not None).train(
                    layer.training
                )
            done.merged.append(label)
    return done


def unmerge(model: nn.Module) -> nn.Module:
    """Undo :func:`merge`, in place: the layers are what they were.

    Example:
        >>> import torch, qmm
        >>> block = torch.nn.Module()
        >>> block.gate_proj, block.up_proj = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8)
        >>> report = qmm.nn.convert(block, group_size=32)
        >>> merged = qmm.nn.merge(block)
        >>> type(qmm.nn.unmerge(block).up_proj).__name__
        'QuantLinear'
    """
    for module in list(model.modules()):
        for child, layer in list(module._modules.items()):
            if isinstance(layer, QuantLinearPart):
                module._modules[child] = layer.split()
        for child, layer in list(module._modules.items()):
            if isinstance(layer, MergedLinear):
                del module._modules[child]
    return model


def _why_not(layers: Sequence[QuantLinear], taken: bool) -> str | None:
    if taken:
        return "the parent has an attribute of the joint layer's name"
    first = layers[0]
    for attribute in ("activation", "backend", "deterministic"):
        if any(getattr(layer, attribute) != getattr(first, attribute) for layer in layers):
            return f"they differ in {attribute}"
    if len({(layer.bias.dtype, layer.bias.requires_grad) for layer in layers if layer.bias is not None}) > 1:
        return "their biases differ in dtype or in whether they are trained"
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return "one has hooks, which would be lost"
    return None
