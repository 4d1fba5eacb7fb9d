"""The kit itself: right answers pass, wrong ones fail, and the suite judges a backend from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import qmm
from qmm import QuantizedWeight, ZeroKind
from qmm.testing import (
    CASES,
    EXACT_CASES,
    LARGE_CASES,
    Canary,
    Case,
    apply_known_gaps,
    assert_close,
    assert_exact,
    assert_rms,
    carve,
    carve_rows,
    carve_weight,
    make_inputs,
    oracle,
    reference,
    targets,
    worst_ratio,
)
from qmm.testing.gaps import read_gaps
from qmm.testing.numerics import emulate

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
each_dtype = pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT], ids=["fp16", "bf16", "fp32"])


def right(case: Case) -> tuple[torch.Tensor, qmm.testing.Inputs]:
    x = make_inputs(case)
    return qmm.matmul(x.a, x.w, bias=x.bias, activation=case.activation, backend="torch"), x


# the oracle against numbers worked out by hand


def test_oracle_codes() -> None:
    """0x4321 read in nibbles from the low end; 3-bit code 10 stands in two words."""
    words = torch.tensor([[0x00004321], [-1]], dtype=torch.int32)
    assert oracle.codes(words, 4, 9)[:, 0].tolist() == [1, 2, 3, 4, 0, 0, 0, 0, 15]
    assert oracle.codes(torch.tensor([[-(2**30)], [1]], dtype=torch.int32), 3, 12)[:, 0].tolist() == [
        0
    ] * 10 + [7, 0]


def test_oracle_numbers_of_every_dtype() -> None:
    assert oracle.to_float64(torch.tensor([1.5, -2.0], dtype=BF16)).tolist() == [1.5, -2.0]
    e4m3 = torch.tensor([0x38, 0xB8, 0x01, 0x7E, 0x08], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert oracle.to_float64(e4m3).tolist() == [1.0, -1.0, 2.0**-9, 448.0, 2.0**-6]
    if hasattr(torch, "float8_e8m0fnu"):
        e8m0 = torch.tensor([127, 128, 0], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        assert oracle.to_float64(e8m0).tolist() == [1.0, 2.0, 2.0**-127]
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16):  # every byte, against torch
        raw = torch.arange(256, dtype=torch.uint8)
        raw = raw.view(dtype) if dtype == torch.float8_e4m3fn else raw.repeat_interleave(2).view(dtype)
        np.testing.assert_array_equal(oracle.to_float64(raw), raw.double().numpy())


def test_oracle_dequantize_by_hand() -> None:
    codes, scales = torch.tensor([[1], [14], [7]]), torch.tensor([[0.5], [2.0]], dtype=HALF)
    zeros = torch.tensor([[3], [9]])
    w = QuantizedWeight.from_codes(codes, scales, zeros, bits=4, group_size=2)
    value, size = oracle.dequantize(w)
    assert value[:, 0].tolist() == [-1.0, 5.5, -4.0] and size[:, 0].tolist() == [2.0, 8.5, 32.0]
    g_idx = torch.tensor([1, 0, 1])
    w = QuantizedWeight.from_codes(codes, scales, zeros, bits=4, group_size=2, g_idx=g_idx)
    assert oracle.dequantize(w)[0][:, 0].tolist() == [-16.0, 5.5, -4.0]


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu"])
def test_oracle_activations(name: str) -> None:
    functional = torch.nn.functional
    torchs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda t: functional.gelu(t, approximate="tanh"),
        "silu": functional.silu,
    }
    x = torch.linspace(-30, 30, 301, dtype=torch.float64)
    np.testing.assert_allclose(
        oracle.activate(x.numpy(), name), torchs[name](x).numpy(), rtol=1e-12, atol=1e-14
    )


# a wrong answer must fail


WRONG: dict[str, Callable[[torch.Tensor], object]] = {
    "one element": lambda c: c.view(-1)[3].mul_(1.5).add_(1),
    "one NaN": lambda c: c[0, 0].fill_(float("nan")),
    "one Inf": lambda c: c[0, 0].fill_(float("inf")),
    "a row not written": lambda c: c[-1].zero_(),
    "columns swapped": lambda c: c.copy_(c.flip(1)),
    "everything twice": lambda c: c.mul_(2),
    "off by a little": lambda c: c.add_(c.abs().max() * 0.1),
}


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
@each_dtype
def test_assert_close_fails(dtype: torch.dtype, spoil: Callable[[torch.Tensor], object]) -> None:
    result, x = right(Case(dtype=dtype))
    assert 0 < assert_close(result, x.a, x.w) <= 1
    spoil(result)
    with pytest.raises(AssertionError, match="of the numerics bound"):
        assert_close(result, x.a, x.w)


def test_assert_close_checks_dtype_and_shape() -> None:
    result, x = right(Case())
    with pytest.raises(AssertionError, match=r"dtype torch\.float32 where a has torch\.float16"):
        assert_close(result.float(), x.a, x.w)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(result[:2], x.a, x.w)


def test_assert_close_counts_bias_and_activation() -> None:
    case = Case(bias=HALF, activation="silu")
    result, x = right(case)
    assert_close(result, x.a, x.w, bias=x.bias, activation="silu")
    for options in (
        {"bias": None, "activation": "silu"},
        {"bias": x.bias, "activation": "relu"},
        {"bias": x.bias},
    ):
        with pytest.raises(AssertionError):
            assert_close(result, x.a, x.w, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["code", "zero point", "scale"])
def test_one_wrong_field_of_a_weight_is_seen(what: str) -> None:
    """A one-hot row shows each weight by itself."""
    x = make_inputs(Case(k=64, n=4))
    codes, zeros, scales = x.w.unpack(), x.w.unpack_zeros(), x.w.scales.clone()
    assert zeros is not None
    if what == "code":
        codes[5, 1] ^= 1
    elif what == "zero point":
        zeros[0, 1] ^= 1
    else:
        scales[0, 1] *= 1.05
    w = QuantizedWeight.from_codes(codes, scales, zeros, bits=4, group_size=32)
    eye = torch.eye(64, dtype=HALF)
    with pytest.raises(AssertionError):
        assert_close(qmm.matmul(eye, w, backend="torch"), eye, x.w)
    exact = make_inputs(Case(k=64, n=4), exact=True)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_exact(qmm.matmul(eye, w, backend="torch"), eye, exact.w)


def test_infinities() -> None:
    """Inf is right where the exact value is past the range, and wrong of the other sign or elsewhere."""
    w = QuantizedWeight.from_codes(
        torch.tensor([[15], [15]]), torch.tensor([[60000.0]], dtype=HALF), bits=4, group_size=2
    )
    ref = reference(torch.ones(1, 2, dtype=HALF), w)
    assert worst_ratio(torch.tensor([[float("inf")]], dtype=HALF), ref) == 0
    for wrong in (float("-inf"), float("nan"), 0.0):
        assert worst_ratio(torch.tensor([[wrong]], dtype=HALF), ref) > 1


@each_dtype
def test_assert_exact_fails_by_one_bit(dtype: torch.dtype) -> None:
    case = next(c for c in EXACT_CASES if c.dtype == dtype)
    x = make_inputs(case, exact=True)
    result = qmm.matmul(x.a, x.w, backend="torch")
    assert_exact(result, x.a, x.w)
    as_int = torch.int32 if dtype == FLOAT else torch.int16
    result.view(as_int)[1, 2] += 1
    with pytest.raises(AssertionError, match=r"1 of \d+ elements differ"):
        assert_exact(result, x.a, x.w)


@each_dtype
def test_assert_rms_fails(dtype: torch.dtype) -> None:
    """A sum in steps of 16 bits passes no more than a wrong scale does."""
    case = Case(m=8, n=32, k=512, dtype=dtype, zero_kind=ZeroKind.NONE, group_size=64)
    result, x = right(case)
    assert assert_rms(result, x.a, x.w) < 1.5
    assert assert_rms(emulate(x.a, x.w), x.a, x.w) == pytest.approx(1)
    value = x.w.dequantize()
    parts = [
        (x.a[:, i : i + 32].float() @ value[i : i + 32]).to(BF16 if dtype != HALF else HALF)
        for i in range(0, 512, 32)
    ]
    split = parts[0]
    for part in parts[1:]:
        split = split + part
    for wrong in (split.to(dtype), result * 1.05):
        with pytest.raises(AssertionError, match="times that of a correct emulation"):
            assert_rms(wrong, x.a, x.w)
    with pytest.raises(AssertionError, match="256 outputs"):
        assert_rms(result[:1], x.a[:1], x.w)


@pytest.mark.parametrize("place", [(0, 0), (1, 1), (4, 5), (2, 11), (-1, -1)], ids=str)
def test_canary(place: tuple[int, int]) -> None:
    canary = Canary(3, 7, HALF, torch.device("cpu"))
    assert canary.out.shape == (3, 7) and bool(canary.out.isnan().all())
    canary.out.fill_(1)
    canary.check()
    canary._buffer[place] = 0
    with pytest.raises(AssertionError, match="1 elements outside the output were written"):
        canary.check()


def test_poison_lies_around() -> None:
    t = torch.arange(6.0).view(2, 3)
    for carved in (carve(t), carve_rows(t)):
        assert torch.equal(carved, t)
        around = torch.empty(0).set_(carved.untyped_storage())
        assert int(around.isnan().sum()) == around.numel() - 6
    w = make_inputs(Case(act_order=True, k=64, group_size=16)).w
    poisoned = carve_weight(w)
    assert torch.equal(poisoned.dequantize(), w.dequantize())
    raw = torch.empty(0, dtype=torch.int32).set_(poisoned.qweight.untyped_storage())
    assert int((raw == 0x7FFFFFFF).sum()) >= 128


# cases and targets


def test_case_ids_are_unique_and_readable() -> None:
    every = [*CASES, *LARGE_CASES]
    assert len({str(c) for c in every}) == len(set(every)) == len(every)
    assert (
        str(Case(m=1, k=859, n=577, bits=4, group_size=128, dtype=BF16)) == "int4-g128-m1-k859-n577-bf16-int"
    )
    assert next(iter(CASES)).m == 0, "zero size first"
    assert {c.bits for c in CASES} == set(range(1, 9)) and {c.zero_kind for c in CASES} == set(ZeroKind)


def test_inputs_are_the_same_every_time() -> None:
    first, second = make_inputs(Case(bias=HALF)), make_inputs(Case(bias=HALF))
    assert torch.equal(first.a, second.a) and torch.equal(first.w.qweight, second.w.qweight)
    assert not torch.equal(first.a, make_inputs(Case(bias=FLOAT)).a)


def test_targets() -> None:
    assert "torch.blocks:cpu" in map(str, targets())
    assert targets(("none",)) == [] and {t.backend for t in targets(("torch",))} == {"torch"}


# known gaps


class Item:
    def __init__(self, name: str) -> None:
        self.name = name
        self.marks: list[pytest.MarkDecorator] = []

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark)


def gaps(directory: Path, text: str, *names: str) -> list[Item]:
    (directory / "mine.txt").write_text(text)
    items = [Item(n) for n in names]
    apply_known_gaps(items, directory)  # type: ignore[arg-type]
    return items


def test_known_gaps_are_strict(tmp_path: Path) -> None:
    text = "# a comment\n\ntest_case[mine.one:cpu-x]: why: because\n"
    bad, good = gaps(tmp_path, text, "test_case[mine.one:cpu-x]", "test_case[mine.one:cpu-y]")
    assert [m.kwargs for m in bad.marks] == [{"reason": "why: because", "strict": True}] and not good.marks
    with pytest.raises(pytest.UsageError, match="matches no test: delete the line"):
        gaps(tmp_path, text, "test_case[mine.one:cpu-y]")
    assert not gaps(tmp_path, text, "test_other")[0].marks, (
        "another backend's tests were collected: nothing to say"
    )


@pytest.mark.parametrize("line", ["test_case[mine]", "test_case[mine]: ", "test_case[mine]:reason"])
def test_known_gaps_need_a_reason(tmp_path: Path, line: str) -> None:
    (tmp_path / "mine.txt").write_text(line + "\n")
    with pytest.raises(pytest.UsageError, match="must be 'test id: reason'"):
        read_gaps(tmp_path / "mine.txt")


# the suite against a backend from outside

OUTSIDE = """
import importlib.metadata
import pytest, torch
import qmm
from qmm import registry
from qmm.testing import ConformanceSuite, targets
from qmm.testing import suite

