"""The choice among the Hopper kernels, and their reasons: pure functions of facts, so that made-up calls do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from qmm.backends.triton_gpu.hopper import available
from qmm.backends.triton_gpu.hopper.choose import (
    DECODE_ROWS,
    DecodeConfig,
    choose_decode,
    tiles_per_group,
)
from qmm.backends.triton_gpu.hopper.choose_wgmma import (
    Tiling,
    WgmmaConfig,
    choose_wgmma,
    clusters_at_once,
    tilings,
    wgmma_config,
)
from qmm.call import MatmulCall
from qmm.devices import DeviceInfo, described
from qmm.weight import ZeroKind
from qmm.weight.spec import WeightSpec

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
H200 = (132, 227 << 10)
DEVICES = {"h200": H200, "a100": (108, 163 << 10), "rtx-3090": (82, 99 << 10), "small": (20, 99 << 10)}
SHAPES = [
    (4096, 4096), (4096, 6144), (14336, 4096), (28672, 8192), (8192, 57344),
    (1, 1), (31, 5), (64, 64), (100, 37), (859, 577), (1000, 200000), (200000, 24), (11008, 4097), (2880, 201088),
]  # fmt: skip
ROWS = [1, 2, 4, 5, 8, 9, 16, 17, 33, 64, 100, 128, 129, 256, 511, 1024, 1025, 8192, 1 << 20]


def call_of(
    m: int = 1, k: int = 4096, n: int = 4096, *, bits: int = 4, group: int = 128, zero_kind: ZeroKind = ZeroKind.NONE,
    scale_dtype: torch.dtype = HALF, a_dtype: torch.dtype = HALF, **facts: Any,
) -> MatmulCall:  # fmt: skip
    zero_dtype = None if zero_kind is ZeroKind.NONE else HALF
    spec = WeightSpec(bits, group, k, n, -(-k // group), zero_kind, scale_dtype, zero_dtype)
    call = MatmulCall(m, n, k, (m, k), (k, 1), a_dtype, True, torch.device("cpu"), spec, True)
    return replace(call, **facts)


def grid() -> Iterator[MatmulCall]:
    for m, (k, n), bits, strided in product(ROWS, SHAPES, (4, 8), (False, True)):
        strides = {"a_strides": (k + 1, 1), "out_strides": (n + 1, 1)} if strided else {}
        yield call_of(m, k, n, bits=bits, group=32, scale_dtype=FLOAT, zero_kind=ZeroKind.FLOAT, **strides)


def is_power_of_two(value: int) -> bool:
    return value > 0 and not value & (value - 1)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_decode_configuration_is_valid(device: tuple[int, int]) -> None:
    for call in grid():
        if call.m > DECODE_ROWS:
            continue
        c = choose_decode(call, *device)
        assert c.block_n in (16, 32, 64, 128) and c.block_m in (8, 16) and c.depth >= 2, c
        assert is_power_of_two(c.num_warps) and 4 <= c.num_warps <= 16, c
        assert not c.shared or c.block_m >= min(call.m, 16), c
        copies = call.k % 8 != 0 or (call.m > 1 and call.a_strides[0] % 8 != 0)
        assert (c.before == "copy") is copies, (c, call)
        if c.shared:  # what stream.py allocates: weights, A, scales and zeros, two groups of float32 at most
            bits = call.weight.bits
            weights, a = c.block_n * 32, c.block_m * (256 // bits) * 2
            factors = c.block_n * (4 + 2) * (2 if 256 // bits == 64 else 1)
            assert c.depth * c.num_warps * (weights + a + factors) <= device[1], c


def test_every_wgmma_configuration_is_valid() -> None:
    """What is chosen, and all that might be."""
    for call in grid():
        chosen = choose_wgmma(call, *H200)
        configs = [wgmma_config(call, tiling, H200[1]) for tiling in tilings(call)]
        assert chosen in configs
        for c in configs:
            assert_valid(call, c)


def assert_valid(call: MatmulCall, c: WgmmaConfig) -> None:
    assert c.block_m in (16, 32, 64, 128, 256) and c.halves in (1, 2) and c.per_processor in (1, 2), c
    assert 2 <= c.stages <= 10, c
    assert 1 <= c.split_k <= -(-call.k // (256 if c.whole else 128)), c  # no split without work
    assert c.split_k == 1 or c.block_m < 256, c
    items = -(-call.m // c.block_m) * -(-call.n // c.columns) * c.split_k
    assert items < 1 << 31, c
    if c.cluster:
        assert c.split_k in (2, 4) and c.per_processor == 1, c
    assert c.turns is (c.halves == 1) and not (c.turns and c.whole), c
    # what wgmma.py allocates: A and 64 columns' weights a half, C, two barriers a stage; what splits are sent
    wide = c.columns // 64
    stage = c.halves * (c.block_m * 64 * 2 + wide * call.weight.bits * 512)
    rows = c.block_m // c.split_k if c.cluster else c.block_m
    own = (c.split_k - 1) * rows * c.columns * 4 if c.cluster else 0
    shared = c.stages * (stage + 16) + (wide * rows * 64 * 2 if c.tma_store else 0) + own
    assert own <= 48 << 10 and rows >= 8, c
    assert shared <= (227 << 10 if c.per_processor == 1 else 113 << 10), c
    assert c.tma_store is (call.n % 8 == 0 and call.out_strides is None)


def test_what_is_forced_is_valid_too() -> None:
    for call, block_m, split in product(grid(), (16, 32, 64, 128, 256), (1, 2, 3, 5, 8)):
        if call.m not in (1, 64, 8192):
            continue
        tiling = Tiling(block_m, split_k=split)
        if split > -(-call.k // (256 if block_m < 256 else 128)):
            with pytest.raises(ValueError, match="split_k"):
                wgmma_config(call, tiling, H200[1])
        elif block_m < 256 or split == 1:
            assert_valid(call, wgmma_config(call, tiling, H200[1]))
            if block_m <= 64:
                assert_valid(call, wgmma_config(call, replace(tiling, per_processor=2), H200[1]))


@pytest.mark.parametrize(
    "tiling",
    [Tiling(64, split_k=3, cluster=True), Tiling(16, split_k=4, cluster=True), Tiling(128, 192, 4, True)],
    ids=str,
)
def test_clusters_that_cannot_be_are_refused(tiling: Tiling) -> None:
    """No cluster of 3, none with fewer than 8 rows each, none that sends more than 48 KiB."""
    with pytest.raises(ValueError, match="cluster"):
        wgmma_config(call_of(64), tiling, H200[1])


def test_clusters_that_fit_at_once() -> None:
    """As cuOccupancyMaxActiveClusters says of an H200."""
    assert [clusters_at_once(size, 132) for size in (2, 4)] == [66, 30]


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_few_variants_for_small_m(k: int, n: int, bits: int) -> None:
    """M = 1..64 on one weight compiles three decode kernels at most, and five of wgmma."""
    decode = {choose_decode(call_of(m, k, n, bits=bits), *H200) for m in range(1, DECODE_ROWS + 1)}
    wgmma = {choose_wgmma(call_of(m, k, n, bits=bits), *H200) for m in range(DECODE_ROWS + 1, 65)}
    assert len(decode) <= 3
    assert len(wgmma) <= 5


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_batch_does_not_depend_on_m(k: int, n: int) -> None:
    configs = {choose_decode(call_of(m, k, n, deterministic="batch"), *H200) for m in ROWS}
    assert len(configs) == 1
    assert not configs.pop().shared


def test_the_choice_is_pure() -> None:
    for call in (call_of(1), call_of(8), call_of(64), call_of(8192)):
        assert choose_decode(call, *H200) == choose_decode(call, *H200)
        assert choose_wgmma(call, *H200) == choose_wgmma(call, *H200)


def test_small_tiles_fill_the_machine_and_large_ones_multiply() -> None:
    """Of a few rows the machine is filled by splits; of thousands, by tiles of 256 rows."""
    few = choose_wgmma(call_of(32), *H200)
    assert few.split_k > 1 and 4096 // 128 * few.split_k >= H200[0] * 0.5
    many = choose_wgmma(call_of(8192), *H200)
    assert (many.block_m, many.split_k, many.turns) == (256, 1, True)


@pytest.mark.parametrize(
    ("group", "k", "block", "expected"),
    [(128, 4096, 64, (2, 1)), (64, 4096, 64, (1, 1)), (32, 4096, 64, (1, 2)), (4096, 4096, 64, (0, 1)),
     (9999, 100, 64, (0, 1)), (16, 4096, 64, None), (96, 4096, 64, None), (32, 4096, 32, (1, 1)),
     (16, 4096, 32, (1, 2))],
)  # fmt: skip
def test_tiles_per_group(group: int, k: int, block: int, expected: tuple[int, int] | None) -> None:
    assert tiles_per_group(call_of(k=k, group=group).weight, block) == expected


# The reasons


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """machine(capability, triton): what the reasons see of the GPU and of Triton's version."""
    stack = ExitStack()

    def pretend(
        capability: tuple[int, int] = (9, 0), triton: str | None = "3.6.0", vendor: str = "nvidia"
    ) -> None:
        def version(name: str) -> str:
            assert name == "triton"
            if triton is None:
                raise available.PackageNotFoundError(name)
            return triton

        monkeypatch.setattr(available, "version", version)
        available._triton_reasons.cache_clear()
        stack.enter_context(described(DeviceInfo("a GPU", "cuda", vendor, capability)))

    with stack:
        pretend()
        yield pretend
    available._triton_reasons.cache_clear()


