"""One table of bad input: each gives one clear error that names field, rule and value, and writes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import qmm
from qmm import QuantizedWeight, UnsupportedError, WeightFormatError

HALF = torch.float16
K, N, G = 64, 8, 2


def words(rows: int = 8, columns: int = N) -> Tensor:
    return torch.zeros(rows, columns, dtype=torch.int32)


def scales(rows: int = G, columns: int = N, dtype: torch.dtype = HALF) -> Tensor:
    return torch.ones(rows, columns, dtype=dtype)


def weight(**changes: Any) -> QuantizedWeight:
    fields: dict[str, Any] = {
        "qweight": words(), "scales": scales(), "bits": 4, "group_size": 32, "in_features": K, **changes
    }  # fmt: skip
    return QuantizedWeight(fields.pop("qweight"), fields.pop("scales"), **fields)


def codes(**changes: Any) -> QuantizedWeight:
    fields: dict[str, Any] = {
        "codes_kn": torch.zeros(K, N, dtype=torch.int64), "scales": scales(), "bits": 4, "group_size": 32, **changes
    }  # fmt: skip
    return QuantizedWeight.from_codes(fields.pop("codes_kn"), fields.pop("scales"), **fields)


def seed(**changes: Any) -> QuantizedWeight:
    fields: dict[str, Any] = {
        "qw": words(),
        "scales": scales(),
        "qzeros": None,
        "w_bit": 4,
        "group_size": 32,
        **changes,
    }
    return QuantizedWeight.from_seed(**fields)


def state(**changes: Any) -> QuantizedWeight:
    full = {**weight().state_dict(), **changes}
    return QuantizedWeight.from_state_dict({k: t for k, t in full.items() if t is not None})


def quantize(value: Any = None, **options: Any) -> QuantizedWeight:
    return qmm.quantize(torch.zeros(N, K) if value is None else value, **options)


def activations(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.zeros(*(shape or (3, K)), dtype=dtype)


def matmul(a: Any = None, w: Any = None, **options: Any) -> Tensor:
    return qmm.matmul(activations() if a is None else a, weight() if w is None else w, **options)


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3, N, dtype=HALF)


def negated() -> Tensor:
    return torch.view_as_complex(torch.zeros(3, N, 2)).conj().imag


def shared_with_a() -> Tensor:
    a = activations(3, K)
    return matmul(a, out=a[:, 4 : 4 + N])


def shared_with_scales() -> Tensor:
    w = weight(scales=scales(G, N))
    return matmul(activations(1, K), w, out=w.scales[:1])


def shared_with_bias() -> Tensor:
    bias = torch.zeros(N, dtype=HALF)
    return matmul(activations(1, K), bias=bias, out=bias.view(1, N))


def dual(bias: bool = False) -> Tensor:
    w, t = weight(), torch.zeros(N) if bias else activations()
    call = (lambda t: matmul(w=w, bias=t)) if bias else (lambda t: matmul(t, w))
    call(t)  # what has been seen is checked less
    with torch.no_grad(), forward_ad.dual_level():
        return call(forward_ad.make_dual(t, torch.ones_like(t)))


def transformed(transform: Callable[[Callable[[Tensor], Tensor]], Any]) -> Any:
    w = weight()  # outside of the transform
    return transform(lambda a: matmul(a, w))


def grad(t: Tensor) -> Tensor:
    return t.requires_grad_()


class Bad(NamedTuple):
    """What is wrong, and what the text of the error must hold."""

    call: Callable[[], Any]
    error: type[Exception]
    text: tuple[str, ...]


W, T, V, U = WeightFormatError, TypeError, ValueError, UnsupportedError

TABLE: dict[str, Bad] = {
    # the constructor
    "qweight: list": Bad(lambda: weight(qweight=[[0]]), W, ("qweight", "must be a torch.Tensor", "list")),
    "qweight: float": Bad(
        lambda: weight(qweight=torch.zeros(8, N)), W, ("qweight", "must be int32", "float32")
    ),
    "qweight: three dimensions": Bad(
        lambda: weight(qweight=torch.zeros(2, 8, N, dtype=torch.int32)),
        W,
        ("qweight", "2 dimensions", "experts", "(2, 8, 8)"),
    ),
    "qweight: rows": Bad(
        lambda: weight(qweight=words(9)), W, ("qweight", "ceil(K*bits/32) = 8 rows", "K=64", "got 9")
    ),
    "qweight: no columns": Bad(
        lambda: weight(qweight=words(8, 0), scales=scales(2, 0)),
        W,
        ("qweight", "at least one column", "got 0"),
    ),
    "qweight: sparse": Bad(lambda: weight(qweight=words().to_sparse()), W, ("qweight", "dense", "sparse")),
    "qweight: bits past the end": Bad(
        lambda: weight(qweight=words() - 1, in_features=60), W, ("qweight", "bits past code 59 must be 0")
    ),
    "scales: integers": Bad(
        lambda: weight(scales=scales(dtype=torch.int64)), W, ("scales", "float16, bfloat16", "int64")
    ),
    "scales: rows": Bad(
        lambda: weight(scales=scales(4)),
        W,
        ("scales", "ceil(K/group_size) = 2 rows", "group_size=32", "got 4"),
    ),  # CASES 26
    "scales: columns": Bad(lambda: weight(scales=scales(2, 7)), W, ("scales", "[G, N] = [2, 8]", "[2, 7]")),
    "scales: one dimension": Bad(
        lambda: weight(scales=torch.ones(N)), W, ("scales", "2 dimensions [G, N]", "(8,)")
    ),
    "scales: other device": Bad(
        lambda: weight(scales=scales().to("meta")), W, ("scales", "qweight's device cpu", "meta")
    ),
    "scales: int8 alone": Bad(
        lambda: weight(scales=scales(dtype=torch.int8)), W, ("scales", "int8 need scale2", "no scale2")
    ),
    "bits: 0": Bad(lambda: weight(bits=0), W, ("bits", "from 1 to 8", "got 0")),
    "bits: 9": Bad(lambda: weight(bits=9), W, ("bits", "from 1 to 8", "got 9")),
    "bits: text": Bad(lambda: weight(bits="4"), W, ("bits", "must be an integer", "'4'")),
    "bits: True": Bad(lambda: weight(bits=True), W, ("bits", "must be an integer", "True")),
    "group_size: 0": Bad(lambda: weight(group_size=0), W, ("group_size", "from 1", "got 0")),
    "group_size: -2": Bad(lambda: weight(group_size=-2), W, ("group_size", "from 1", "got -2")),
    "group_size: -1.0": Bad(lambda: weight(group_size=-1.0), W, ("group_size", "must be an integer", "-1.0")),
    "in_features: 0": Bad(lambda: weight(in_features=0), W, ("in_features", "from 1", "got 0")),
    "in_features: half": Bad(
        lambda: weight(in_features=64.5), W, ("in_features", "must be an integer", "64.5")
    ),
    "zeros: unpacked integers": Bad(
        lambda: weight(zeros=torch.zeros(G, N, dtype=torch.int64)),
        W,
        ("zeros", "packed int32 words", "int64"),
    ),
    "zeros: shape": Bad(
        lambda: weight(zeros=words(2)), W, ("zeros", "[ceil(G*bits/32), N] = [1, 8]", "[2, 8]")
    ),
    "zeros: bits past the end": Bad(
        lambda: weight(zeros=words(1) - 1), W, ("zeros", "bits past zero point 1 must be 0")
    ),
    "zeros: float32 of kind int": Bad(
        lambda: weight(zeros=scales(), zero_kind="int"), W, ("zeros", "of kind int", "int32", "float16")
    ),
    "zeros: kind without them": Bad(
        lambda: weight(zero_kind="float"), W, ("zeros", "must be given for zero kind float", "None")
    ),
    "zeros: with kind none": Bad(
        lambda: weight(zeros=scales(), zero_kind="none"), W, ("zeros", "must be absent", "none")
    ),
    "zero_kind: unknown": Bad(
        lambda: weight(zeros=scales(), zero_kind="both"), W, ("zero_kind", "none, int, float, bias", "'both'")
    ),
    "g_idx: past G": Bad(
        lambda: weight(g_idx=torch.full((K,), 2, dtype=torch.int32)), W, ("g_idx", "[0, G) with G=2", "got 2")
    ),
    "g_idx: negative": Bad(
        lambda: weight(g_idx=torch.full((K,), -7, dtype=torch.int32)),
        W,
        ("g_idx", "[0, G) with G=2", "got -7"),
    ),
    "g_idx: int64": Bad(
        lambda: weight(g_idx=torch.zeros(K, dtype=torch.int64)), W, ("g_idx", "must be int32", "int64")
    ),
    "g_idx: length": Bad(
        lambda: weight(g_idx=torch.zeros(9, dtype=torch.int32)), W, ("g_idx", "[K] = [64]", "[9]")
    ),
    "codebook: length": Bad(
        lambda: weight(codebook=torch.zeros(15)), W, ("codebook", "[2**bits] = [16]", "[15]")
    ),
    "codebook: dtype": Bad(
        lambda: weight(codebook=torch.zeros(16, dtype=torch.float64)),
        W,
        ("codebook", "float32", "got float64"),
    ),
    "codebook: with zeros": Bad(
        lambda: weight(codebook=torch.zeros(16), zeros=scales()),
        W,
        ("zeros", "must be absent when there is a codebook"),
    ),
    "scale2: dtype": Bad(
        lambda: weight(scale2=torch.ones(1, dtype=HALF)), W, ("scale2", "must be float32", "float16")
    ),
    "scale2: shape": Bad(
        lambda: weight(scale2=torch.ones(2)), W, ("scale2", "[1] or [ceil(G/r), N]", "(2,)")
    ),
    "scale2: ratio": Bad(
        lambda: weight(scale2=torch.ones(2, N), scale2_ratio=2),
        W,
        ("scale2", "[ceil(G/2), N] = [1, 8]", "[2, 8]"),
    ),
    "scale2: no rows": Bad(
        lambda: weight(scale2=torch.ones(0, N)), W, ("scale2_ratio", "divide G=2", "0 rows")
    ),
    "scale2_divides: alone": Bad(
        lambda: weight(scale2_divides=True), W, ("scale2_divides", "needs scale2", "got True")
    ),
    "scale2_divides: number": Bad(
        lambda: weight(scale2=torch.ones(1), scale2_divides=1),
        W,
        ("scale2_divides", "True or False", "got 1"),
    ),
    "cat: one divides": Bad(
        lambda: QuantizedWeight.cat(
            [weight(scale2=torch.ones(1), scale2_divides=divides) for divides in (True, False)]
        ),
        W,
        ("weights[1]", "scale2_divides of weights[0], True", "got False"),
    ),
    "scale2_ratio: alone": Bad(lambda: weight(scale2_ratio=1), W, ("scale2_ratio", "needs scale2", "got 1")),
    "zero2: without bias": Bad(
        lambda: weight(zero2=torch.ones(1)), W, ("zero2", "needs zeros of kind bias", "none")
    ),
    # from_codes
    "from_codes: list": Bad(lambda: codes(codes_kn=[[1]]), W, ("codes_kn", "must be a torch.Tensor", "list")),
    "from_codes: float": Bad(
        lambda: codes(codes_kn=torch.zeros(K, N)), W, ("codes_kn", "integer dtype", "float32")
    ),
    "from_codes: experts": Bad(
        lambda: codes(codes_kn=torch.zeros(2, K, N, dtype=torch.uint8)),
        W,
        ("codes_kn", "2 dimensions", "experts", "[2, 64, 8]"),
    ),
    "from_codes: empty": Bad(
        lambda: codes(codes_kn=torch.zeros(0, N, dtype=torch.uint8)), W, ("in_features", "from 1", "got 0")
    ),
    "from_codes: 16 in 4 bits": Bad(
        lambda: codes(codes_kn=torch.full((K, N), 16)), W, ("codes_kn", "[0, 15] for bits=4", "got 16")
    ),
    "from_codes: negative": Bad(
        lambda: codes(codes_kn=torch.full((K, N), -1)), W, ("codes_kn", "[0, 15]", "got -1")
    ),
    "from_codes: zeros past the top": Bad(
        lambda: codes(zeros=torch.full((G, N), 16)), W, ("zeros", "[0, 15]", "got 16")
    ),
    "from_codes: one row of zeros": Bad(
        lambda: codes(zeros=torch.full((1, N), 8)), W, ("zeros", "[G, N] = [2, 8]", "got [1, 8]")
    ),
    "from_codes: too many rows of zeros": Bad(
        lambda: codes(zeros=torch.zeros(3, N, dtype=torch.uint8)),
        W,
        ("zeros", "[G, N] = [2, 8]", "got [3, 8]"),
    ),
    "from_codes: zeros of one column": Bad(
        lambda: codes(zeros=torch.full((G, 1), 8)), W, ("zeros", "[G, N] = [2, 8]", "got [2, 1]")
    ),
    "from_codes: zeros without scales": Bad(
        lambda: codes(scales=[1.0], zeros=torch.full((G, N), 8)),
        W,
        ("scales", "must be a torch.Tensor", "list"),
    ),
    "from_codes: zeros list": Bad(lambda: codes(zeros=[8]), W, ("zeros", "must be a torch.Tensor", "list")),
    "from_codes: integer zeros of kind float": Bad(
        lambda: codes(zeros=torch.zeros(G, N, dtype=torch.uint8), zero_kind="float"),
        W,
        ("zeros", "of kind float", "uint8"),
    ),
    "from_codes: unknown kind": Bad(
        lambda: codes(zeros=torch.zeros(G, N, dtype=torch.uint8), zero_kind="some"),
        W,
        ("zero_kind", "'some'"),
    ),
    "from_codes: g_idx float": Bad(
        lambda: codes(g_idx=torch.zeros(K)), W, ("g_idx", "integer dtype", "float32")
    ),
    "from_codes: g_idx past int32": Bad(
        lambda: codes(g_idx=torch.full((K,), 2**32)), W, ("g_idx", "must fit int32", str(2**32))
    ),
    "from_codes: bits": Bad(lambda: codes(bits=None), W, ("bits", "must be an integer", "None")),
    # from_seed
    "from_seed: 3 bits": Bad(lambda: seed(w_bit=3), W, ("w_bit", "1, 2, 4 or 8", "got 3")),
    "from_seed: float words": Bad(lambda: seed(qw=torch.zeros(8, N)), W, ("qw", "must be int32", "float32")),
    "from_seed: zeros for other groups": Bad(
        lambda: seed(qzeros=words(2)), W, ("zeros", "= [1, 8]", "[2, 8]")
    ),
    "from_seed: scales list": Bad(
        lambda: seed(scales=[1.0]), W, ("scales", "must be a torch.Tensor", "list")
    ),
    # from_state_dict
    "state_dict: no mapping": Bad(
        lambda: QuantizedWeight.from_state_dict([1]), T, ("state_dict", "mapping", "list")
    ),  # type: ignore[arg-type]
    "state_dict: empty": Bad(
        lambda: QuantizedWeight.from_state_dict({}, "l."), W, ("l.qweight, l.scales, l.facts", "empty")
    ),
    "state_dict: without scales": Bad(
        lambda: state(scales=None), W, ("must have scales", "facts, qweight")
    ),  # CASES 112
    "state_dict: unknown key": Bad(lambda: state(extra=words()), W, ("keys", "among qweight", "['extra']")),
    "state_dict: facts list": Bad(lambda: state(facts=[1]), W, ("facts", "must be a torch.Tensor", "list")),
    "state_dict: facts dtype": Bad(lambda: state(facts=torch.zeros(8)), W, ("facts", "int64 [8]", "float32")),
    "state_dict: facts on meta": Bad(
        lambda: state(facts=torch.zeros(8, dtype=torch.int64, device="meta")),
        W,
        ("facts", "must hold values", "meta"),
    ),
    "state_dict: version": Bad(
        lambda: state(facts=torch.full((8,), 2)), W, ("facts", "version must be 1", "got 2")
    ),
    "state_dict: zero kind": Bad(
        lambda: state(facts=torch.tensor([1, 4, 32, K, 9, -1, -1, 0])), W, ("facts", "zero kind", "got 9")
    ),
    "state_dict: scale2_divides": Bad(
        lambda: state(facts=torch.tensor([1, 4, 32, K, 0, -1, -1, 2])), W, ("facts", "0 or 1", "got 2")
    ),
    # quantize
    "quantize: list": Bad(lambda: quantize([[1.0]]), T, ("weight_nk", "must be a torch.Tensor", "list")),
    "quantize: integers": Bad(
        lambda: quantize(torch.zeros(N, K, dtype=torch.int32)), T, ("weight_nk", "float16", "int32")
    ),
    "quantize: float64": Bad(
        lambda: quantize(torch.zeros(N, K).double()), T, ("weight_nk", "float32", "float64")
    ),
    "quantize: one dimension": Bad(
        lambda: quantize(torch.zeros(K)), V, ("weight_nk", "2 dimensions [N, K]", "[64]")
    ),
    "quantize: experts": Bad(
        lambda: quantize(torch.zeros(2, N, K)), V, ("weight_nk", "2 dimensions [N, K]", "[2, 8, 64]")
    ),
    "quantize: no rows": Bad(
        lambda: quantize(torch.zeros(0, K)), V, ("weight_nk", "at least one row", "[0, 64]")
    ),
    "quantize: no columns": Bad(
        lambda: quantize(torch.zeros(N, 0)), V, ("weight_nk", "one column", "[8, 0]")
    ),
    "quantize: sparse": Bad(
        lambda: quantize(torch.zeros(N, K).to_sparse()), T, ("weight_nk", "dense", "sparse")
    ),
    "quantize: NaN": Bad(
        lambda: quantize(torch.full((N, K), math.nan)), V, ("weight_nk", "finite", "nan at [0, 0]", "512")
    ),
    "quantize: Inf": Bad(
        lambda: quantize(torch.full((N, K), -math.inf)), V, ("weight_nk", "finite", "-inf at [0, 0]")
    ),
    "quantize: one symmetric bit": Bad(
        lambda: quantize(bits=1), V, ("bits", "2 to 8 where symmetric", "got 1")
    ),
    "quantize: 9 bits": Bad(lambda: quantize(bits=9), V, ("bits", "from 1 to 8", "got 9")),
    "quantize: group 0": Bad(lambda: quantize(group_size=0), V, ("group_size", "from 1", "got 0")),
    "quantize: method": Bad(lambda: quantize(method="best"), V, ("method", "minmax, mse", "'best'")),
    "quantize: symmetric": Bad(lambda: quantize(symmetric="no"), T, ("symmetric", "must be a bool", "'no'")),
    "quantize: scale_dtype": Bad(
        lambda: quantize(scale_dtype=torch.int8), V, ("scale_dtype", "float16", "int8")
    ),
    "quantize: scale_dtype text": Bad(
        lambda: quantize(scale_dtype="fp16"), V, ("scale_dtype", "float16", "'fp16'")
    ),
    "quantize: past float16": Bad(
        lambda: quantize(torch.full((N, K), 1e30)),
        V,
        ("scale_dtype", "float16", "65504", "row 0, group 0", "float32"),
    ),
    # matmul
    "a: array": Bad(lambda: matmul(np.zeros((3, K))), T, ("a:", "must be a torch.Tensor", "ndarray")),
    "a: integers": Bad(
        lambda: matmul(activations(dtype=torch.int32)), T, ("a:", "float16, bfloat16, float32", "int32")
    ),
    "a: complex": Bad(lambda: matmul(activations(dtype=torch.complex64)), T, ("a:", "dtype", "complex64")),
    "a: float8": Bad(
        lambda: matmul(activations().to(torch.float8_e4m3fn)), T, ("a:", "dtype", "float8_e4m3fn")
    ),
    "a: sparse": Bad(lambda: matmul(torch.zeros(3, K).to_sparse()), T, ("a:", "dense", "sparse")),
    "a: K": Bad(lambda: matmul(activations(3, 63)), V, ("a:", "(3, 63)", "in_features=64")),
    "a: transposed": Bad(lambda: matmul(activations(K, 3)), V, ("a:", "last size", "(64, 3)")),
    "a: scalar": Bad(lambda: matmul(torch.tensor(1.0)), V, ("a:", "last size", "()")),
    "a: device": Bad(lambda: matmul(activations().to("meta")), V, ("one device", "a on meta", "w on cpu")),
    "a: wants a gradient": Bad(
        lambda: matmul(grad(activations())), NotImplementedError, ("no gradient", "torch.no_grad()", "detach")
    ),
    "w: tensor": Bad(lambda: matmul(w=torch.zeros(K, N)), T, ("w:", "qmm.QuantizedWeight", "Tensor")),
    "w: swapped": Bad(
        lambda: qmm.matmul(weight(), activations()), T, ("w:", "qmm.QuantizedWeight", "Tensor")
    ),  # type: ignore[arg-type]
    "bias: list": Bad(lambda: matmul(bias=[0.0] * N), T, ("bias", "must be a torch.Tensor", "list")),
    "bias: shape": Bad(lambda: matmul(bias=torch.zeros(1, N)), V, ("bias", "(8,)", "(1, 8)")),
    "bias: K long": Bad(lambda: matmul(bias=torch.zeros(K)), V, ("bias", "(8,)", "(64,)")),
    "bias: integers": Bad(
        lambda: matmul(bias=torch.zeros(N, dtype=torch.int64)), T, ("bias", "dtype", "int64")
    ),
    "bias: device": Bad(
        lambda: matmul(bias=torch.zeros(N, device="meta")), V, ("one device", "bias on meta")
    ),
    "bias: wants a gradient": Bad(
        lambda: matmul(bias=grad(torch.zeros(N))), NotImplementedError, ("no gradient", "bias")
    ),
    "matmul: forward-mode a": Bad(dual, NotImplementedError, ("forward-mode", "tangent", "primal")),
    "matmul: a nested": Bad(
        lambda: matmul(torch.nested.nested_tensor([torch.zeros(2, K), torch.zeros(1, K)])),
        T,
        ("a", "dense strided", "nested"),
    ),
    "matmul: bias nested": Bad(
        lambda: matmul(bias=torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)])),
        T,
        ("bias", "dense strided", "nested"),
    ),
    "matmul: kernel list": Bad(lambda: matmul(kernel=["tiled"]), T, ("kernel", "None or a str", "got list")),
    "matmul: vmap over a bias": Bad(
        lambda: torch.vmap(lambda bias: matmul(bias=bias))(torch.zeros(2, N)),
        NotImplementedError,
        ("vmap", "a alone", "bias"),
    ),
    "matmul: torch.func.jvp": Bad(
        lambda: transformed(lambda f: torch.func.jvp(f, (activations(),), (activations(),))),
        NotImplementedError,
        ("forward-mode", "tangent", "primal"),
    ),
    "matmul: forward-mode bias": Bad(lambda: dual(bias=True), NotImplementedError, ("forward-mode", "bias")),
    "activation: unknown": Bad(
        lambda: matmul(activation="tanh"), V, ("activation", "relu, gelu, gelu_tanh, silu", "'tanh'")
    ),
    "activation: function": Bad(lambda: matmul(activation=torch.relu), V, ("activation", "relu", "built-in")),
    "activation: array": Bad(lambda: matmul(activation=np.zeros(3)), V, ("activation", "relu", "array")),
    "deterministic: 2": Bad(
        lambda: matmul(deterministic=2), V, ("deterministic", "True, False or 'batch'", "got 2")
    ),
    "deterministic: 1": Bad(
        lambda: matmul(deterministic=1), V, ("deterministic", "True, False or 'batch'", "got 1")
    ),
    "deterministic: text": Bad(lambda: matmul(deterministic="yes"), V, ("deterministic", "'batch'", "'yes'")),
    "deterministic: array": Bad(
        lambda: matmul(deterministic=np.zeros(3)), V, ("deterministic", "'batch'", "array")
    ),
    "out: list": Bad(lambda: matmul(out=[]), T, ("out", "must be a torch.Tensor", "list")),
    "out: shares memory with a": Bad(shared_with_a, V, ("out", "must not share memory", "overlapping a")),
    "out: shares memory with scales": Bad(
        shared_with_scales, V, ("out", "must not share memory", "overlapping w.scales")
    ),
    "out: shares memory with bias": Bad(
        shared_with_bias, V, ("out", "must not share memory", "overlapping bias")
    ),
    "backend: unknown": Bad(
        lambda: matmul(backend="cuda"), V, ("backend=", "auto, triton, torch, numba", "'cuda'")
    ),
    "backend: None": Bad(lambda: matmul(backend=None), T, ("backend=", "must be a str", "NoneType")),
    "backend: unknown, meta": Bad(
        lambda: qmm.matmul(activations().to("meta"), weight().to("meta"), backend="cuda"),
        V,
        ("backend=", "'cuda'"),
    ),
    "kernel: unknown": Bad(lambda: matmul(kernel="fast"), V, ("kernel", "torch.blocks", "'fast'")),
    "kernel: of another backend": Bad(
        lambda: matmul(backend="torch", kernel="triton.tiled"),
        V,
        ("kernel", "torch.blocks", "'triton.tiled'"),
    ),
    "kernel: number": Bad(lambda: matmul(kernel=1), T, ("kernel", "must be None or a str", "int")),
    "explain: K": Bad(
        lambda: qmm.explain(activations(3, 63), weight()), V, ("a:", "(3, 63)", "in_features=64")
    ),
    "explain: backend": Bad(
        lambda: qmm.explain(activations(), weight(), backend="x"), V, ("backend=", "'x'")
    ),
    "explain: kernel": Bad(lambda: qmm.explain(activations(), weight(), kernel="x"), V, ("kernel", "'x'")),
    # the rest
    "use_backend: unknown": Bad(
        lambda: qmm.use_backend("x").__enter__(), V, ("qmm.use_backend", "auto, triton", "'x'")
    ),
    "use_backend: number": Bad(
        lambda: qmm.use_backend(1).__enter__(), T, ("qmm.use_backend", "must be a str", "int")
    ),  # type: ignore[arg-type]
    "prepare: tensor": Bad(lambda: qmm.prepare(torch.zeros(1)), T, ("w:", "qmm.QuantizedWeight", "Tensor")),  # type: ignore[arg-type]
    "prepare: backend": Bad(lambda: qmm.prepare(weight(), "x"), V, ("backend=", "'x'")),
    "cat: nothing": Bad(lambda: QuantizedWeight.cat([]), W, ("weights", "at least one weight", "empty")),
    "cat: one weight": Bad(
        lambda: QuantizedWeight.cat(weight()), T, ("weights", "list or tuple", "got QuantizedWeight")
    ),
    "cat: generator": Bad(
        lambda: QuantizedWeight.cat(w for w in [weight()]), T, ("weights", "list or tuple", "got generator")
    ),
    "cat: tensors": Bad(
        lambda: QuantizedWeight.cat([torch.zeros(1)]), T, ("weights[0]", "QuantizedWeight", "Tensor")
    ),  # type: ignore[list-item]
    "cat: dim": Bad(lambda: QuantizedWeight.cat([weight()], dim=2), W, ("dim", "0 (K) or 1 (N)", "got 2")),
}


@pytest.mark.parametrize("ident", TABLE)
def test_one_clear_error(ident: str) -> None:
    bad = TABLE[ident]
    with pytest.raises(bad.error) as caught:
        bad.call()
    text = str(caught.value)
    assert all(part in text for part in bad.text), text
    assert "\n" not in text and len(text) < 400
    assert caught.value.__context__ is None or caught.value.__suppress_context__, (
        "a second error shows above it"
    )


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) >= 35


OUTS: dict[str, tuple[Callable[[], Tensor], type[Exception], tuple[str, ...]]] = {
    "too few rows": (lambda: torch.empty(2, N, dtype=HALF), V, ("out", "(3, 8)", "(2, 8)")),
    "transposed": (lambda: torch.empty(N, 3, dtype=HALF), V, ("out", "(3, 8)", "(8, 3)")),
    "flat": (lambda: torch.empty(3 * N, dtype=HALF), V, ("out", "(3, 8)", "(24,)")),
    "float32": (lambda: torch.empty(3, N), T, ("out", "dtype", "out float32 and a float16")),
    "bfloat16": (lambda: torch.empty(3, N, dtype=torch.bfloat16), T, ("out", "dtype", "bfloat16")),
    "expanded row": (
        lambda: torch.empty(1, N, dtype=HALF).expand(3, N),
        V,
        ("out", "share memory", "(0, 1)"),
    ),
    "expanded column": (
        lambda: torch.empty(3, 1, dtype=HALF).expand(3, N),
        V,
        ("out", "share memory", "(1, 0)"),
    ),
    "overlapping rows": (
        lambda: torch.empty(20, dtype=HALF).as_strided((3, N), (4, 1)),
        V,
        ("out", "share", "(4, 1)"),
    ),
    "other device": (lambda: torch.empty(3, N, dtype=HALF, device="meta"), V, ("one device", "out on meta")),
    "wants a gradient": (lambda: grad(torch.empty(3, N, dtype=HALF)), V, ("out", "requires_grad")),
    "inference tensor": (inference_tensor, V, ("out", "writable", "inference")),
    "sparse": (lambda: torch.zeros(3, N, dtype=HALF).to_sparse(), T, ("out", "dense", "sparse")),
}


@pytest.mark.parametrize("ident", OUTS)
def test_a_bad_out_is_left_as_it_was(ident: str) -> None:
    make, error, parts = OUTS[ident]
    out = make()
    plain = not out.is_inference() and out.layout is torch.strided and out.device.type == "cpu"
    if plain:
        with torch.no_grad():
            torch.as_strided(
                out.detach(), (out.untyped_storage().nbytes() // out.element_size(),), (1,)
            ).fill_(-1.5)
    with pytest.raises(error) as caught:
        qmm.matmul(torch.ones(3, K, dtype=HALF), weight(), out=out)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    if plain:
        assert bool((out == -1.5).all())


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "tanh"},
        {"bias": torch.zeros(3)},
        {"deterministic": "no"},
        {"backend": "no"},
        {"kernel": "no"},
    ],
    ids=lambda o: next(iter(o)),
)
def test_no_error_writes_into_out(options: dict[str, Any]) -> None:
    out = torch.full((3, N), -1.5, dtype=HALF)
    with pytest.raises((ValueError, TypeError)):
        matmul(out=out, **options)
    assert bool((out == -1.5).all())


def test_a_refused_call_writes_nothing() -> None:
    class Refuses(qmm.Backend):
        name = "refuses"
        kernels = (qmm.Kernel("never", "", qmm.Tier.TEXTBOOK, qmm.Limits(bits=(1,), max_m=1)),)

        def environment(self) -> list[qmm.Reason]:
            return []

        def run(self, *args: Any) -> None:
            raise AssertionError("must not run")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qmm.registry._found", {**qmm.backends(), "refuses": Refuses()})
        out = torch.full((3, N), -1.5, dtype=HALF)
        with pytest.raises(UnsupportedError) as caught:
            matmul(out=out, backend="refuses")
    assert bool((out == -1.5).all())
    assert [(r.limit, r.got) for r in caught.value.reasons["refuses"]] == [
        ("bits in {1}", "4"),
        ("M <= 1", "3"),
    ]
    assert "refuses: never: needs bits in {1}; got 4" in str(caught.value)


def test_a_negated_out_is_refused_and_a_negated_input_read_right() -> None:
    w = qmm.quantize(torch.randn(N, K), group_size=32)
    with pytest.raises(ValueError, match="out: must be plain memory; got a lazily negated view"):
        qmm.matmul(torch.zeros(3, K), w, out=negated())
    a = torch.view_as_complex(torch.randn(3, K, 2)).conj().imag
    bias = torch.view_as_complex(torch.randn(N, 2)).conj().imag
    assert a.is_neg() and bias.is_neg()
    expected = qmm.matmul(a.clone(), w, bias=bias.clone())
    assert torch.equal(qmm.matmul(a, w, bias=bias), expected)


@pytest.mark.parametrize("value", ["cuda", "TORCH", " torch", "torch,triton"])
def test_environment_names_no_backend(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("QMM_BACKEND", value)
    for call in (matmul, lambda: qmm.explain(activations(), weight()), lambda: qmm.prepare(weight())):
        with pytest.raises(
            ValueError, match=r"QMM_BACKEND: must be one of auto, triton, torch, numba.*; got"
        ) as caught:
            call()
        assert repr(value) in str(caught.value)