class Turned(qmm.PreparedLayout):
    layout = "turned"
    def __init__(self, w):
        self._tensors = {k: t.flip(0) for k, t in w.tensors.present().items()}
    @property
    def tensors(self):
        return self._tensors
    def restore(self):
        return {k: t.flip(0) for k, t in self._tensors.items()}
    def refill(self, canonical):
        for k, t in self._tensors.items():
            t.copy_(canonical[k].flip(0))

class Outside(qmm.Backend):
    name = "outside"
    kernels = (
        qmm.Kernel("whole", "dequantises W whole", qmm.Tier.TEXTBOOK, qmm.Limits(devices=("cpu",), bits=(2, 3, 4, 8))),
    )
    def environment(self):
        return []
    def prepare(self, w):
        return Turned(w)
    def run(self, call, kernel, config, a, w, bias, out):
        w.prepare_for(self, release=RELEASE)
        acc = a.float() @ w.dequantize()
        if bias is not None:
            acc = acc + bias.float()
        f = torch.nn.functional
        act = dict(relu=f.relu, gelu=f.gelu, silu=f.silu, gelu_tanh=lambda t: f.gelu(t, approximate="tanh"))
        acc = act[call.activation](acc) if call.activation else acc
        out.copy_(WRONG(acc))

class Point:
    name, value = "outside", "here:Outside"
    load = staticmethod(lambda: Outside)

