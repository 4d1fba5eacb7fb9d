"""Hypothesis profiles: ``quick`` (CI, derandomised) and ``long`` (many seeds, a time limit of its own)."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings

_COMMON: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("quick", derandomize=True, max_examples=15, **_COMMON)
settings.register_profile(
    "long", phases=(Phase.generate, Phase.shrink), report_multiple_bugs=False, **_COMMON
)


def quick() -> settings:
    """A few calls."""
    return settings.get_profile("quick")


def long(examples: int) -> settings:
    """So many calls of one variant."""
    return settings(settings.get_profile("long"), max_examples=examples)
