"""Choosing a kernel: a named backend runs or raises; only ``"auto"`` chooses, in one written order of kernels."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from qmm.backend import Backend, Kernel, Tier
from qmm.call import MatmulCall
from qmm.errors import Reason, SlowKernelWarning, UnsupportedError
from qmm.registry import AUTO, backends, wanted_backend

SLOW_TIER = Tier.LIBRARY  # on a GPU, from this tier on auto says that it fell back


@dataclass(frozen=True)
class Choice:
    """What will run a call, and what was asked for."""

    backend: Backend
    kernel: Kernel
    config: Any
    why: str
    auto: bool = False
    passed_over: tuple[str, ...] = ()


def auto_order() -> list[tuple[Backend, Kernel]]:
    """Every kernel of every backend in the order in which ``auto`` tries them: by tier, then by table order."""
    every = [(b, k) for b in backends().values() for k in b.kernels]
    return sorted(every, key=lambda pair: pair[1].tier)


def reasons_of(backend: Backend, kernel: Kernel, call: MatmulCall, *, auto: bool) -> list[Reason]:
    """All reasons against one kernel; ``auto`` adds that it does not pick emulated kernels."""
    found = list(backend.why_not(call, kernel))
    if auto and backend.emulated:
        found.append(
            Reason(
                "a kernel that runs natively (backend='auto' never picks an emulated one)",
                f"the {backend.emulated}",
                f"name it: backend={backend.name!r}",
                kernel.name,
            )
        )
    return found


def all_reasons(call: MatmulCall, *, auto: bool) -> dict[str, list[Reason]]:
    """Reasons of every backend; a backend with one willing kernel has an empty list."""
    found: dict[str, list[Reason]] = {}
    for name, backend in backends().items():
        per_kernel = [reasons_of(backend, k, call, auto=auto) for k in backend.kernels]
        willing = any(not rs for rs in per_kernel)
        merged = dict.fromkeys(r for rs in per_kernel for r in rs)  # shared reasons once, order kept
        found[name] = [] if willing else list(merged) or backend.environment()
    return found


def select(call: MatmulCall, backend: str = AUTO, kernel: str | None = None) -> Choice:
    """The kernel that runs ``call``.

    Raises:
        ValueError: an unknown backend or kernel name.
        UnsupportedError: no kernel that was asked for takes the call; with all reasons of all backends.
    """
    name, source = wanted_backend(backend)
    candidates = _candidates(name, source, kernel)
    auto = name == AUTO
    passed_over: list[str] = []
    for candidate, k in candidates:
        reasons = reasons_of(candidate, k, call, auto=auto)
        if not reasons:
            why = _why(auto, source, name, kernel, candidate, k, passed_over)
            return Choice(candidate, k, candidate.config(call, k), why, auto, tuple(passed_over))
        passed_over.append(f"{candidate.name}.{k.name} ({reasons[0].limit})")
    raise unsupported(call, name, source, kernel)


def check_kernel(kernel: object) -> None:
    """The type alone; whether there is such a kernel depends on the backend."""
    if not (kernel is None or isinstance(kernel, str)):
        raise TypeError(f"kernel: must be None or a str; got {type(kernel).__name__}")


def _candidates(name: str, source: str, kernel: str | None) -> list[tuple[Backend, Kernel]]:
    order = [(b, k) for b, k in auto_order() if name in (AUTO, b.name)]
    check_kernel(kernel)
    if kernel is None:
        return order
    chosen = [(b, k) for b, k in order if kernel in (k.name, f"{b.name}.{k.name}")]
    if not chosen:
        known = ", ".join(f"{b.name}.{k.name}" for b, k in order) or f"none ({source} names {name!r})"
        raise ValueError(f"kernel: must be one of {known}; got {kernel!r}")
    return chosen


def _why(
    auto: bool, source: str, name: str, kernel: str | None, b: Backend, k: Kernel, passed_over: list[str]
) -> str:
    asked = f"kernel={kernel!r} was asked for" if kernel else ""
    if not auto:
        return f"{source} names {name!r}" + (f"; {asked}" if asked else "")
    skipped = f"; passed over: {', '.join(passed_over)}" if passed_over else ""
    return (asked or f"first in auto's order that takes the call ({k.tier.name.lower()} tier)") + skipped


_warned: set[str] = set()


def warn_if_slow(choice: Choice, call: MatmulCall) -> None:
    """Say once per process and kernel that ``auto`` fell back to a slow kernel on a GPU.

    To be called three calls below ``qmm.matmul``, so that the warning points at the user's line.
    """
    ident = f"{choice.backend.name}.{choice.kernel.name}"
    slow = choice.auto and choice.kernel.tier >= SLOW_TIER and call.device.type != "cpu"
    if not slow or ident in _warned:
        return
    _warned.add(ident)
    text = f"qmm: backend='auto' fell back to {ident} ({choice.kernel.summary}), which is slow on a GPU"
    if choice.passed_over:
        text += f"; passed over: {', '.join(choice.passed_over)}"
    warnings.warn(text + ". qmm.explain(a, w) shows all reasons.", SlowKernelWarning, stacklevel=5)


def unsupported(call: MatmulCall, name: str, source: str, kernel: str | None) -> UnsupportedError:
    """The one error of the dispatcher, with every backend's reasons and who could have run the call."""
    reasons = all_reasons(call, auto=name == AUTO)
    asked = "no backend" if name == AUTO else f"backend {name!r} (from {source}) cannot"
    lead = f"{asked} can run this call" if name == AUTO else f"{asked} run this call"
    if kernel:
        lead += f" with kernel {kernel!r}"
        if name != AUTO:
            backend = backends()[name]
            picked = [k for k in backend.kernels if kernel in (k.name, f"{name}.{k.name}")]
            reasons[name] = [r for k in picked for r in backend.why_not(call, k)]
    lines = [lead + ":"]
    for backend_name, rs in reasons.items():
        if rs:
            lines += [f"  {backend_name}: {r}" for r in rs]
        else:
            lines.append(f"  {backend_name}: could run it (pass backend={backend_name!r} or backend='auto')")
    return UnsupportedError("\n".join(lines), name, reasons)