registry.entry_points = lambda group: (Point,)
registry._found = None

class TestOutside(ConformanceSuite):
    TARGETS = targets(("outside",))
"""

SELECTED = (
    "test_case and (m3-k70-n21 or m0-k1) and (int3 or int4 or int6) or test_exact_sums or test_updates_are_seen "
    "or test_identity or test_error_is_small or test_explain_names or test_leading_shapes or test_strided_out"
)


def judge(directory: Path, wrong: str, release: bool) -> tuple[int, dict[str, int], str]:
    """Run part of the suite on the outside backend in a process of its own."""
    source = OUTSIDE.replace("RELEASE", str(release)).replace("WRONG", f"({wrong})")
    (directory / "test_outside.py").write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--rootdir",
        str(directory),
    ]
    done = subprocess.run(
        [*command, "--import-mode=importlib", "-k", SELECTED, "test_outside.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=200,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
    )
    last = done.stdout.strip().splitlines()[-1]
    counts = {}
    for part in last.strip("= ").split(" in ")[0].split(", "):
        number, _, word = part.partition(" ")
        counts[word] = int(number)
    return done.returncode, counts, done.stdout + done.stderr


@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_a_right_backend_from_outside_passes(tmp_path: Path, release: bool) -> None:
    code, counts, text = judge(tmp_path, "lambda c: c", release)
    assert code == 0 and counts["passed"] > 40 and "failed" not in counts, text
    assert counts["skipped"] > 0, "6 bits are refused, and the refusal is checked"


@pytest.mark.parametrize(
    "wrong", ["lambda c: c * 1.02", "lambda c: c + (c == c.max()) * c.abs()"], ids=["2 %", "one element"]
)
def test_a_wrong_backend_from_outside_fails(tmp_path: Path, wrong: str) -> None:
    code, counts, text = judge(tmp_path, wrong, False)
    assert code == 1 and counts["failed"] > 20, text
