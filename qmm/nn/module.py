"""What the modules here have in common: a held weight, seen from outside as plain buffers and a state_dict."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qmm.errors import WeightFormatError
from qmm.nn.held import HeldWeight
from qmm.weight import QuantizedWeight, WeightTensors
from qmm.weight.facts import has_values

_FIELDS = (*WeightTensors._fields, "facts")
_NEEDED = ("qweight", "scales", "facts")


class QuantModule(nn.Module):
    """A module around one quantised weight W ``[K, N]``.

    - Its tensors are buffers: plain, contiguous, no two in one storage. Where the weight is released to a backend's
      layout (on a GPU) those of the layout are, since they are what is in memory.
    - Its state_dict has the canonical tensors and ``facts``, whatever layout is in memory. ``load_state_dict`` copies
      into the memory there is (captured graphs see it) where the facts agree; with ``assign=True`` it takes the tensors
      over, and facts other than K and N may differ.
    - ``.to(device)`` moves the weight. No cast touches it: codes, scales and zero points keep their dtypes, since
      another dtype would be another weight.
    """

    _held: HeldWeight
    _is_hf_initialized = True  # transformers draws no random weights for it

    @property
    def weight(self) -> QuantizedWeight:
        """W, of shape ``(K, N)``: the transpose of ``nn.Linear.weight``."""
        return self._held.weight

    @weight.setter
    def weight(self, value: QuantizedWeight) -> None:
        if not isinstance(value, QuantizedWeight):
            raise TypeError(f"weight: must be a qmm.QuantizedWeight; got {type(value).__name__}")
        if value.shape != self.weight.shape:
            raise ValueError(f"weight: shape must be (K, N) = {self.weight.shape}; got {value.shape}")
        self._held.set(value)
        self._show()

    def _hold(self, held: HeldWeight) -> None:
        self._held = held
        self._show()

    def _show(self) -> None:
        """Register what the weight has in memory now."""
        self._hide()
        for name, t in self._held.buffers().items():
            self.register_buffer(name, t, persistent=False)  # saving goes by the canonical form

    def _hide(self) -> None:
        for name in list(self._buffers):
            del self._buffers[name]
        self._non_persistent_buffers_set.clear()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._hide()
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            self._held.apply(fn)
        finally:
            self._show()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update(self.weight.state_dict(prefix))

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        mine = {key: state_dict[prefix + key] for key in _FIELDS if prefix + key in state_dict}
        known = {prefix + key for key in mine}
        unexpected_keys[:] = [key for key in unexpected_keys if key not in known]
        missing = [prefix + key for key in _NEEDED if key not in mine]
        if missing:  # a weight is loaded whole or not at all
            missing_keys += missing
            return
        assign = local_metadata.get("assign_to_params_buffers", False)
        try:
            self._load(QuantizedWeight.from_state_dict(mine), assign, prefix)
        except (WeightFormatError, TypeError) as error:
            error_msgs.append(f"{prefix.removesuffix('.')}: {error}")

    def _load(self, new: QuantizedWeight, assign: bool, prefix: str) -> None:
        own = self.weight
        if new.shape != own.shape:
            raise WeightFormatError(f"weight: shape must be (K, N) = {own.shape}; got {new.shape}")
        if assign:
            self._held.set(new)
            self._show()
        elif own.device.type == "meta" and has_values(new.qweight):
            warnings.warn(
                f"{prefix}qweight: copying into a meta tensor does nothing; pass assign=True to take the tensors over",
                stacklevel=2,
            )
        else:
            own.copy_(new.to(own.device))

    def __getstate__(self) -> dict[str, Any]:
        """Without the buffers, which the weight has as well."""
        return {**self.__dict__, "_buffers": {}, "_non_persistent_buffers_set": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._held.prepare()
        self._show()

    def _facts(self) -> str:
        """For ``extra_repr``."""
        text = repr(self.weight)
        return text[text.index("(") + 1 : -1]


def device_of(device: Any) -> torch.device:
    """What torch makes of ``device``; None means the default device."""
    return torch.empty(0, device=device).device
