"""A whole model of Llama 3.1 8B's shape: decode and prefill, fp16 against int4 of group 128, and the linears alone.

    python -m bench.llama_decode            on a GPU: about 16 + 3 x 4 GB and three minutes
    python -m bench.llama_decode --tiny     anywhere; its times say nothing

A decode step is captured once in a CUDA graph, with the choice of the next token in it. Steps are timed in turn, as
qmm.timing does, once of plain modules and once with each block compiled. All models compute the same function (the fp16
one holds the dequantised weights), which is checked before anything is timed. ``dependent`` is the merged model
with QMM_DEPENDENT_LAUNCH=1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.grid import dependent_launch
from bench.llama_model import TINY, Block, Cache, Model, Shape, build
from qmm.timing.clock import Taken, alternate, sampler
from qmm.timing.results import this_machine

DENSE = "fp16"
VARIANTS = (DENSE, "int4", "int4 merged", "int4 merged, dependent")
MAX_ERROR = 0.05  # of logits against the fp16 model: dozens of layers of float16 rounding


@dataclass(frozen=True)
class Goal:
    """A ratio to the fp16 model under the same harness, and on which side of ``bound`` it should be."""

    what: str
    variant: str
    bound: float
    at_least: bool = True

    def __str__(self) -> str:
        return f"{self.what}, {self.variant}: {'>=' if self.at_least else '<='} {self.bound}x"


GOALS = (
    Goal("decode compiled, batch 1", "int4", 2.0),
    Goal("decode compiled, batch 1", "int4 merged", 2.3),
    Goal("decode compiled, batch 16", "int4 merged", 1.6),
    Goal("linears, batch 1", "int4 merged", 2.8),
    Goal("prefill", "int4 merged", 1.03, at_least=False),
    Goal("memory of linears", "int4 merged", 0.28, at_least=False),
)


@dataclass
class Report:
    """``figures[what][variant]``, in milliseconds or bytes, and the spread of each time."""

    machine: dict[str, Any]
    options: dict[str, Any]
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    spreads: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def times(self, what: str, taken: dict[str, Taken], tokens: int) -> None:
        """Take down and show; ``tokens`` a call."""
        self.figures[what] = {name: t.seconds * 1e3 for name, t in taken.items()}
        self.spreads[what] = {name: t.spread for name, t in taken.items()}
        for name, t in taken.items():
            rate = f"{tokens / t.seconds:10.1f} tokens/s"
            print(
                f"{what:26s} {name:24s} {t.seconds * 1e3:9.3f} ms {rate} {self._shown(what, name)}",
                flush=True,
            )

    def ratio(self, what: str, name: str) -> float:
        """Times faster than fp16; for prefill, its time as a share of fp16's, and for memory its bytes."""
        of = self.figures[what]
        return of[name] / of[DENSE] if what in ("prefill", "memory of linears") else of[DENSE] / of[name]

    def _shown(self, what: str, name: str) -> str:
        return f"{self.ratio(what, name):5.2f}x   spread {self.spreads[what][name]:.1%}"

    def goals(self) -> list[str]:
        """A line for each goal that was measured."""
        lines = []
        for goal in GOALS:
            if goal.variant in self.figures.get(goal.what, {}):
                got = self.ratio(goal.what, goal.variant)
                met = got >= goal.bound if goal.at_least else got <= goal.bound
                lines.append(f"{'met   ' if met else 'MISSED'} {goal}: {got:.3f}x")
        return lines

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self) | {"goals": self.goals()}, indent=1) + "\n")


def state(name: str) -> contextlib.AbstractContextManager[None]:
    """The environment in which a variant is planned."""
    return dependent_launch() if "dependent" in name else contextlib.nullcontext()


def decode_step(model: Model, batch: int, context: int) -> Callable[[], Tensor]:
    """One greedy token for every row; positions go round at the end of the cache, so that it never fills."""
    device = model.places.device
    tokens = torch.arange(batch, device=device)[:, None] % model.shape.vocabulary
    position = torch.zeros(1, dtype=torch.int64, device=device)
    caches = model.new_caches(batch, context)

    def step() -> Tensor:
        logits = model(tokens, position, caches)
        tokens.copy_(logits.argmax(-1, keepdim=True))
        position.add_(1).remainder_(context)
        return logits

    return step


def prefill(model: Model, length: int) -> Callable[[], Tensor]:
    """A prompt of one row."""
    device = model.places.device
    tokens = torch.arange(length, device=device)[None] % model.shape.vocabulary
    position = torch.arange(length, device=device)
    caches: list[Cache] = model.new_caches(1, length)
    return lambda: model(tokens, position, caches)


def linears(model: Model, batch: int) -> Callable[[], None]:
    """Every linear layer of the blocks once, those that read the same input one after the other."""
    size, device = model.shape, model.places.device
    x, heads, mlp = (
        torch.randn(batch, n, device=device).to(model.dtype)
        for n in (size.hidden, size.heads * size.head_dim, size.mlp)
    )
    layers = list(model.linears())
    inputs = [{"o_proj": heads, "down_proj": mlp}.get(name, x) for name in _NAMES] * size.layers

    def run() -> None:
        for layer, given in zip(layers, inputs, strict=True):
            layer(given)

    return run


