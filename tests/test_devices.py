"""Described devices: what backends decide on hardware that is not here, and that nothing of it stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

import qmm
from qmm.call import MatmulCall, describe_call, make_call
from qmm.devices import (
    DESCRIBED,
    DeviceInfo,
    described,
    described_device,
    device_info,
    devices,
    gpu_is_here,
    read,
)
from qmm.explain import Explanation, explain_call
from qmm.weight.spec import WeightSpec, ZeroKind

SPEC = WeightSpec(4, 128, 4096, 4096, 32, ZeroKind.NONE, torch.float16)
TRITON = qmm.backends()["triton"]


def told(name: str, m: int, **options: object) -> Explanation:
    with described(DESCRIBED[name]):
        return explain_call(describe_call(m, SPEC, device=DESCRIBED[name].type, **options))


@pytest.mark.parametrize(
    ("device", "m", "kernel"),
    [
        ("h200", 1, "decode"),
        ("h200", 512, "wgmma"),
        ("h100", 1, "decode"),
        ("a100", 16, "decode"),
        ("a100", 512, "tiled"),
        ("b200", 1, "tiled"),
        ("t4", 1, "tiled"),
        ("mi300x", 1, "tiled"),
    ],
)
def test_the_kernel_of_a_device_that_is_not_here(device: str, m: int, kernel: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    found = told(device, m)
    assert (found.backend, found.kernel) == ("triton", kernel)
    assert found.config is not None


def test_reasons_name_the_described_device() -> None:
    (reason,) = [r for r in told("a100", 512).kernels["triton.wgmma"] if "capability" in r.limit]
    assert (reason.limit, reason.got) == ("compute capability 9.0", "8.0")
    (reason,) = [r for r in told("mi300x", 1).kernels["numba.tiled"] if r.limit == "a CUDA device"]
    assert reason.got == "AMD Instinct MI300X"
    assert told("cpu", 1).backend == "torch"


def test_the_configuration_follows_the_described_device() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    narrow, wide = (told(name, 1, a_dtype=torch.float32).config.split_k for name in ("t4", "h200"))
    assert narrow < wide  # more processors, more parts of K


def test_nothing_stays_behind() -> None:
    here = gpu_is_here()
    before = TRITON.environment(), TRITON.emulated
    with described(DESCRIBED["h200"]):
        assert described_device() is DESCRIBED["h200"]
        assert device_info(torch.device("cuda", 3)).name == "NVIDIA H200"
        assert gpu_is_here()
        assert TRITON.emulated is None
        with described(DESCRIBED["cpu"]):
            assert not gpu_is_here()
        assert gpu_is_here()
        seen: list[DeviceInfo | None] = []
        thread = threading.Thread(target=lambda: seen.append(described_device()))
        thread.start()
        thread.join()
        assert seen == [None]  # another thread is not concerned
    assert described_device() is None
    assert (TRITON.environment(), TRITON.emulated) == before
    assert gpu_is_here() == here


def test_a_described_call_has_the_facts_of_a_real_one() -> None:
    w = qmm.quantize(torch.randn(32, 64), bits=4, group_size=32)
    a = torch.empty(3, 64)
    real = make_call(a, w, bias=torch.zeros(32), activation="silu", deterministic="batch")
    made = describe_call(
        3, w.spec, a_dtype=a.dtype, bias_dtype=torch.float32, activation="silu", deterministic="batch"
    )
    assert made == real
    assert isinstance(made, MatmulCall)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"m": -1}, "m: must be at least 0; got -1"),
        ({"activation": "tanh"}, "activation: must be None or one of"),
        ({"deterministic": "yes"}, "deterministic: must be"),
        ({"a_dtype": torch.int8}, "a: dtype must be one of"),
    ],
)
def test_calls_that_cannot_be(options: dict, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        describe_call(**({"m": 1, "weight": SPEC} | options))


def test_devices_here() -> None:
    found = devices()
    assert found[-1] == torch.device("cpu")
    assert len(found) - 1 >= torch.cuda.device_count()
    assert read(torch.device("cpu")).type == "cpu"
    assert read(torch.device("cpu")).capability is None


def test_the_table_is_plausible() -> None:
    for name, info in DESCRIBED.items():
        assert name == name.lower()
        if info.type == "cpu":
            continue
        assert 8 <= info.processors <= 400
        assert 64 << 10 <= info.shared_bytes <= 227 << 10
        assert 2e11 < info.bytes_per_s < 2e13
        assert (info.capability is None) == (info.vendor != "nvidia")


def test_describing_needs_no_emulator() -> None:
    """In a fresh process without a GPU and without emulators, as ``qmm explain`` runs."""
    code = """
import torch
from qmm.call import describe_call
from qmm.devices import DESCRIBED, described
from qmm.explain import explain_call
from qmm.weight.spec import WeightSpec, ZeroKind
spec = WeightSpec(4, 128, 4096, 4096, 32, ZeroKind.NONE, torch.float16)
with described(DESCRIBED["h200"]):
    print(explain_call(describe_call(1, spec, device="cuda")).kernel)
print(explain_call(describe_call(1, spec)).kernel)
"""
    pytest.importorskip("triton", reason="triton is not installed")
    flags = ("TRITON_INTERPRET", "NUMBA_ENABLE_CUDASIM")
    env = {k: v for k, v in os.environ.items() if k not in flags} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["decode", "blocks"]
