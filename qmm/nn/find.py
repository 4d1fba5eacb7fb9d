"""Which layers of a model are to be converted, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from qmm.nn.module import QuantModule

# These hand their layers' .weight to a function of torch, past the layer's forward.
_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class Found:
    """Modules that share one floating matrix.

    Attributes:
        names: every place in the model.
        modules: by those names.
    """

    names: list[str] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Names for messages and reports."""
        return ", ".join(self.names)


def find(
    model: nn.Module, modules: str | Sequence[str] | None, skip: str | Sequence[str], embeddings: bool
) -> tuple[list[Found], dict[str, str]]:
    """Matrices to convert, and ``{name: reason}`` of linear layers that are left alone.

    Raises:
        TypeError: the model is no module, or a layer itself.
        ValueError: a pattern that matches no layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: must be an nn.Module; got {type(model).__name__}")
    if isinstance(model, (nn.Linear, nn.Embedding)):
        raise TypeError(
            f"model: must contain the layers, to be replaced in place; got an {type(model).__name__} itself "
            "(use QuantLinear.from_linear)"
        )
    kinds = (nn.Linear, nn.Embedding) if embeddings else (nn.Linear,)
    every = dict(model.named_modules(remove_duplicate=False))
    layers = {n: m for n, m in every.items() if isinstance(m, kinds) and not isinstance(m, QuantModule)}
    wanted = None if modules is None else _matched(modules, "modules", layers)
    out = _matched(skip, "skip", layers)
    owners: dict[int, list[str]] = {}
    for name, module in every.items():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(name)
    found: dict[int, Found] = {}
    skipped: dict[str, str] = {}
    for name, module in layers.items():
        if wanted is not None and name not in wanted:
            continue
        reason = "asked for by skip=" if name in out else _why_not(every, name, module)
        if reason is None:
            weight = id(module.weight)
            others = [n for n in owners[weight] if n not in layers or n in out]
            reason = f"its weight is tied to {', '.join(others)}" if others else None
            if reason is None:
                mine = found.setdefault(weight, Found())
                mine.names.append(name)
                mine.modules.append(module)
        if reason is not None:
            skipped[name] = reason
    return list(found.values()), skipped


def _why_not(every: Mapping[str, nn.Module], name: str, module: nn.Module) -> str | None:
    if type(module) not in (nn.Linear, nn.Embedding):
        return f"a kind of its own, {type(module).__name__}, which may do more than a plain layer"
    parent = every[name.rpartition(".")[0]]
    if isinstance(parent, _READS_WEIGHTS):
        return f"{type(parent).__name__} reads its weight, past its forward"
    if module._parameters.get("weight") is None:
        return "its weight is no parameter of its own (weight norm, or another rewriting)"
    if "forward" in module.__dict__:
        return "its forward is replaced by another"
    if any(getattr(module, hooks, None) for hooks in _HOOKS):
        return "it has hooks, which would be lost"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "it renormalises its rows in place"
    if module._parameters["weight"].numel() == 0:  # type: ignore[union-attr]
        return "it is empty"
    return None


def _matched(patterns: str | Sequence[str], argument: str, layers: Iterable[str]) -> set[str]:
    """Names that match one of the ``fnmatch`` patterns, each of which must match one."""
    names = list(layers)
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        mine = {name for name in names if fnmatchcase(name, pattern)}
        if not mine:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            there = shown or "there is none"
            raise ValueError(f"{argument}: every pattern must match a layer ({there}); got {pattern!r}")
        found |= mine
    return found