def on_gpu(m: int = 1, **facts: Any) -> MatmulCall:
    return call_of(m, **({"device": torch.device("cuda", 0)} | facts))


def limits(call: MatmulCall, kernel: str, emulated: bool = False) -> list[str]:
    found = available.reasons(call, kernel, emulated)
    assert all(r.kernel == kernel for r in found)
    return [f"{r.limit}: {r.got}" for r in found]


def test_no_reason_where_both_run(machine: Any) -> None:
    assert limits(on_gpu(1), "decode") == []
    assert limits(on_gpu(64), "wgmma") == []
    assert available.layout_serves(on_gpu().weight, True, torch.device("cuda", 0), False)


@pytest.mark.parametrize("triton", ["3.6.0", "3.6.0+git1a2b3c", "3.7.1", "3.8.0", "3.9.0"])
def test_triton_versions_that_are_known(machine: Any, triton: str) -> None:
    machine(triton=triton)
    assert limits(on_gpu(1), "decode") == []


@pytest.mark.parametrize("triton", ["3.5.1", "3.10.0", "4.0.0", "2.3.1"])
@pytest.mark.parametrize("kernel", ["decode", "wgmma"])
def test_triton_versions_that_are_not(machine: Any, triton: str, kernel: str) -> None:
    """The portable kernel serves: no fragment layout is made."""
    machine(triton=triton)
    assert limits(on_gpu(1), kernel) == [f"triton 3.6 to 3.9: triton {triton}"]
    assert not available.layout_serves(on_gpu().weight, True, torch.device("cuda", 0), False)


