r"""GPTQ configs whose ``dynamic`` gives some layers other settings, as gptqmodel writes and reads it.

``{"+:.*\.18\..*down.*": {"bits": 8}, "-:.*gate.*": {}}``: the first regular expression that matches the beginning
of a layer's name gives that layer its settings; ``-:`` means that the layer was not quantised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from qmm.errors import WeightFormatError
from qmm.weight.validate import require

_LONGEST, _REPEATS = 400, 5


def settings_of(config: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """The config of one layer.

    Raises:
        WeightFormatError: ``dynamic`` is no mapping of patterns to settings, has a pattern that may take very long to
            match (a config is not trusted), or says that this layer is not quantised.
    """
    dynamic = config.get("dynamic")
    if not dynamic:
        return config
    require(isinstance(dynamic, Mapping), "dynamic", "must be a mapping", type(dynamic).__name__)
    for pattern, settings in dynamic.items():
        expression = _compiled(str(pattern).removeprefix("+:").removeprefix("-:"))
        if expression.match(layer) is None:
            continue
        quantised = not str(pattern).startswith("-:")
        require(quantised, "dynamic", "must not call a layer unquantised that has a qweight", repr(pattern))
        rule = f"must give a mapping for {pattern!r}"
        require(isinstance(settings, Mapping), "dynamic", rule, type(settings).__name__)
        return {**config, **settings}
    return config


def _compiled(pattern: str) -> re.Pattern[str]:
    """Repeats nest in no pattern that is let through, and are few: matching takes little time on any name."""
    plain = re.sub(r"\\.", "", pattern)
    repeats = sum(plain.count(c) for c in "*+?{")
    safe = len(pattern) <= _LONGEST and repeats <= _REPEATS and "(?" not in plain
    safe = safe and re.search(r"\)[*+?{]", plain) is None and re.search(r"\\\d", pattern) is None
    rule = f"patterns must have at most {_LONGEST} characters and {_REPEATS} repeats, none of a group"
    require(safe, "dynamic", rule, repr(pattern[:100]))
    try:
        return re.compile(pattern)
    except re.error as error:
        raise WeightFormatError(
            f"dynamic: must hold regular expressions; got {pattern[:100]!r} ({error})"
        ) from None
