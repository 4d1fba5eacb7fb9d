"""The canonical quantised weight: one layout-neutral form that every format fills and every backend reads."""

from qmm.weight.quantized_weight import QuantizedWeight
from qmm.weight.spec import WeightSpec, ZeroKind
from qmm.weight.tensors import WeightTensors

__all__ = ["QuantizedWeight", "WeightSpec", "WeightTensors", "ZeroKind"]