_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linear_bytes(model: Model) -> int:
    """Bytes of the blocks' linear layers as they are in memory."""
    layers = [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]
    return sum(m.weight.nbytes for m in layers)


def check(models: dict[str, Model], batch: int, context: int, report: Report, label: str) -> None:
    """Logits of one step beside those of the fp16 model."""
    exact: Tensor | None = None
    for name, model in models.items():
        with state(name):
            logits = decode_step(model, batch, context)().double()
        if exact is None:
            exact = logits
            continue
        error = float((logits - exact).norm() / exact.norm())
        report.errors[f"{label}, {name}"] = error
        if not error < MAX_ERROR:
            raise SystemExit(f"{label}, {name}: logits differ from fp16's by {error:.3g} of their size")


def measure(calls: dict[str, Callable[[], Any]], device: str, rounds: int, replays: int) -> dict[str, Taken]:
    """In turn; a variant's first call, which plans, runs in its environment."""
    samplers = {}
    for name, call in calls.items():
        with state(name):
            samplers[name] = sampler([call], device)
    return alternate(samplers, rounds=rounds, replays=replays, idle=0.25 if device == "cuda" else 0.0)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    out = Path(os.environ.get("OUT", ".")) / "llama_decode.json"
    parser = argparse.ArgumentParser("python -m bench.llama_decode", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tiny", action="store_true", help="a model of two small layers, on the CPU where there is no GPU")
    add("--batches", default="1,16", help="rows that are decoded side by side")
    add("--context", type=int, help="tokens in the cache, read whole at each step; default 256")
    add("--prompt", type=int, help="tokens of the prefill; default 2048")
    add("--compiler", default="inductor", choices=("inductor", "aot_eager", "none"))
    add("--variants", default=";".join(VARIANTS), help="separated by semicolons; fp16 always takes part")
    add("--seconds", type=float, default=220, help="what is not begun by then is left out")
    add("--rounds", type=int, default=2)
    add("--replays", type=int, default=5)
    add("--out", type=Path, default=out, help="by default llama_decode.json in $OUT")
    return parser.parse_args(arguments)


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check, time, print, save."""
    start = time.monotonic()
    o = options(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not o.tiny:
        raise SystemExit("there is no GPU here: --tiny")
    shape = TINY if o.tiny else Shape()
    context, prompt = o.context or (16 if o.tiny else 256), o.prompt or (8 if o.tiny else 2048)
    dtype = torch.float16
    wanted = [name for name in VARIANTS if name == DENSE or name in o.variants.split(";")]
    given = {"shape": asdict(shape), "context": context, "prompt": prompt, "compiler": o.compiler}
    report = Report(this_machine(device), given)

    def done(what: str) -> None:
        report.seconds[what] = round(time.monotonic() - start, 1)
        report.save(o.out)

    models = {}
    for name in wanted:
        models[name] = build(
            shape, max(context, prompt), device, dtype, quantised=name != DENSE, merged="merged" in name
        )
        done(f"build {name}")
    report.figures["memory of linears"] = {name: float(linear_bytes(m)) for name, m in models.items()}
    for name, size in report.figures["memory of linears"].items():
        share = report.ratio("memory of linears", name)
        print(f"{'memory of linears':26s} {name:24s} {size / 1e9:9.3f} GB {share:19.3f}x")
    batches = [int(b) for b in o.batches.split(",")]
    for compiled in (False, True) if o.compiler != "none" else (False,):
        label = "decode compiled" if compiled else "decode"
        if compiled:
            torch._dynamo.config.recompile_limit = 64
            run = torch.compile(Block.__call__, dynamic=False, fullgraph=True, backend=o.compiler)
            for model in models.values():
                model.run_block = run
        for batch in batches:
            if time.monotonic() - start > o.seconds:
                print(f"{label}, batch {batch}: left out, no time")
                continue
            check(models, batch, context, report, f"{label}, batch {batch}")
            calls = {name: decode_step(model, batch, context) for name, model in models.items()}
            report.times(f"{label}, batch {batch}", measure(calls, device, o.rounds, o.replays), batch)
            done(f"{label}, batch {batch}")
    for model in models.values():
        model.run_block = Block.__call__
    for batch in batches:
        calls = {name: linears(model, batch) for name, model in models.items()}
        report.times(f"linears, batch {batch}", measure(calls, device, o.rounds, o.replays), batch)
        done(f"linears, batch {batch}")
    calls = {name: prefill(model, prompt) for name, model in models.items() if "dependent" not in name}
    report.times("prefill", measure(calls, device, o.rounds, 2), prompt)
    done("prefill")
    print(*report.goals(), sep="\n")
    print(
        f"{o.out}: {time.monotonic() - start:.0f} s; logits differ by at most {max(report.errors.values()):.1e}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
