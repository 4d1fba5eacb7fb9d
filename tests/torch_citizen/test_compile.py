"""torch.compile: one graph for all M but 0 and 1, no break, the same bits; updates, states and facts are seen."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

import qmm
import qmm.nn
from qmm import QuantizedWeight
from qmm.op import parts
from qmm.testing import Case, Target, make_inputs, targets
from qmm.weight import ZeroKind

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
ROWS = (0, 1, 3, 5, 17, 64, 300)
COMPILERS = ["aot_eager", *(["inductor"] if shutil.which("g++") or shutil.which("clang++") else [])]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Counter:
    """A compiler that counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


class Layer(torch.nn.Module):
    """A weight as a plain attribute."""

    def __init__(self, w: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.w, self.bias = w, bias

    def forward(self, a: Tensor) -> Tensor:
        return qmm.matmul(a * 2, self.w, bias=self.bias, activation="silu") + 1


@pytest.mark.parametrize("owner", ["argument", "attribute", "closure"])
def test_at_most_three_graphs(owner: str) -> None:
    """M = 0, M = 1 and any other, wherever the weight comes from."""
    x = make_inputs(Case(m=max(ROWS), bias=FLOAT))
    counter = Counter()
    layer = Layer(x.w, x.bias)
    if owner == "argument":
        compiled = torch.compile(_with_argument, fullgraph=True, dynamic=True, backend=counter)
        call = lambda a: compiled(a, x.w, x.bias)  # noqa: E731
    elif owner == "attribute":
        call = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    else:
        call = torch.compile(lambda a: layer(a), fullgraph=True, dynamic=True, backend=counter)
    for m in ROWS:
        assert torch.equal(call(x.a[:m]), layer(x.a[:m])), m
    assert len(counter.graphs) <= 3
    for graph in counter.graphs:
        assert str(graph.graph).count("qmm.matmul") == 1


def _with_argument(a: Tensor, w: QuantizedWeight, bias: Tensor | None) -> Tensor:
    return qmm.matmul(a * 2, w, bias=bias, activation="silu") + 1


@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_compiler(compiler: str) -> None:
    x = make_inputs(Case(m=max(ROWS), k=64))
    layer = Layer(x.w)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=compiler)
    for m in (3, 300) if compiler == "inductor" else ROWS:  # its compiler is slow
        assert torch.equal(compiled(x.a[:m]), layer(x.a[:m])), m


@pytest.mark.parametrize("target", targets(), ids=str)
def test_every_kernel(target: Target) -> None:
    """The backend that is named at trace time runs."""
    x = make_inputs(Case(m=3, n=9, k=40, bias=HALF), target.device)
    call = lambda a: qmm.matmul(a, x.w, bias=x.bias, backend=target.backend, kernel=target.kernel)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (3, 1):
        assert torch.equal(compiled(x.a[:m]), call(x.a[:m]))


def test_one_graph_for_weights_of_the_same_facts() -> None:
    """A block that is compiled once serves all layers; another kind of weight is seen."""
    case = Case(m=3)
    counter = Counter()
    compiled = torch.compile(_with_argument, fullgraph=True, backend=counter)
    x = make_inputs(case)
    weights = [x.w, x.w.clone(), copy.deepcopy(x.w)]
    weights[1].copy_(make_inputs(Case(m=3, bias=HALF)).w)
    for w in weights:
        assert torch.equal(compiled(x.a, w, None), _with_argument(x.a, w, None))
    assert len(counter.graphs) == 1
    # the same shapes and dtypes, another meaning
    as_float = QuantizedWeight.from_codes(
        x.w.unpack(), x.w.scales, x.w.scales.clone(), bits=4, group_size=32, zero_kind="float"
    )
    as_bias = QuantizedWeight.from_codes(
        x.w.unpack(), x.w.scales, x.w.scales.clone(), bits=4, group_size=32, zero_kind="bias"
    )
    for w in (as_float, as_bias):
        assert torch.equal(compiled(x.a, w, None), _with_argument(x.a, w, None))
    assert len(counter.graphs) == 3


