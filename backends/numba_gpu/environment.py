"""What the numba backend needs of a machine, asked once: versions before any import, because a wrong pair may crash."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from functools import lru_cache
from importlib import metadata

import torch

from qmm.devices import DeviceInfo
from qmm.errors import Reason

OLDEST_NUMBA_CUDA = (0, 30, 4)
# numba-cuda up to 0.30 imports what numpy 2.5 has taken away
NUMPY_TOO_NEW = (2, 5)
NUMBA_CUDA_FOR_NEW_NUMPY = (0, 31)
INSTALL = "pip install 'qmm[numba]'"
SIMULATOR_FLAG = "NUMBA_ENABLE_CUDASIM"


def is_simulated() -> bool:
    """Whether numba.cuda is the simulator: as imported, or else as the environment will make it."""
    cuda = sys.modules.get("numba.cuda")
    if cuda is not None and hasattr(cuda, "synchronize"):  # else it is only being imported
        return "simulator" in cuda.synchronize.__module__
    try:
        return bool(int(os.environ.get(SIMULATOR_FLAG, "0")))
    except ValueError:
        return False  # numba ignores such a value, too


@lru_cache(maxsize=8)
def missing(simulator: bool, described: DeviceInfo | None = None) -> tuple[Reason, ...]:
    """Why numba kernels cannot run here, or on a ``described`` device.

    The versions, and without the simulator the device and NVIDIA's compiler.
    """
    return _versions() or (() if simulator else _device(described) or _compiler())


def _versions() -> tuple[Reason, ...]:
    found: list[Reason] = []
    if _version("numba") is None:
        found.append(Reason("the numba package", "not installed", INSTALL))
    numba_cuda = _version("numba-cuda")
    if numba_cuda is None:
        found.append(Reason("the numba-cuda package", "not installed", INSTALL))
        return tuple(found)
    if numba_cuda < OLDEST_NUMBA_CUDA:
        limit = f"numba-cuda >= {_dotted(OLDEST_NUMBA_CUDA)}"
        found.append(Reason(limit, metadata.version("numba-cuda"), INSTALL))
    numpy = _version("numpy")
    if numpy is not None and numpy >= NUMPY_TOO_NEW and numba_cuda < NUMBA_CUDA_FOR_NEW_NUMPY:
        limit = f"numpy < {_dotted(NUMPY_TOO_NEW)} with numba-cuda {metadata.version('numba-cuda')}"
        found.append(Reason(limit, metadata.version("numpy"), "pip install 'numpy<2.5'"))
    return tuple(found)


def _device(described: DeviceInfo | None) -> tuple[Reason, ...]:
    if described is not None:
        here = described.vendor == "nvidia"
        return () if here else (Reason("a CUDA device", described.name, "run on an NVIDIA GPU"),)
    if torch.cuda.is_available() and torch.version.cuda is not None:
        return ()
    got = "none that torch can use" if torch.version.hip is None else "a ROCm build of torch"
    fix = f"set {SIMULATOR_FLAG}=1 before numba is first imported, for the (slow) simulator"
    return (Reason("a CUDA device", got, fix),)


def _compiler() -> tuple[Reason, ...]:
    """libnvvm and libnvrtc, which numba-cuda compiles with and pip does not bring by itself."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.pathfinder") is None:
        return (Reason("the cuda-pathfinder package", "not installed", INSTALL),)
    from cuda.pathfinder import (  # type: ignore[import-untyped, unused-ignore]
        DynamicLibNotFoundError,
        load_nvidia_dynamic_lib,
    )

    found = []
    fix = f"pip install 'numba-cuda[cu{(torch.version.cuda or '13').split('.')[0]}]'"
    for library in ("nvvm", "nvrtc"):
        try:
            load_nvidia_dynamic_lib(library)
        except DynamicLibNotFoundError:
            found.append(Reason(f"NVIDIA's lib{library}", "not found", fix))
    return tuple(found)


def _version(package: str) -> tuple[int, ...] | None:
    """The leading numbers of an installed package's version."""
    try:
        text = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
