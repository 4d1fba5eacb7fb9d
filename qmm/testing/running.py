"""Running one call on one target; a refusal is asserted, never passed over in silence."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import qmm
from qmm.call import make_call
from qmm.testing.targets import Target
from qmm.weight import QuantizedWeight


def run(target: Target, a: Tensor, w: QuantizedWeight, **options: Any) -> Tensor:
    """``qmm.matmul`` on the target's kernel; a refused call must raise with the reasons that ``why_not`` gives."""
    backend = qmm.backends()[target.backend]
    facts = {k: v for k, v in options.items() if k in ("bias", "activation", "out", "deterministic")}
    kernel = next(k for k in backend.kernels if k.name == target.kernel)
    reasons = backend.why_not(make_call(a, w, **facts), kernel)
    if reasons:
        with pytest.raises(qmm.UnsupportedError) as caught:
            qmm.matmul(a, w, backend=target.backend, kernel=target.kernel, **options)
        assert caught.value.reasons[target.backend] == reasons
        pytest.skip(f"refused, and rightly said so: {reasons[0]}")
    return qmm.matmul(a, w, backend=target.backend, kernel=target.kernel, **options)