def test_updates_in_place_are_seen() -> None:
    """``copy_`` after compilation, also to values past float16's range, and new graphs only where facts change."""
    x = make_inputs(Case(m=3, zero_kind=ZeroKind.NONE))
    layer, counter = Layer(x.w), Counter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    compiled(x.a)
    x.w.copy_(make_inputs(Case(m=3, zero_kind=ZeroKind.NONE, bias=HALF)).w)
    assert torch.equal(compiled(x.a), layer(x.a)) and len(counter.graphs) == 1
    large = QuantizedWeight.from_codes(
        x.w.unpack(), torch.full_like(x.w.scales, 60000.0), bits=4, group_size=32
    )
    x.w.copy_(large)
    a = torch.full_like(x.a, 2.0**-12)
    assert torch.equal(compiled(a), layer(a)) and bool(torch.isfinite(compiled(a)).all())


def test_the_backend_is_chosen_at_trace_time() -> None:
    """Also by ``use_backend``; it stays chosen."""
    x = make_inputs(Case(m=2))
    counter = Counter()
    compiled = torch.compile(_with_argument, fullgraph=True, backend=counter)
    with qmm.use_backend("torch"):
        compiled(x.a, x.w, None)
    (graph,) = counter.graphs
    assert "backend=torch;kernel=-" in str(graph.graph)
    compiled(x.a, x.w, None)
    assert len(counter.graphs) == 1


def test_a_refusal_while_tracing() -> None:
    """A backend that is named and cannot run is not replaced by another."""
    x = make_inputs(Case(m=2, dtype=torch.float64))
    call = lambda a: qmm.matmul(a, x.w, backend="numba")  # noqa: E731
    with pytest.raises(Exception, match=r"a\.dtype in|numba >="):
        torch.compile(call, fullgraph=True, backend="eager")(x.a)


@pytest.mark.parametrize("wrong", ["K", "activation", "out"])
def test_mistakes_while_tracing(wrong: str) -> None:
    x = make_inputs(Case(m=2, k=64))
    options: dict[str, Any] = {"activation": "tanh"} if wrong == "activation" else {}
    if wrong == "out":
        options["out"] = torch.empty(1, 1, dtype=HALF)
    a = x.a[:, :63] if wrong == "K" else x.a
    with pytest.raises(Exception, match={"K": "last size", "activation": "gelu_tanh", "out": "out"}[wrong]):
        torch.compile(lambda t: qmm.matmul(t, x.w, **options), fullgraph=True, backend="eager")(a)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_out(compiler: str) -> None:
    """``out`` is filled; a strided one too."""
    x = make_inputs(Case(m=3, n=10))
    buffer = torch.full((3, 20), -1.5, dtype=HALF)

    def call(a: Tensor, out: Tensor) -> Tensor:
        return qmm.matmul(a, x.w, out=out) * 2

    result = torch.compile(call, fullgraph=True, backend=compiler)(x.a, buffer[:, ::2])
    expected = qmm.matmul(x.a, x.w)
    assert torch.equal(buffer[:, ::2], expected) and torch.equal(result, expected * 2)
    assert bool((buffer[:, 1::2] == -1.5).all())


def test_autocast_while_tracing() -> None:
    x = make_inputs(Case(m=3, dtype=FLOAT))
    with torch.autocast("cpu", dtype=BF16):
        compiled = torch.compile(_with_argument, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x.a, x.w, None), _with_argument(x.a, x.w, None))


def test_a_block_compiled_once_finds_the_weight_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it what is planned and prepared for it, instead of making it anew at each call."""
    layers = [qmm.nn.QuantLinear.from_weight(make_inputs(Case(k=64)).w) for _ in range(3)]
    found: list[bool] = []

    def noted(*arguments: Any) -> tuple[QuantizedWeight, bool]:
        result = parts.weight_of(*arguments)
        found.append(result[1])
        return result

    monkeypatch.setattr("qmm.op.run.weight_of", noted)
    counter = Counter()
    block = torch.compile(qmm.nn.QuantLinear.forward, fullgraph=True, backend=counter)
    a = make_inputs(Case(m=3, k=64)).a
    for layer in layers:
        assert torch.equal(block(layer, a), layer(a))
    assert len(counter.graphs) == 1 and found == [True] * 3
