"""The part of the conformance suite that needs a GPU: streams, graphs, threads, sizes past 2**31."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor

from qmm.testing.cases import HALF, Case, Inputs, make_inputs
from qmm.testing.running import run
from qmm.testing.targets import Target
from qmm.weight import QuantizedWeight


def needs_gpu(target: Target) -> None:
    """Tests of streams and sizes have a meaning on a GPU only."""
    if target.device == "cpu":
        pytest.skip("streams, graphs and huge sizes: a GPU only")


def gpu_inputs(target: Target, case: Case | None = None) -> Inputs:
    """Operands on the GPU; the kernel has run once for them, so that everything is compiled."""
    needs_gpu(target)
    x = make_inputs(case or Case(m=4, n=256, k=512, group_size=64), target.device)
    run(target, x.a, x.w)
    return x


def capture(target: Target, a: Tensor, w: QuantizedWeight) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of one call, and the tensor its replays fill."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(target, a, w)
    return graph, result


def packed_weight(k: int, n: int, device: str) -> QuantizedWeight:
    """Random int4 words of any size, made without ever holding the codes."""
    words = torch.randint(-(2**31), 2**31 - 1, (k // 8, n), dtype=torch.int32, device=device)
    scales = torch.rand(k // 128 or 1, n, dtype=HALF, device=device) * 0.01 + 0.005
    return QuantizedWeight(words, scales, bits=4, group_size=min(k, 128), in_features=k)


class DeviceSuite:
    """Mixed into :class:`~qmm.testing.ConformanceSuite`."""

    def test_activations_are_not_kept(self, target: Target) -> None:
        """After the call nothing holds A."""
        x = make_inputs(Case(), target.device)
        a = x.a.clone()
        run(target, a, x.w)
        seen = weakref.ref(a)
        del a
        gc.collect()
        assert seen() is None

    @pytest.mark.gpu
    def test_follows_the_current_stream(self, target: Target) -> None:
        """On a side stream behind a long kernel: the launch must wait for the copy before it."""
        x = gpu_inputs(target)
        expected = run(target, x.a, x.w)
        a, stream = torch.zeros_like(x.a), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            a.copy_(x.a)
            result = run(target, a, x.w)
        torch.cuda.synchronize()
        assert torch.equal(result, expected)

    @pytest.mark.gpu
    @pytest.mark.parametrize("order", [False, "even"], ids=["plain", "act-order"])
    @pytest.mark.parametrize("m", [1, 4, 64, 300])
    def test_graph_replays_with_new_values(self, target: Target, m: int, order: bool | str) -> None:
        """Capture, change A, replay; beside eager calls; then new weights (and groups) by ``copy_``."""
        x = gpu_inputs(target, Case(m=m, n=512, k=1024, group_size=128, act_order=order))
        graph, result = capture(target, x.a, x.w)
        new = torch.randn_like(x.a)
        expected = run(target, new, x.w)
        x.a.copy_(new)
        for _ in range(3):
            result.fill_(float("nan"))
            graph.replay()
            assert torch.equal(run(target, new, x.w), expected)
            assert torch.equal(result, expected)
        case = Case(m=m, n=512, k=1024, group_size=128, act_order=order, bias=HALF)  # other numbers
        other = make_inputs(case, target.device).w
        x.w.copy_(other)
        graph.replay()
        assert torch.equal(result, run(target, new, other))

    @pytest.mark.gpu
    def test_unprepared_weight_inside_capture(self, target: Target) -> None:
        """A weight met for the first time inside capture runs on a kernel that reads the canonical form."""
        x = gpu_inputs(target)
        fresh = x.w.clone()
        graph, result = capture(target, x.a, fresh)
        result.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(result, run(target, x.a, x.w), rtol=2e-3, atol=2e-3)

    @pytest.mark.gpu
    def test_hot_path_never_synchronises(self, target: Target) -> None:
        """A second call reads nothing back from the GPU."""
        x = gpu_inputs(target)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(target, x.a, x.w)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.gpu
    def test_threads_and_streams(self, target: Target) -> None:
        """Eight threads on two streams, one weight: every result has the same bits."""
        x = gpu_inputs(target, Case(m=1, n=256, k=2048, group_size=128))
        expected = run(target, x.a, x.w)
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        wrong: list[int] = []

        def work(i: int) -> None:
            with torch.cuda.stream(streams[i % 2]):
                for _ in range(20):
                    if not torch.equal(run(target, x.a, x.w), expected):
                        wrong.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        assert not wrong

    @pytest.mark.gpu
    def test_row_stride_past_int32(self, target: Target) -> None:
        """Three rows, 2**30 elements apart."""
        x = gpu_inputs(target, Case(m=3, n=40, k=64))
        far = torch.empty(2**31 + 64, dtype=HALF, device=target.device).as_strided((3, 64), (2**30, 1))
        far.copy_(x.a)
        assert torch.equal(run(target, far, x.w), run(target, x.a, x.w))

    @pytest.mark.gpu
    def test_more_rows_than_a_grid_dimension(self, target: Target) -> None:
        """M = 1,048,577: no element stays untouched, and the last rows are right."""
        needs_gpu(target)
        m = 2**20 + 1
        w = make_inputs(Case(n=8, k=32), target.device).w
        a = torch.randn(m, 32, dtype=HALF, device=target.device)
        out = torch.full((m, 8), float("nan"), dtype=HALF, device=target.device)
        run(target, a, w, out=out)
        assert not bool(out.isnan().any())
        torch.testing.assert_close(out[-40:], run(target, a[-40:].clone(), w), rtol=2e-3, atol=2e-3)

    @pytest.mark.gpu
    def test_more_columns_than_a_grid_dimension(self, target: Target) -> None:
        """N = 2,097,152."""
        needs_gpu(target)
        w = packed_weight(32, 2**21, target.device)
        a = torch.randn(1, 32, dtype=HALF, device=target.device)
        out = torch.full((1, 2**21), float("nan"), dtype=HALF, device=target.device)
        run(target, a, w, out=out)
        assert not bool(out.isnan().any())
        torch.testing.assert_close(out[:, -64:], run(target, a, w[:, -64:]), rtol=2e-3, atol=2e-3)

    @pytest.mark.gpu
    def test_weight_past_int32(self, target: Target) -> None:
        """More than 2**31 words of packed codes: the last columns are right."""
        needs_gpu(target)
        w = packed_weight(2048, 2**23 + 24, target.device)  # 256 rows of words
        a = torch.randn(1, 2048, dtype=HALF, device=target.device)
        result = run(target, a, w)
        torch.testing.assert_close(result[:, -24:], run(target, a, w[:, -24:]), rtol=4e-3, atol=4e-3)

    @pytest.mark.gpu2
    def test_second_gpu(self, target: Target) -> None:
        """Tensors on cuda:1 while cuda:0 is current; the current device stays."""
        if torch.cuda.device_count() < 2:
            pytest.skip(f"needs two GPUs; got {torch.cuda.device_count()}")
        x = make_inputs(Case(), "cuda:1")
        torch.testing.assert_close(run(target, x.a, x.w).cpu(), run(target, x.a.to(0), x.w.to(0)).cpu())
        assert torch.cuda.current_device() == 0
