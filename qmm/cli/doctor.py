"""``qmm doctor``: what is here, what can run, and what would make the rest run."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qmm.cli.consoles import make_console, print_json

if TYPE_CHECKING:
    from rich.console import Console

PACKAGES = (
    "qmm", "torch", "triton", "numba", "numba-cuda", "numpy", "gguf", "transformers", "matplotlib", "humming-kernels",
)  # fmt: skip
PREFIXES = ("QMM_", "TRITON_", "NUMBA_")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
)
# a call that every kernel might take: int4, group 128, float16, 4096 x 4096
SIDE, ROWS = 4096, (1, 64, 4096)


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object in the place of the text.")
    ] = False,
) -> None:
    """Versions, devices, each backend (usable, or every reason and what fixes it), caches, environment variables.

    Exit code 0: the fastest kind of device here has a fused kernel, or there is no GPU; 1: a GPU is here, and no fused
    kernel can use it.
    """
    found = examine()
    if as_json:
        print_json(found)
    else:
        _print(make_console(), found)
    raise typer.Exit(0 if found["healthy"] else 1)


def examine() -> dict[str, Any]:
    """Everything that the command shows, as plain data."""
    import torch

    import qmm
    from qmm.backend import Tier
    from qmm.caches import caches, size
    from qmm.devices import devices, read

    every = devices()
    backends = {}
    for name, backend in qmm.backends().items():
        reasons = backend.environment()
        backends[name] = {
            "usable": not reasons,
            "emulated": backend.emulated,
            "kernels": [k.name for k in backend.kernels],
            "reasons": [_reason(r) for r in reasons],
        }
    chosen = {str(device): _choices(device) for device in every}
    gpus = [device for device in every if device.type != "cpu"]
    fused = {
        f"{b.name}.{k.name}" for b in qmm.backends().values() for k in b.kernels if k.tier < Tier.LIBRARY
    }
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
            "cuda of torch": torch.version.cuda,
            "hip of torch": torch.version.hip,
            "platform": platform.platform(),
        },
        "devices": {str(device): _device(read(device)) for device in every},
        "backends": backends,
        "chosen": chosen,
        "caches": [
            {
                "name": cache.name,
                "folder": str(cache.folder),
                "entries": len(ours := list(cache.entries())),
                "bytes": sum(map(size, ours)),
                "shared": cache.shared,
            }
            for cache in caches()
        ],
        "environment": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(PREFIXES) or key in VARIABLES
        },
        "healthy": all(any(kernel in fused for kernel in chosen[str(device)].values()) for device in gpus),
    }


def _choices(device: Any) -> dict[str, str]:
    """``{rows: kernel}`` of the plain call on this device."""
    import torch

    from qmm.call import describe_call
    from qmm.explain import explain_call
    from qmm.weight.spec import WeightSpec, ZeroKind

    spec = WeightSpec(4, 128, SIDE, SIDE, SIDE // 128, ZeroKind.NONE, torch.float16)
    found = {}
    for m in ROWS:
        told = explain_call(describe_call(m, spec, device=device))
        found[str(m)] = f"{told.backend}.{told.kernel}" if told.backend else "nothing"
    return found


def _reason(reason: Any) -> dict[str, str]:
    return {"needs": reason.limit, "got": reason.got, "fix": reason.fix}


def _device(info: Any) -> dict[str, Any]:
    return {
        "name": info.name,
        "compute_capability": None if info.capability is None else ".".join(map(str, info.capability)),
        "processors": info.processors or None,
        "shared_bytes": info.shared_bytes or None,
        "l2_bytes": info.l2_bytes or None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _print(console: Console, found: dict[str, Any]) -> None:
    def section(title: str, rows: list[tuple[str, str]]) -> None:
        console.print(title, style="bold", markup=False)
        width = max((len(name) for name, _ in rows), default=0)
        for name, text in rows:
            console.print(f"  {name:<{width}}  {text}", markup=False, soft_wrap=True)

    section(
        "Versions",
        [(k, v or "not installed") for k, v in found["versions"].items() if v or "of torch" not in k],
    )
    section("Devices", [(name, _device_text(d)) for name, d in found["devices"].items()])
    rows = []
    for name, backend in found["backends"].items():
        kernels = ", ".join(backend["kernels"])
        if backend["usable"]:
            emulated = f", in the {backend['emulated']} (slow, for tests)" if backend["emulated"] else ""
            rows.append((name, f"usable{emulated}: {kernels}"))
        else:
            rows.append((name, f"cannot run here: {kernels}"))
        for reason in backend["reasons"]:
            fix = f" (fix: {reason['fix']})" if reason["fix"] else ""
            rows.append(("", f"needs {reason['needs']}; got {reason['got']}{fix}"))
    section("Backends", rows)
    section(
        f"Chosen by auto for int4, group 128, float16, {SIDE} x {SIDE}",
        [
            (device, ", ".join(f"M={m}: {kernel}" for m, kernel in c.items()))
            for device, c in found["chosen"].items()
        ],
    )
    caches = []
    for cache in found["caches"]:
        whose = ", shared with other programs" if cache["shared"] else ""
        text = f"{cache['folder']}: {cache['entries']} entries of qmm, {cache['bytes'] / 1e6:.1f} MB{whose}"
        caches.append((cache["name"], text))
    section("Caches", caches)
    section("Environment variables in force", list(found["environment"].items()) or [("none", "")])
    if not found["healthy"]:
        console.print("A GPU is here, and no fused kernel can use it: see Backends.", style="bold red")


def _device_text(device: dict[str, Any]) -> str:
    text = str(device["name"])
    if device["compute_capability"]:
        text += f", compute capability {device['compute_capability']}"
    if device["processors"]:
        text += (
            f", {device['processors']} multiprocessors, {device['shared_bytes'] >> 10} KiB of shared memory"
        )
    return text + (f", L2 {device['l2_bytes'] >> 20} MiB" if device["l2_bytes"] else "")
