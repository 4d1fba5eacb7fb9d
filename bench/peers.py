"""Other libraries as contestants, each with the reason where it cannot take part. ``pip install 'qmm[bench-peers]'``.

All of them get the same codes and scales as qmm, so that the check before a timing holds for them too; those that can
only quantise by themselves say so in their class.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from qmm.timing import Contestant, Problem
from qmm.timing.contestant import Multiply
from qmm.weight import QuantizedWeight


class Peer(Contestant):
    """A library outside torch: needs a package and a GPU, and takes some kinds of weight."""

    package = ""
    bits: tuple[int, ...] = (4,)
    takes_zeros = False

    def why_not(self, problem: Problem) -> str:
        """See the base class."""
        if problem.device == "cpu":
            return "needs a GPU; got cpu"
        if self.package:
            try:
                version(self.package)
            except PackageNotFoundError:
                return f"{self.package} is not installed: pip install {self.package}"
        if problem.bits not in self.bits:
            return f"bits: here one of {', '.join(map(str, self.bits))}; got {problem.bits}"
        if problem.zeros and not self.takes_zeros:
            return "symmetric weights here; got zero points"
        return self.own_reason(problem)

    def own_reason(self, problem: Problem) -> str:
        """What else stands against it."""
        return ""

    def bytes_each(self, problem: Problem) -> int:
        """Bytes of one copy of the weight."""
        return problem.weight_bytes()


def codes_nk(w: QuantizedWeight) -> Tensor:
    """uint8 ``[N, K]``."""
    return w.unpack().t().contiguous()


def zeros_gn(problem: Problem, w: QuantizedWeight) -> Tensor:
    """Zero points ``[G, N]`` as floats: the middle code where the weight is symmetric."""
    scales = w.tensors.scales
    found = w.unpack_zeros()
    return torch.full_like(scales, 1 << (problem.bits - 1)) if found is None else found.to(scales.dtype)


class TinyGemm(Peer):
    """torch's own int4 kernel, ``_weight_int4pack_mm``. bfloat16 alone: it computes that whatever is asked."""

    name = "tinygemm"
    takes_zeros = True

    def problem(self, problem: Problem) -> Problem:
        """In bfloat16."""
        return replace(problem, dtype=torch.bfloat16)

    def own_reason(self, problem: Problem) -> str:
        """Group sizes and tiles of the kernel."""
        if problem.group_size not in (32, 64, 128, 256) or problem.k % 1024 or problem.n % 16:
            return f"K a multiple of 1024, N of 16, groups of 32 to 256; got {problem.shape} {problem.group_size}"
        return ""

    def why_not_rows(self, problem: Problem, w: QuantizedWeight, a: Tensor) -> str:
        """It reads the weight once for every few rows."""
        return "" if len(a) <= 64 else "made for few rows: not timed above 64"

    def copies(self, problem: Problem, w: QuantizedWeight, count: int) -> list[Multiply]:
        """See the base class."""
        codes = codes_nk(w)
        packed = torch.ops.aten._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]), 8)
        scales, zeros = w.tensors.scales, zeros_gn(problem, w)
        # (q - 8) * s + z: its zero is the value of code 8
        both = torch.stack([scales, (8 - zeros.float()) * scales.float()], dim=-1).to(torch.bfloat16)
        multiply, group = torch.ops.aten._weight_int4pack_mm, problem.group_size
        ring = [(packed.clone(), both.clone()) for _ in range(count)]
        return [lambda a, x=x: multiply(a, x[0], group, x[1]) for x in ring]


class Humming(Peer):
    """humming-kernels. It quantises by itself; the values given lie on its grid, so nothing is lost."""

    name, package, bits = "humming", "humming-kernels", (4, 8)

    def copies(self, problem: Problem, w: QuantizedWeight, count: int) -> list[Multiply]:
        """See the base class."""
        from humming.layer import HummingLayer

        dense = w.dequantize(problem.dtype).t().contiguous()
        config = {"dtype": f"uint{problem.bits}", "group_size": problem.group_size}

        def made() -> Multiply:
            layer = HummingLayer(
                shape_n=problem.n, shape_k=problem.k, weight_config=config, torch_dtype=problem.dtype
            ).cuda()
            layer.load_from_unquantized(dense)
            layer.transform()
            return layer

        return [made() for _ in range(count)]


class Gemlite(Peer):
    """Gemlite, through its Triton linear layer."""

    name, package, bits, takes_zeros = "gemlite", "gemlite", (4, 8), True

    def copies(self, problem: Problem, w: QuantizedWeight, count: int) -> list[Multiply]:
        """See the base class."""
        from gemlite.core import TORCH_TO_DTYPE, GemLiteLinearTriton

        codes, scales = codes_nk(w), w.tensors.scales.t().contiguous()
        zeros, dtype = zeros_gn(problem, w).t().contiguous(), TORCH_TO_DTYPE[problem.dtype]

        def made() -> Multiply:
            layer = GemLiteLinearTriton(
                problem.bits,
                group_size=problem.group_size,
                in_features=problem.k,
                out_features=problem.n,
                input_dtype=dtype,
                output_dtype=dtype,
                scaled_activations=False,
            )
            layer.pack(codes, scales, zeros, None, packing_bitwidth=32)
            return layer

        return [made() for _ in range(count)]


class Bitsandbytes(Peer):
    """bitsandbytes NF4, blocks of 64: another grid of values of the same size, so its error is that of quantising."""

    name, package = "bitsandbytes", "bitsandbytes"
    bound = 1e9  # not comparable: it quantises to another grid

    def copies(self, problem: Problem, w: QuantizedWeight, count: int) -> list[Multiply]:
        """See the base class."""
        import bitsandbytes
        from bitsandbytes.functional import quantize_4bit

        dense = w.dequantize(problem.dtype).t().contiguous()
        ring = [quantize_4bit(dense, blocksize=64, quant_type="nf4") for _ in range(count)]
        return [lambda a, x=x: bitsandbytes.matmul_4bit(a, x[0].t(), quant_state=x[1]) for x in ring]


class TorchAo(Peer):
    """torchao's int4 weight-only linear layer. It quantises by itself, to another grid."""

    name, package = "torchao", "torchao"
    bound = 1e9  # not comparable: it quantises to another grid

    def copies(self, problem: Problem, w: QuantizedWeight, count: int) -> list[Multiply]:
        """See the base class."""
        from torchao.quantization import Int4WeightOnlyConfig, quantize_

        dense = w.dequantize(torch.bfloat16).t()

        def made() -> Multiply:
            layer = torch.nn.Linear(
                problem.k, problem.n, bias=False, device=problem.device, dtype=dense.dtype
            )
            layer.weight.data.copy_(dense)
            quantize_(layer, Int4WeightOnlyConfig(group_size=problem.group_size))
            return layer.requires_grad_(False)

        return [made() for _ in range(count)]

    def problem(self, problem: Problem) -> Problem:
        """In bfloat16, which its kernel wants."""
        return replace(problem, dtype=torch.bfloat16)


PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (TinyGemm, Humming, Gemlite, TorchAo, Bitsandbytes)
}
