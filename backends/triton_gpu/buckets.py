"""Eight buckets of M: a configuration depends on the bucket and never on M, so that nothing is compiled for a new M.

Up to 64 rows there are three of them. With the reduction of a split that makes at most four compiled kernels for
M = 1..64 on one weight.
"""

from __future__ import annotations

BOUNDS = (16, 32, 64, 128, 256, 512, 1024)
_OPEN = 4096  # rows that stand for all M past the last bound


def representative(m: int) -> int:
    """The number of rows that stands for the bucket of ``m``: the largest in it, 4096 in the last one."""
    return next((bound for bound in BOUNDS if m <= bound), _OPEN)


def bucket_name(m: int) -> str:
    """The bucket of ``m`` as text: ``"m<=16"``, or ``"m>1024"``."""
    return next((f"m<={bound}" for bound in BOUNDS if m <= bound), f"m>{BOUNDS[-1]}")
