"""Values of options that several commands take."""

from __future__ import annotations

import enum


class Dtype(str, enum.Enum):
    """Dtypes of A that every kernel takes."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Zeros(str, enum.Enum):
    """Kinds of zero points."""

    NONE = "none"
    INT = "int"
    FLOAT = "float"
    BIAS = "bias"


class Activation(str, enum.Enum):
    """Activations in the epilogue."""

    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"


class Deterministic(str, enum.Enum):
    """How far equal calls give equal bits."""

    TRUE = "true"
    FALSE = "false"
    BATCH = "batch"

    @property
    def value_of(self) -> bool | str:
        """As ``qmm.matmul`` takes it."""
        return "batch" if self is Deterministic.BATCH else self is Deterministic.TRUE
