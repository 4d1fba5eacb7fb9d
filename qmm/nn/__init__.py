"""Modules that multiply by quantised weights, and the conversion of a model to them."""

from qmm.nn.convert import convert
from qmm.nn.embedding import QuantEmbedding
from qmm.nn.linear import QuantLinear
from qmm.nn.merge import merge, unmerge
from qmm.nn.report import ConvertedLayer, ConvertReport

__all__ = [
    "ConvertReport",
    "ConvertedLayer",
    "QuantEmbedding",
    "QuantLinear",
    "convert",
    "merge",
    "unmerge",
]
