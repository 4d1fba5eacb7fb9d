"""qmm.timing: turns that rotate, checks that catch a wrong result, files that read back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from qmm.timing import (
    Contestant,
    Dense,
    Failed,
    Measured,
    Problem,
    Quantised,
    Results,
    Roof,
    alternate,
    contest,
)
from qmm.timing.clock import host_seconds, ring_size
from qmm.timing.contest import relative_error
from qmm.timing.results import this_machine

SMALL = Problem(128, 32, group_size=32)


class Wrong(Contestant):
    """1% off in one column."""

    name = "wrong"

    def bytes_each(self, problem: Problem) -> int:
        return problem.weight_bytes()

    def copies(self, problem, w, count):
        dense = w.dequantize(problem.dtype)
        dense[:, 3] *= 1.2
        return [lambda a: torch.mm(a, dense)] * count


class Broken(Wrong):
    """Raises when it runs."""

    name = "broken"

    def copies(self, problem, w, count):
        def fail(a):
            raise RuntimeError("no kernel image")

        return [fail] * count


class Unloadable(Wrong):
    """Raises when it is set up."""

    name = "unloadable"

    def copies(self, problem, w, count):
        raise ImportError("no such library")


def test_turns_rotate_and_every_sample_is_kept() -> None:
    order: list[str] = []

    def sample(name: str, seconds: float):
        def take() -> float:
            order.append(name)
            return seconds

        return take

    taken = alternate({"a": sample("a", 2.0), "b": sample("b", 3.0)}, rounds=3, replays=2, idle=0)
    assert "".join(order) == "aabb" + "bbaa" + "aabb"
    assert taken["a"].samples == (2.0,) * 6
    assert taken["b"].seconds == 3.0
    assert taken["b"].spread == 0
    assert alternate({}, idle=0) == {}


def test_a_median_and_a_spread() -> None:
    values = iter([1.0, 10.0, 2.0])
    taken = alternate({"x": lambda: next(values)}, rounds=1, replays=3, idle=0)["x"]
    assert taken.seconds == 2.0
    assert taken.spread == 9.0


def test_the_idle_comes_before_each_turn() -> None:
    start = time.monotonic()
    alternate({"a": lambda: 1.0, "b": lambda: 1.0}, rounds=2, replays=1, idle=0.02)
    assert time.monotonic() - start >= 0.08


def test_contest_measures_the_right_and_names_the_wrong() -> None:
    asked = [Dense(), Wrong(), Quantised(), Broken(), Unloadable(), Quantised("torch.blocks")]
    found = list(contest(SMALL, asked, [1, 5], rounds=1, replays=2, idle=0))
    measured = {(f.contestant, f.m): f for f in found if isinstance(f, Measured)}
    assert set(measured) == {(name, m) for name in ("torch.mm", "qmm", "torch.blocks") for m in (1, 5)}
    assert all(len(f.taken.samples) == 2 and f.taken.seconds > 0 for f in measured.values())
    assert measured["qmm", 5].facts["kernel"] == "torch.blocks"
    assert 0 < measured["qmm", 5].error < 1e-3
    failed = {(f.contestant, f.m): f.why for f in found if isinstance(f, Failed)}
    assert set(failed) == {("wrong", 1), ("wrong", 5), ("broken", 1), ("broken", 5), ("unloadable", None)}
    assert failed["wrong", 5].startswith("wrong: relative error")
    assert failed["broken", 1] == "RuntimeError: no kernel image"
    assert failed["unloadable", None] == "ImportError: no such library"


def test_contest_past_its_deadline_times_nothing() -> None:
    found = list(contest(SMALL, [Dense(), Quantised()], [1], deadline=time.monotonic() - 1))
    assert [(f.contestant, f.m, f.why) for f in found if isinstance(f, Failed)] == [
        ("torch.mm", None, "no time left"),
        ("qmm", None, "no time left"),
    ]
    assert len(found) == 2


@pytest.mark.parametrize("kernel", ["triton.tiled", "torch.blocks"])
def test_a_forced_kernel_gives_its_reasons(kernel: str) -> None:
    problem = Problem(64, 16, group_size=32, dtype=torch.float64)
    why = Quantised(kernel).why_not_rows(problem, SMALL.weight(), torch.zeros(1, 128, dtype=torch.float64))
    assert ("a.dtype" in why) == (kernel == "triton.tiled")


@pytest.mark.parametrize(
    "problem",
    [
        SMALL,
        Problem(256, 40, bits=8, group_size=64, zeros=True),
        Problem(96, 8, bits=3, group_size=32, dtype=torch.bfloat16),
        Problem(512, 16, group_size=64, zeros=True, dtype=torch.float32),
    ],
)
def test_a_problem_s_weight_is_as_it_says(problem: Problem) -> None:
    w = problem.weight()
    assert (w.spec.in_features, w.spec.out_features) == (problem.k, problem.n)
    assert (w.spec.bits, w.spec.group_size) == (problem.bits, problem.group_size)
    assert w.tensors.scales.dtype == problem.dtype
    assert (w.unpack_zeros() is not None) == problem.zeros
    assert w.nbytes == problem.weight_bytes()
    assert w.unpack().unique().numel() > min(16, 1 << problem.bits) / 2  # all sorts of codes
    again = problem.weight()
    assert torch.equal(again.qweight, w.qweight)


def test_bytes_and_operations() -> None:
    p = Problem(8192, 8192)
    assert p.weight_bytes() == 8192 * 8192 // 2 + 64 * 8192 * 2
    assert p.moved(1) == p.weight_bytes() + 2 * (8192 + 8192)
    assert p.flops(16) == 2 * 16 * 8192 * 8192
    roof = Roof(4.3e12, 790e12)
    assert roof.seconds(p.moved(1), p.flops(1)) == pytest.approx(8.05e-6, rel=1e-3)
    assert roof.seconds(p.moved(4096), p.flops(4096)) == pytest.approx(695.9e-6, rel=1e-3)


def test_relative_error_and_ring_size() -> None:
    exact = torch.tensor([[3.0, 4.0]])
    assert relative_error(torch.tensor([[3.0, 5.0]]), exact) == pytest.approx(0.2)
    assert ring_size(1, "cpu") == 1


def test_host_seconds_counts_calls() -> None:
    calls = []
    assert host_seconds(lambda: calls.append(1), "cpu", batches=2) > 0
    assert len(calls) == 3 * 200


def test_results_read_back(tmp_path: Path) -> None:
    results = Results(this_machine("cpu"), Roof(1e9, 1e9), how="a test", host_us={"qmm": 1.5})
    for found in contest(SMALL, [Dense(), Wrong()], [2], rounds=1, replays=1, idle=0):
        results.add(found)
    path = tmp_path / "new" / "times.json"
    results.save(path)
    assert Results.load(path) == results
    assert [p.contestant for p in results.points] == ["torch.mm"]
    assert results.left_out[0]["contestant"] == "wrong"
    assert results.machine["torch"]


@pytest.mark.parametrize(
    ("text", "said"), [("{", "must be JSON"), ('{"schema": "x"}', "schema"), ("[]", "schema")]
)
def test_another_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        Results.load(path)
