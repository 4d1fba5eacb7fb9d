"""A large GPTQ model: time to inspect, and peak memory of loading it layer by layer.

    python bench/big_checkpoint.py [--gb 4] [--folder /tmp]

Writes random weights (4 bits, groups of 128, act-order in every fourth layer) as shards into a temporary folder, which
is deleted at the end, and measures in processes of their own:

- the work of ``qmm inspect``, without the start of Python and torch;
- loading each layer in turn, each dropped before the next: peak of the memory that is the process's own, above what it
  was before, against the largest layer in the file and the weight made of it. Issue 3 asks for less than 1.2 times the
  largest layer plus the result. (Pages of the mapped file are counted too: ``VmHWM``.)

Exit status 1 where the inspection takes 2 s or more or the memory is above the bound.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

HIDDEN, INNER, GROUP = 8192, 22016, 128
LAYERS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
SHARD_BYTES = 512 << 20
INSPECT_LIMIT, MEMORY_LIMIT = 2.0, 1.2

PROBE_INSPECT = """
import sys, time
import torch, qmm
start, cpu = time.perf_counter(), time.process_time()
from qmm.cli.inspecting import examine
checkpoint = qmm.load(sys.argv[1])
found = examine(checkpoint, False, lambda text, advance=0: None)
print(time.perf_counter() - start, time.process_time() - cpu, len(found.layers), len(found.broken))
"""
PROBE_LOAD = """
import sys, time
import torch, qmm
torch.set_num_threads(2)

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

checkpoint = qmm.load(sys.argv[1])
w = qmm.quantize(torch.ones(64, 512))  # what torch loads at its first use
del w
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak counts from here
largest = max(map(checkpoint.nbytes, checkpoint))
result = 0
start = time.perf_counter()
for name in checkpoint:
    w = checkpoint[name]
    result = max(result, w.nbytes)
    del w
print(time.perf_counter() - start, status("VmHWM") - before, largest, result)
"""


def random_words(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """int32 of any bits."""
    return np.frombuffer(rng.bytes(4 * shape[0] * shape[1]), "<i4").reshape(shape)


def layer(name: str, k: int, n: int, act_order: bool, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The tensors of a GPTQ v2 layer."""
    g_idx = (np.arange(k) // GROUP).astype("<i4")
    parts = {
        "qweight": random_words((k // 8, n), rng),
        "qzeros": random_words((k // GROUP, n // 8), rng),
        "scales": rng.random((k // GROUP, n), np.float32).astype("<f2"),
        "g_idx": rng.permutation(g_idx) if act_order else g_idx,
    }
    return {f"{name}.{suffix}": value for suffix, value in parts.items()}


def layers(total: int, rng: np.random.Generator) -> Iterator[dict[str, np.ndarray]]:
    """Layers of about ``total`` bytes."""
    block = size = 0
    while True:
        for kind, (k, n) in LAYERS.items():
            made = layer(f"model.layers.{block}.{kind}", k, n, block % 4 == 0, rng)
            size += sum(value.nbytes for value in made.values())
            yield made
            if size >= total:
                return
        block += 1


def write_model(folder: Path, total: int) -> int:
    """Shards, index and config, by plain code; returns the bytes of the tensors."""
    tags = {"<i4": "I32", "<f2": "F16"}
    table: dict[str, str] = {}
    written, number = 0, 0
    pending: dict[str, np.ndarray] = {}

    def flush() -> None:
        nonlocal number
        number += 1
        name, header, at = f"model-{number:05d}.safetensors", {}, 0
        for key, value in pending.items():
            offsets = [at, at + value.nbytes]
            header[key] = {
                "dtype": tags[value.dtype.str],
                "shape": list(value.shape),
                "data_offsets": offsets,
            }
            at += value.nbytes
        raw = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            for value in pending.values():
                file.write(value.data)
        table.update(dict.fromkeys(pending, name))
        pending.clear()

    for made in layers(total, np.random.default_rng(0)):
        pending.update(made)
        written += sum(value.nbytes for value in made.values())
        if sum(value.nbytes for value in pending.values()) >= SHARD_BYTES:
            flush()
    if pending:
        flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": True,
        "checkpoint_format": "gptq_v2",
    }
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return written


def probe(code: str, folder: Path) -> list[float]:
    """The numbers that ``code`` prints, from a new process."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    return [float(number) for number in done.stdout.split()]


def main() -> int:
    """Write, measure, delete."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=4)
    parser.add_argument("--folder", type=Path, default=None, help="where the temporary folder is made")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="qmm-big-", dir=options.folder))
    try:
        nbytes = write_model(folder, int(options.gb * 1e9))
        print(f"model            {nbytes / 1e9:.2f} GB in {folder}")
        seconds, cpu, count, broken = probe(PROBE_INSPECT, folder)
        print(
            f"inspect          {seconds:.2f} s ({cpu:.2f} s of processor) for {count:.0f} layers, {broken:.0f} broken; "
            f"limit {INSPECT_LIMIT} s"
        )
        loading, peak, largest, result = probe(PROBE_LOAD, folder)
        bound = MEMORY_LIMIT * largest + result
        print(f"load             {loading:.1f} s for all layers, {nbytes / 1e9 / loading:.2f} GB/s")
        print(
            f"peak memory      {peak / 1e6:.0f} MB, bound {bound / 1e6:.0f} MB: largest layer {largest / 1e6:.0f} MB, "
            f"result {result / 1e6:.0f} MB; (peak - result) / layer = {(peak - result) / largest:.2f}"
        )
        return int(seconds >= INSPECT_LIMIT or peak > bound or broken > 0)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    raise SystemExit(main())
