"""``qmm explain``: which kernel would run a call, on this machine or on a described device, with no tensor made."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from qmm.cli.choices import Activation, Deterministic, Dtype, Zeros
from qmm.cli.consoles import print_json
from qmm.cli.failing import failing

if TYPE_CHECKING:
    from qmm.devices import DeviceInfo
    from qmm.explain import Explanation

HERE = "here"


def explain(
    m: Annotated[int, typer.Option("--m", min=0, help="Rows of A (tokens).")],
    n: Annotated[int, typer.Option("--n", min=1, help="Columns of W, out_features.")],
    k: Annotated[int, typer.Option("--k", min=1, help="Rows of W, in_features.")],
    bits: Annotated[int, typer.Option(min=1, max=8, help="Bits of a code.")] = 4,
    group_size: Annotated[int, typer.Option(help="Rows of K that share a scale; -1: all.")] = 128,
    zeros: Annotated[Zeros, typer.Option(help="Kind of zero points; none: symmetric.")] = Zeros.NONE,
    codebook: Annotated[bool, typer.Option("--codebook", help="Codes look values up, as in NF4.")] = False,
    act_order: Annotated[bool, typer.Option("--act-order", help="Rows name their groups (g_idx).")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of A and of the result.")] = Dtype.FLOAT16,
    scales: Annotated[
        Optional[str],  # noqa: UP045  # typer evaluates it, on Python 3.10 too
        typer.Option(help="Dtype of the scales; by default that of A."),
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="A bias of A's dtype is added.")] = False,
    activation: Annotated[
        Optional[Activation],  # noqa: UP045
        typer.Option(help="Applied to the result."),
    ] = None,
    deterministic: Annotated[
        Deterministic, typer.Option(help="batch: a row's bits do not depend on M either.")
    ] = Deterministic.TRUE,
    backend: Annotated[str, typer.Option(help="As in qmm.matmul.")] = "auto",
    kernel: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="As in qmm.matmul."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="here, or a device described by its name: h200, h100, a100, l40s, rtx4090, mi300x, cpu, ..."
        ),
    ] = HERE,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object in the place of the table.")
    ] = False,
) -> None:
    """Which kernel qmm.matmul would run, how, why, and why not the others. Nothing runs, and no GPU is needed.

    With --device the packages are those installed here, and the hardware is the described one.

    Exit code 0: a kernel takes the call; 1: none does; 2: bad input.
    """
    import torch

    from qmm.call import describe_call
    from qmm.devices import described, device_info, devices
    from qmm.explain import explain_call

    with failing("explain", ValueError, TypeError):
        info = None if device == HERE else _described(device)
        a_dtype = getattr(torch, dtype.value)
        spec = _spec(bits, group_size, k, n, zeros.value, _scales(scales or dtype.value), codebook, act_order)
        call = describe_call(
            m,
            spec,
            a_dtype=a_dtype,
            device=devices()[0] if info is None else torch.device(info.type),
            bias_dtype=a_dtype if bias else None,
            activation=None if activation is None else activation.value,
            deterministic=deterministic.value_of,
        )
        with nullcontext() if info is None else described(info):
            told = explain_call(call, backend=backend, kernel=kernel, weight=str(spec))
            where = device_info(call.device)
    if as_json:
        print_json(_as_json(told, where, info is not None))
    else:
        typer.echo(f"{'device':<15}{where.name}{' (described; packages as installed here)' if info else ''}")
        typer.echo(str(told))
        typer.echo(_least_text(told, where))
    raise typer.Exit(0 if told.backend else 1)


def _described(name: str) -> DeviceInfo:
    from qmm.devices import DESCRIBED

    if name.lower() not in DESCRIBED:
        raise ValueError(f"--device: must be {HERE}, {', '.join(DESCRIBED)}; got {name!r}")
    return DESCRIBED[name.lower()]


def _scales(name: str) -> Any:
    from qmm.weight.spec import SCALE_DTYPES, dtype_name

    known = {dtype_name(d): d for d in SCALE_DTYPES}
    if name not in known:
        raise ValueError(f"--scales: must be one of {', '.join(known)}; got {name!r}")
    return known[name]


def _spec(
    bits: int, group_size: int, k: int, n: int, zeros: str, scales: Any, codebook: bool, act_order: bool
) -> Any:
    import torch

    from qmm.weight.spec import WeightSpec, ZeroKind

    if group_size != -1 and group_size < 1:
        raise ValueError(f"--group-size: must be positive, or -1 for all of K; got {group_size}")
    if codebook and zeros != "none":
        raise ValueError(
            f"--codebook: goes with --zeros none, since nothing is subtracted; got --zeros {zeros}"
        )
    group = k if group_size == -1 else group_size
    zero_dtype = {"none": None, "int": torch.int32, "float": torch.float16, "bias": scales}[zeros]
    return WeightSpec(
        bits,
        group,
        k,
        n,
        -(-k // group),
        ZeroKind(zeros),
        scales,
        zero_dtype,
        codebook_dtype=torch.float32 if codebook else None,
        act_order=act_order,
    )


def _least_us(told: Explanation, where: DeviceInfo) -> dict[str, float] | None:
    """Microseconds that moving every byte once, and every operation, take at the rates of the data sheet."""
    if not (where.bytes_per_s and where.flops_per_s):
        return None
    c, w = told.call, told.call.weight
    zero_bytes = 0.0 if w.zero_dtype is None else w.zero_dtype.itemsize
    per_group = w.scale_dtype.itemsize + (w.bits / 8 if w.zero_kind.value == "int" else zero_bytes)
    moved = c.k * c.n * w.bits / 8 + w.groups * c.n * per_group + c.m * (c.k + c.n) * c.a_dtype.itemsize
    flops = 2 * c.m * c.k * c.n
    return {"memory": moved / where.bytes_per_s * 1e6, "arithmetic": flops / where.flops_per_s * 1e6}


def _least_text(told: Explanation, where: DeviceInfo) -> str:
    least = _least_us(told, where)
    if least is None:
        return f"{'least time':<15}not known: no data sheet for this device"
    bound = max(least, key=lambda name: least[name])
    return (
        f"{'least time':<15}{max(least.values()):.1f} us by the data sheet, bound by {bound} "
        f"(memory {least['memory']:.1f} us, arithmetic {least['arithmetic']:.1f} us)"
    )


def _as_json(told: Explanation, where: DeviceInfo, is_described: bool) -> dict[str, Any]:
    config = asdict(told.config) if is_dataclass(told.config) and not isinstance(told.config, type) else None
    reasons = {
        ident: [{"needs": r.limit, "got": r.got, "fix": r.fix} for r in rs]
        for ident, rs in told.kernels.items()
    }
    return {
        "device": {"name": where.name, "described": is_described, "type": where.type},
        "call": {"m": told.call.m, "n": told.call.n, "k": told.call.k, "weight": told.weight},
        "backend": told.backend,
        "kernel": told.kernel,
        "config": config,
        "why": told.why,
        "copies": list(told.copies),
        "reasons": reasons,
        "least_us": _least_us(told, where),
    }
