r"""GPTQ configs whose ``dynamic`` gives some layers other settings, as gptqmodel writes and reads it.

``{"+:.*\.18\..*down.*": {"bits": 8}, "-:.*gate.*": {}}``: the first regular expression that matches the beginning
of a layer's name gives that layer its settings; ``-:`` means that the layer was not quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qmm.errors import WeightFormatError
from qmm.formats.expressions import expression
from qmm.weight.validate import require


def settings_of(config: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """The config of one layer.

    Raises:
        WeightFormatError: ``dynamic`` is no mapping of patterns to settings, has a pattern that is no
            expression (see :mod:`qmm.formats.expressions`), or says that this layer is not quantised.
    """
    dynamic = config.get("dynamic")
    if not dynamic:
        return config
    require(isinstance(dynamic, Mapping), "dynamic", "must be a mapping", type(dynamic).__name__)
    for pattern, settings in dynamic.items():
        if not _matches(str(pattern).removeprefix("+:").removeprefix("-:"), layer):
            continue
        quantised = not str(pattern).startswith("-:")
        require(quantised, "dynamic", "must not call a layer unquantised that has a qweight", repr(pattern))
        rule = f"must give a mapping for {pattern!r}"
        require(isinstance(settings, Mapping), "dynamic", rule, type(settings).__name__)
        return {**config, **settings}
    return config


def _matches(pattern: str, layer: str) -> bool:
    try:
        return expression(pattern).match(layer)
    except WeightFormatError as error:
        raise WeightFormatError(f"dynamic: {error}") from None
