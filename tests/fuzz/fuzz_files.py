"""Random damage to files of every format: ``python tests/fuzz/fuzz_files.py [--seconds 60] [--seed N]``.

Each round takes a good file, damages it (bytes changed, cut, doubled or swapped; header and config edited as JSON),
opens it with ``qmm.load``, and reads facts, layers and plain tensors. Only ``WeightFormatError`` may come out. Prints
how many were refused and how many read; exit status 1 at the first other exception, whose file is kept.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import qmm

DATA = Path(__file__).parent.parent / "data"
SEEDS = (
    "gptq-autogptq-b4-g32-asym-act-K128-N64",
    "gptq-gptqmodel-b4-chan-sym-K96-N40",
    "gptq_v2-gptqmodel-b3-g32-sym-act-K128-N64",
    "awq-autoawq-b4-g32-asym-K128-N64",
    "hqq-b4-g64-axis1-float16-viewfloat-K128-N64",
    "hqq-b3-g64-axis1-float16-K128-N64",
    "bnb-nf4-bs64-float16-K33-N15",
    "bnb-nf4-bs128-nested-float16-K96-N40",
    "bnb-int8-K128-N64",
    "ctpack-ct0.12.2-b4-g32-sym-act-bfloat16-K128-N64",
    "ctpack-ct0.20.1-b3-g32-asym-bfloat16-K128-N72",
    "ctfp8-ct0.20.1-channel-bfloat16-K96-N40",
    "ctmxfp4-ct0.20.1-g32-float32-K96-N40",
    "ctnvfp4-ct0.20.1-g16-float16-K208-N40",
    "fp8-modelopt-tensor-K128-N64",
    "mxfp4-gptoss-gate_up_proj-E2-K128-N64",
)
ODD = (
    *(0, 1, -1, 2, 3, 7, 8, 9, 31, 32, 33, 127, 128, 255, 256, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64),
    *(None, True, False, 0.5, 1e308, "", "4", "x" * 300, "../x", "re:(a+)+$", [], {}, [[]], [1, 2], {"a": 1}),
    *("I32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "U8", "I64", "F4", "BOOL", "C64", "gptq", "awq", "hqq", "fp8"),
    *("mxfp4", "modelopt", "compressed-tensors", "bitsandbytes", "qmm", "gptq_v2", "gptq_p", "gemm", "gemv", "group"),
)  # fmt: skip


def safetensors_seeds() -> list[tuple[bytes, dict[str, Any]]]:
    """Good files with their configs, qmm's own format among them."""
    found = []
    for name in SEEDS:
        path = next((p for p in DATA.glob(f"*/{name}.safetensors")), None)
        if path is not None:
            config = json.loads(path.with_suffix(".json").read_text())["quantization_config"]
            found.append((path.read_bytes(), config))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "x.safetensors"
        for raw, config in list(found)[:8]:
            path.write_bytes(raw)
            qmm.save(path, qmm.load(path, config=config), overwrite=True)
            found.append((path.read_bytes(), {"quant_method": "qmm", "version": 1}))
    return found


def gguf_seeds() -> list[bytes]:
    """Two small tensors of every quantised type, some metadata with arrays, a plain tensor."""
    from qmm.formats.gguf_blocks import BLOCK_TYPES
    from qmm.formats.gguf_header import TYPE_NAMES

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    rng, files = random.Random(0), []
    numbers = {name: number for number, name in TYPE_NAMES.items()}
    entries = string("general.alignment") + struct.pack("<II", 4, 32)
    entries += string("tokens") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string("bc")
    entries += string("scores") + struct.pack("<IIQ2f", 9, 6, 2, 1, 2)
    for kind in BLOCK_TYPES.values():
        tensors, data = b"", b""
        for name, number, dims, size in (
            ("a.weight", numbers[kind.name], (kind.size * 2, 3), kind.nbytes * 6),
            ("b.weight", numbers[kind.name], (kind.size, 2), kind.nbytes * 2),
            ("norm", numbers["F32"], (5,), 20),
        ):
            tensors += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, len(data))
            data += rng.randbytes(size) + bytes(-size % 32)
        head = b"GGUF" + struct.pack("<IQQ", 3, 3, 3) + entries + tensors
        files.append(head + bytes(-len(head) % 32) + data)
    return files


def damage_bytes(raw: bytes, rng: random.Random, front: int) -> bytes:
    """Bytes changed, cut out, doubled or swapped, mostly among the first ``front``."""
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        if not out:
            break
        at = rng.randrange(min(front, len(out)) if rng.random() < 0.9 else len(out))
        what = rng.randrange(7)
        if what < 3:
            out[at] = rng.choice((0, 1, 127, 128, 255, out[at] ^ (1 << rng.randrange(8)), rng.randrange(256)))
        elif what == 3:
            out[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**32, 2**60, 2**63, 2**64 - 1)))
        elif what == 4:
            del out[at : at + rng.randrange(1, 40)]
        elif what == 5:
            out[at:at] = out[at : at + rng.randrange(1, 40)]
        else:
            del out[at:]
    return bytes(out)