def test_no_triton(machine: Any) -> None:
    machine(triton=None)
    (found,) = available.reasons(on_gpu(1), "decode", False)
    assert (found.got, found.fix) == ("no triton", "pip install 'qmm[triton]'")


@pytest.mark.parametrize(
    ("capability", "decode", "wgmma"),
    [((7, 5), False, False), ((8, 0), True, False), ((8, 6), True, False), ((8, 9), True, False),
     ((9, 0), True, True), ((10, 0), False, False), ((12, 0), False, False)],
)  # fmt: skip
def test_compute_capabilities(machine: Any, capability: tuple[int, int], decode: bool, wgmma: bool) -> None:
    machine(capability)
    got = ".".join(map(str, capability))
    expected = [] if decode else [f"compute capability 8.0 to 9.0: {got}"]
    assert limits(on_gpu(1), "decode") == expected
    expected = [] if wgmma else [f"compute capability 9.0: {got}"]
    assert limits(on_gpu(64), "wgmma") == expected
    assert available.layout_serves(on_gpu().weight, True, torch.device("cuda", 0), False) is decode


def test_amd(machine: Any) -> None:
    machine(vendor="amd")
    assert limits(on_gpu(1), "decode") == ["an NVIDIA GPU: an AMD GPU"]
    assert not available.layout_serves(on_gpu().weight, True, torch.device("cuda", 0), False)


