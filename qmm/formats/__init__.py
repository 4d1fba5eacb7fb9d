"""Checkpoint formats, one module each: any quantised checkpoint in, QuantizedWeight out."""
