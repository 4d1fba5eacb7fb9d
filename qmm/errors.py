"""What qmm raises and warns with. Reasons are data, so that tests and programs match fields and not prose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """One reason why a kernel cannot take a call.

    Attributes:
        limit: the rule that is not met, e.g. ``"a.dtype in {float16, bfloat16, float32}"``.
        got: the value that broke it, e.g. ``"float64"``.
        fix: what would make the call possible, e.g. ``"cast a, or use backend='torch'"``; may be empty.
        kernel: the kernel concerned, or None where the whole backend is.

    Example:
        >>> from qmm import Reason
        >>> print(Reason("a.dtype in {float16, bfloat16}", "float64", "cast a", kernel="tiled"))
        tiled: needs a.dtype in {float16, bfloat16}; got float64 (fix: cast a)
    """

    limit: str
    got: str
    fix: str = ""
    kernel: str | None = None

    def __str__(self) -> str:
        text = f"needs {self.limit}; got {self.got}"
        if self.fix:
            text += f" (fix: {self.fix})"
        return f"{self.kernel}: {text}" if self.kernel else text


class UnsupportedError(NotImplementedError):
    """No kernel that was allowed to run can take the call.

    Attributes:
        reasons: every reason of every backend, ``{backend name: [Reason, ...]}``. A backend that could have run
            the call (but was not asked) stands there with an empty list.
        backend: the name that was asked for, or ``"auto"``.

    Example:
        >>> import torch, qmm
        >>> w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
        >>> try:
        ...     qmm.matmul(torch.randn(2, 64, dtype=torch.float64), w, backend="numba")
        ... except qmm.UnsupportedError as error:
        ...     print(error.backend, error.reasons["torch"], bool(error.reasons["numba"]))
        numba [] True
    """

    def __init__(self, message: str, backend: str, reasons: Mapping[str, Sequence[Reason]]) -> None:
        super().__init__(message)
        self.backend = backend
        self.reasons: dict[str, list[Reason]] = {name: list(rs) for name, rs in reasons.items()}

    def __reduce__(self) -> tuple[type, tuple[str, str, dict[str, list[Reason]]]]:
        return type(self), (str(self), self.backend, self.reasons)


class WeightFormatError(ValueError):
    """A quantised weight, or a file that holds one, breaks a rule of its format.

    The text names the field, the rule and the value.

    Example:
        >>> import torch, qmm
        >>> try:
        ...     qmm.QuantizedWeight.from_codes(torch.full((64, 8), 16), torch.ones(2, 8), bits=4, group_size=32)
        ... except qmm.WeightFormatError as error:
        ...     print(error)
        codes_kn: must be in [0, 15] for bits=4; got 16
    """


class SlowKernelWarning(UserWarning):
    """``backend="auto"`` fell back to a slow kernel on a GPU; given once per process and kernel.

    Example:
        >>> import warnings, qmm
        >>> warnings.simplefilter("error", qmm.SlowKernelWarning)  # where a slow kernel is a mistake
    """


class FormatWarning(UserWarning):
    """A checkpoint can be read in more than one way, or contradicts itself; the text says what was done.

    Example:
        >>> import warnings, qmm
        >>> warnings.simplefilter("error", qmm.FormatWarning)  # where a guess about a file is a mistake
    """