def test_the_interpreter_does_not_know_gluon(machine: Any) -> None:
    (text,) = limits(call_of(1), "decode", emulated=True)
    assert "interpreter" in text
    assert not available.layout_serves(on_gpu().weight, True, torch.device("cpu"), True)


def test_rows_of_the_decode_kernel(machine: Any) -> None:
    assert limits(on_gpu(DECODE_ROWS), "decode") == []
    assert limits(on_gpu(DECODE_ROWS + 1), "decode") != []
    assert limits(on_gpu(4096, deterministic="batch"), "decode") == []
    assert limits(on_gpu(4096, deterministic="batch"), "wgmma") != []


@pytest.mark.parametrize("kernel", ["decode", "wgmma"])
@pytest.mark.parametrize(
    ("group", "ok"), [(16, False), (32, True), (48, False), (64, True), (96, False), (4096, True)]
)
def test_group_sizes(machine: Any, kernel: str, group: int, ok: bool) -> None:
    found = limits(on_gpu(1, group=group), kernel)
    assert (found == []) is ok, found


def test_weights_past_float16(machine: Any) -> None:
    """wgmma rounds W to A's dtype once, and only where that loses no range; decode scales float32 sums."""
    assert limits(on_gpu(1, fits_float16=False), "wgmma") != []
    assert limits(on_gpu(1, fits_float16=False), "decode") == []
    assert limits(on_gpu(1, fits_float16=False, a_dtype=BF16), "wgmma") == []


@pytest.mark.parametrize("kernel", ["decode", "wgmma"])
def test_an_unprepared_weight_in_a_capture(machine: Any, kernel: str) -> None:
    (found,) = available.reasons(on_gpu(1, unprepared_in_capture=True), kernel, False)
    assert "qmm.prepare" in found.fix


def test_all_reasons_are_listed(machine: Any) -> None:
    machine((7, 5), "3.5.0")
    call = on_gpu(64, group=48, unprepared_in_capture=True)
    assert len(limits(call, "decode")) == 5
    assert len(limits(replace(call, fits_float16=False, deterministic="batch"), "wgmma")) == 6


@pytest.mark.parametrize(
    ("facts", "served"),
    [({}, True), ({"bits": 3}, False), ({"codebook_dtype": HALF}, False), ({"act_order": True}, True),
     ({"scale2_ratio": 0}, False), ({"zero2_ratio": 4}, False), ({"scale_dtype": torch.float8_e4m3fn}, False),
     ({"group_size": 48}, False)],
)  # fmt: skip
def test_weights_that_are_prepared(machine: Any, facts: dict[str, Any], served: bool) -> None:
    spec = replace(on_gpu().weight, **facts)
    assert available.layout_serves(spec, True, torch.device("cuda", 0), False) is served
    assert not available.layout_serves(spec, False, torch.device("cuda", 0), False)


@pytest.mark.parametrize("kernel", ["decode", "wgmma"])
def test_act_order(machine: Any, kernel: str) -> None:
    """Groups of group_size rows each are consecutive rows of the layout; others go to the portable kernel."""
    call = on_gpu(1)
    call = replace(call, weight=replace(call.weight, act_order=True))
    assert limits(call, kernel) == []
    (found,) = available.reasons(replace(call, even_groups=False), kernel, False)
    assert "group_size rows in each group" in found.limit and found.kernel == kernel


@pytest.mark.parametrize("aligned", [True, False])
def test_what_happens_to_a_first(aligned: bool) -> None:
    call = call_of(1, 4096 if aligned else 859)
    ordered = replace(call, weight=replace(call.weight, act_order=True))
    for choose in (choose_decode, choose_wgmma):
        assert choose(call, *H200).before == (None if aligned else "copy")
        assert choose(ordered, *H200).before == "gather"


def test_configurations_are_hashable() -> None:
    """They key what is compiled."""
    assert isinstance(choose_decode(call_of(1), *H200), DecodeConfig)
    assert len({choose_wgmma(call_of(64), *H200), choose_wgmma(call_of(64), *H200)}) == 1
