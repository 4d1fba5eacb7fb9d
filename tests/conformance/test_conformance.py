"""The conformance suite over every backend that is usable here."""

from __future__ import annotations

from qmm.testing import ConformanceSuite


class TestConformance(ConformanceSuite):
    """Every kernel of every backend, on every kind of device present."""
