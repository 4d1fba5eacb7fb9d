"""What a conversion did, as data and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qmm.weight import WeightSpec
from qmm.weight.spec import ZeroKind


@dataclass(frozen=True)
class ConvertedLayer:
    """One matrix that is quantised now.

    Attributes:
        name: of the module; tied modules stand in one entry, ``"a, b"``.
        spec: facts of the weight.
        bytes_before: of the floating weight.
        bytes_after: of the quantised one, canonical.
        error: ``|W - W'| / |W|``, Frobenius norms.

    Example:
        >>> import torch, qmm
        >>> (layer,) = qmm.nn.convert(torch.nn.Sequential(torch.nn.Linear(64, 8)), group_size=32).layers
        >>> layer.name, layer.spec.bits
        ('0', 4)
    """

    name: str
    spec: WeightSpec
    bytes_before: int
    bytes_after: int
    error: float


@dataclass(frozen=True)
class ConvertReport:
    """The answer of :func:`qmm.nn.convert`; ``str()`` is a table.

    Attributes:
        layers: what was converted.
        skipped: ``{name: reason}`` of linear layers that were left as they are.
        merged: names of merged layers, see :func:`qmm.nn.merge`.

    Example:
        >>> import torch, qmm
        >>> report = qmm.nn.convert(torch.nn.Sequential(torch.nn.Linear(64, 8)), group_size=32)
        >>> len(report.layers), report.bytes_before, report.bytes_after, report.worst_error < 0.2
        (1, 2048, 288, True)
    """

    layers: tuple[ConvertedLayer, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    merged: tuple[str, ...] = ()

    @property
    def bytes_before(self) -> int:
        """Of all converted layers."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Of all converted layers."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def worst_error(self) -> float:
        """The largest ``error`` of a layer; 0 without layers."""
        return max((layer.error for layer in self.layers), default=0.0)

    def __str__(self) -> str:
        rows = [("layer", "K", "N", "weight", "MB before", "after", "relative error")]
        for layer in self.layers:
            s = layer.spec
            kind = f"int{s.bits} group {s.group_size}" + (
                "" if s.zero_kind is ZeroKind.NONE else f" zeros {s.zero_kind}"
            )
            rows.append(
                (
                    layer.name, str(s.in_features), str(s.out_features), kind,
                    f"{layer.bytes_before / 1e6:.2f}", f"{layer.bytes_after / 1e6:.2f}", f"{layer.error:.4f}",
                )
            )  # fmt: skip
        total = (f"{self.bytes_before / 1e6:.2f}", f"{self.bytes_after / 1e6:.2f}", f"{self.worst_error:.4f}")
        rows.append((f"{len(self.layers)} layers", "", "", "", *total))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        left = (0, 3)
        lines = [
            "  ".join(
                c.ljust(w) if i in left else c.rjust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        lines += [f"merged: {name}" for name in self.merged]
        lines += [f"left as it is: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(line.rstrip() for line in lines)
