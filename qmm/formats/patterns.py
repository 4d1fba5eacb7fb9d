"""Names of layers against the patterns of a config, in time that a file cannot make long."""

from __future__ import annotations

from qmm.errors import WeightFormatError
from qmm.formats.expressions import expression


def matches(pattern: str, layer: str) -> bool:
    """Whether a pattern of a config's lists means ``layer``.

    A name means the module, and all under it, wherever it stands. A glob means the whole name, a ``re:`` pattern its
    beginning (as ``re.match`` has it, which the libraries use). An expression that :mod:`qmm.formats.expressions` does
    not take means nothing here.
    """
    if pattern.startswith("re:"):
        try:
            return expression(pattern.removeprefix("re:")).match(layer)
        except WeightFormatError:
            return False
    if "*" not in pattern:
        return f".{pattern}." in f".{layer}."
    first, *middle, last = pattern.split("*")
    at = len(first)
    for part in middle:
        at = layer.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return layer.startswith(first) and layer.endswith(last) and len(layer) - len(last) >= at
