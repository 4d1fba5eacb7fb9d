"""How times are taken, everywhere in this project: by ``qmm bench``, by ``bench/`` and by tuning.

On a GPU a call's weights are cold: a ring of copies larger than three times L2, one CUDA graph that makes the call once
for each copy, the median of its replays after an idle. What is compared is timed in turn inside one process, in an
order that rotates. Without a GPU it is plain wall time, and a ring of one.
"""

from qmm.timing.clock import CLOCK, Sampler, Taken, alternate, host_seconds, ring_size, sampler
from qmm.timing.contest import Failed, Measured, contest
from qmm.timing.contestant import Contestant, Dense, Quantised
from qmm.timing.problem import Problem
from qmm.timing.results import Point, Results
from qmm.timing.roof import Roof, known_roof, measure_roof

__all__ = [
    "CLOCK",
    "Contestant",
    "Dense",
    "Failed",
    "Measured",
    "Point",
    "Problem",
    "Quantised",
    "Results",
    "Roof",
    "Sampler",
    "Taken",
    "alternate",
    "contest",
    "host_seconds",
    "known_roof",
    "measure_roof",
    "ring_size",
    "sampler",
]
