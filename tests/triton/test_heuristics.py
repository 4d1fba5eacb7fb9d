"""The choice of tiles and splits: pure functions of facts, so that made-up devices do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qmm.backends.triton_gpu.buckets import bucket_name, representative
from qmm.backends.triton_gpu.heuristics import DeviceFacts, TiledConfig, choose, groups_per_tile
from qmm.call import MatmulCall
from qmm.weight import ZeroKind
from qmm.weight.spec import WeightSpec

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
H100 = DeviceFacts(processors=132, shared_bytes=227 << 10)
SMALL = DeviceFacts(processors=20, shared_bytes=64 << 10)
DEVICES = pytest.mark.parametrize(
    "device", [H100, SMALL, replace(SMALL, emulated=True)], ids=["h100", "small", "cpu"]
)


def call_of(
    m: int = 1,
    n: int = 4096,
    k: int = 4096,
    bits: int = 4,
    group: int = 128,
    dtype: torch.dtype = HALF,
    deterministic: bool | str = True,
    fits: bool = True,
    **weight: object,
) -> MatmulCall:
    spec = WeightSpec(bits, group, k, n, -(-k // group), ZeroKind.NONE, HALF, **weight)  # type: ignore[arg-type]
    return MatmulCall(
        m, n, k, (m, k), (k, 1), dtype, True, torch.device("cpu"), spec, fits, deterministic=deterministic
    )


WEIGHTS = [
    {},
    {"bits": 3},
    {"act_order": True},
    {"group": 32, "k": 7392},
    {"dtype": FLOAT},
    {"n": 48, "k": 128},
]
weights = pytest.mark.parametrize("facts", WEIGHTS, ids=lambda f: "-".join(map(str, f)) or "plain")


@DEVICES
@weights
def test_few_variants_for_small_m(facts: dict[str, object], device: DeviceFacts) -> None:
    """M = 1..64 on one weight compiles at most four kernels, the reduction among them."""
    compiled = set()
    for m in range(1, 65):
        config = choose(call_of(m=m, **facts), device)  # type: ignore[arg-type]
        compiled.add(replace(config, split_k=min(config.split_k, 2)))
        if config.split_k > 1:
            compiled.add("reduce")
    assert len(compiled) <= 4


@DEVICES
@weights
def test_batch_does_not_depend_on_m(facts: dict[str, object], device: DeviceFacts) -> None:
    configs = {
        choose(call_of(m=m, deterministic="batch", **facts), device)  # type: ignore[arg-type]
        for m in (1, 2, 16, 17, 64, 65, 4096)
    }
    assert len(configs) == 1
    assert configs.pop().split_k == 1


@DEVICES
@weights
@pytest.mark.parametrize("m", [0, 1, 33, 100, 1 << 21, 1 << 33])
def test_every_choice_can_be_launched(m: int, facts: dict[str, object], device: DeviceFacts) -> None:
    """Power-of-two tiles (the configuration checks them), one grid axis within 2**31 - 1, no empty split."""
    call = call_of(m=m, **facts)  # type: ignore[arg-type]
    config = choose(call, device)
    k_tiles = -(-call.k // config.block_k)
    per_split = -(-k_tiles // config.split_k)
    assert (config.split_k - 1) * per_split < k_tiles
    if m < 1 << 33:
        assert -(-m // config.block_m) * -(-call.n // config.block_n) * config.split_k < 2**31
    assert config.num_stages >= 1


def test_decode_fills_the_device() -> None:
    config = choose(call_of(m=1), H100)
    programs = 4096 // config.block_n * config.split_k
    assert config.block_m == 16 and programs >= 2 * H100.processors


def test_prefill_uses_large_tiles_and_no_split() -> None:
    config = choose(call_of(m=4096), H100)
    assert (config.block_m, config.block_n, config.split_k) == (128, 128, 1)


def test_less_shared_memory_means_fewer_stages() -> None:
    assert choose(call_of(m=4096), SMALL).num_stages < choose(call_of(m=4096), H100).num_stages


@pytest.mark.parametrize(
    ("dtype", "fits", "dot"),
    [(HALF, True, "float16"), (HALF, False, "float32"), (BF16, False, "bfloat16"), (FLOAT, True, "float32")],
)
def test_dot_dtype(dtype: torch.dtype, fits: bool, dot: str) -> None:
    """float16 products only where every weight fits."""
    assert choose(call_of(dtype=dtype, fits=fits), H100).dot == dot


@pytest.mark.parametrize(
    ("group", "k", "block_k", "groups"),
    [(128, 1024, 128, 1), (256, 1024, 128, 1), (32, 1024, 128, 4), (1, 64, 64, 64), (24, 96, 64, 0), (96, 960, 64, 0),
     (70, 70, 64, 1), (7, 7, 64, 1)],
)  # fmt: skip
def test_groups_per_tile(group: int, k: int, block_k: int, groups: int) -> None:
    assert groups_per_tile(call_of(group=group, k=k).weight, block_k) == groups


def test_act_order_is_looked_up() -> None:
    assert groups_per_tile(call_of(act_order=True).weight, 128) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_m", 0), ("block_m", 24), ("block_n", 8), ("block_k", 48), ("num_warps", 3), ("split_k", 0),
     ("num_stages", 0)],
)  # fmt: skip
def test_impossible_settings_raise(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        replace(TiledConfig(16, 32, 64, 1, 4, 2, "float16"), **{field: value})


BUCKETS = [(0, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 512), (513, 1024), (1025, 1 << 20)]


@DEVICES
@weights
def test_one_configuration_a_bucket(facts: dict[str, object], device: DeviceFacts) -> None:
    """Eight buckets: a new M inside one of them compiles nothing."""
    for low, high in BUCKETS:
        made = {choose(call_of(m=m, **facts), device) for m in (low, (low + high) // 2, high)}  # type: ignore[arg-type]
        assert len(made) == 1, (low, high)


def test_buckets_have_names_and_representatives() -> None:
    assert [bucket_name(low) for low, _ in BUCKETS] == [bucket_name(high) for _, high in BUCKETS]
    assert len({bucket_name(low) for low, _ in BUCKETS}) == 8
    assert [representative(low) for low, _ in BUCKETS] == [16, 32, 64, 128, 256, 512, 1024, 4096]
