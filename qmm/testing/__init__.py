"""The conformance kit: cases, inputs, an independent oracle, the numerics contract and the suite itself.

Any backend, inside or outside this repository, is held to :class:`ConformanceSuite`. See docs/add-a-backend.md.
The oracle here is numpy and float64, bit by bit; it shares no code with any backend.
"""

from qmm.testing.cases import CASES, EXACT_CASES, LARGE_CASES, Case, Inputs, make_inputs, make_weight
from qmm.testing.gaps import apply_known_gaps
from qmm.testing.numerics import Reference, assert_close, assert_exact, assert_rms, reference, worst_ratio
from qmm.testing.poison import Canary, carve, carve_rows, carve_weight
from qmm.testing.targets import Target, targets

__all__ = [
    "CASES",
    "EXACT_CASES",
    "LARGE_CASES",
    "Canary",
    "Case",
    "ConformanceSuite",
    "Inputs",
    "Reference",
    "Target",
    "apply_known_gaps",
    "assert_close",
    "assert_exact",
    "assert_rms",
    "carve",
    "carve_rows",
    "carve_weight",
    "make_inputs",
    "make_weight",
    "reference",
    "targets",
    "worst_ratio",
]


def __getattr__(name: str) -> object:
    if name == "ConformanceSuite":  # needs pytest, which the rest of the kit does not
        from qmm.testing.suite import ConformanceSuite

        return ConformanceSuite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