def damage_json(value: Any, rng: random.Random) -> Any:
    """One place of a JSON value changed, dropped or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        what = rng.random()
        if what < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.25:
            return {
                **value,
                rng.choice((key + "x", "dynamic", "bits", "g_idx", "config_groups")): rng.choice(ODD),
            }
        return {**value, key: damage_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [damage_json(v, rng) if i == at else v for i, v in enumerate(value)]
    if type(value) is int and rng.random() < 0.4:
        return value + rng.choice((-8, -4, -2, -1, 1, 2, 4, 8))
    return rng.choice(ODD)


def damage_header(raw: bytes, rng: random.Random) -> bytes:
    """The header edited as JSON, the rest as it was; sometimes a tensor gets another's dtype and shape consistently."""
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    name = rng.choice([n for n in header if n != "__metadata__"])
    what = rng.random()
    if what < 0.5:
        header = damage_json(header, rng)
    else:  # sound as a safetensors file, so that the format's own checks are met
        entry = header[name]
        nbytes = entry["data_offsets"][1] - entry["data_offsets"][0]
        size = rng.choice((1, 2, 4, 8))
        if nbytes % size == 0:
            entry["dtype"] = rng.choice({1: ("U8", "I8", "F8_E4M3", "F8_E8M0"), 2: ("F16", "BF16", "I16", "U16"),
                                         4: ("I32", "F32", "U32"), 8: ("I64", "F64")}[size])  # fmt: skip
            count = nbytes // size
            rows = rng.choice([d for d in (1, 2, 3, 4, 5, 8, 16, 64, count) if d and count % d == 0] or [1])
            entry["shape"] = rng.choice(
                ([count], [rows, count // rows], [1, rows, count // rows], [count, 1])
            )
        if rng.random() < 0.3:
            header[name.rpartition(".")[0] + "." + rng.choice(("scales", "g_idx", "weight", "zero"))] = (
                header.pop(name)
            )
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def read_all(path: Path, config: dict[str, Any] | None) -> None:
    """Everything that a user can ask of a checkpoint."""
    checkpoint = qmm.load(path, config=config)
    problems: list[qmm.WeightFormatError] = []
    for name in checkpoint:
        for read in (checkpoint.facts, checkpoint.__getitem__):
            try:
                read(name)
            except qmm.WeightFormatError as error:
                problems.append(error)
    for name in checkpoint.plain:
        try:
            checkpoint.tensor(name)
        except qmm.WeightFormatError as error:
            problems.append(error)
    repr(checkpoint)
    if problems:
        raise problems[0]


def fuzz(seconds: float, seed: int, rounds: int | None = None) -> Counter[str]:
    """Damage until the time is over (or so many ``rounds``); counts by outcome.

    Raises:
        AssertionError: something else than ``WeightFormatError`` came out; says the seed, the round and the file.
    """
    tensors, ggufs, counts = safetensors_seeds(), gguf_seeds(), Counter[str]()
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        number = 0
        while time.monotonic() < end and (rounds is None or number < rounds):
            rng = random.Random(f"{seed} {number}")
            config: dict[str, Any] | None = None
            if rng.random() < 0.4:
                kind, path = "gguf", Path(folder) / "x.gguf"
                path.write_bytes(damage_bytes(rng.choice(ggufs), rng, 400))
            else:
                kind, path = "safetensors", Path(folder) / "x.safetensors"
                raw, config = rng.choice(tensors)
                (length,) = struct.unpack("<Q", raw[:8])
                what = rng.random()
                if what < 0.35:
                    raw = damage_bytes(raw, rng, 8 + length)
                elif what < 0.75:
                    raw = damage_header(raw, rng)
                else:
                    changed = damage_json(config, rng)
                    config = changed if isinstance(changed, dict) else {}
                path.write_bytes(raw)
            try:
                read_all(path, config)
                counts[f"{kind} sound"] += 1
            except qmm.WeightFormatError:
                counts[f"{kind} refused"] += 1
            except Exception as error:  # anything but the one error is a finding: kept, and raised
                kept = Path(tempfile.gettempdir()) / f"qmm-fuzz-{seed}-{number}{path.suffix}"
                kept.write_bytes(path.read_bytes())
                raise AssertionError(
                    f"seed {seed}, round {number}: {error!r}; file {kept}, config {config}"
                ) from error
            number += 1
    return counts


def main() -> int:
    """Run for the time asked for and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        counts = fuzz(options.seconds, options.seed)
    except AssertionError as error:
        print(error)
        raise
    print(
        f"{sum(counts.values())} files in {options.seconds:.0f} s, seed {options.seed}: {dict(sorted(counts.items()))}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
