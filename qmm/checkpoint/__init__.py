"""Checkpoints: quantised models read from files, layer by layer, and written to them."""

from qmm.checkpoint.checkpoint import Checkpoint, LayerFacts
from qmm.checkpoint.opening import load
from qmm.checkpoint.saving import save

__all__ = ["Checkpoint", "LayerFacts", "load", "save"]
