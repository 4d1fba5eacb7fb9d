"""Layers packed by the peers' own code, one line each: are the values the peer's, how much memory, do the bytes return.

    python tests/formats/vector_table.py [FOLDER ...]        (tests/data/vectors)

Every vector is opened as a user does, by ``qmm.load``. Columns:

- ``values``: ``dequantize()`` against the peer's float32: ``bit-equal`` (a zero may differ in sign), or the largest
  distance in units in the last place;
- ``memory``: bytes of the loaded weights over those of the layer's tensors in the file. A codebook (constants of the
  format, 64 bytes to 1 KiB, which tell in layers as tiny as these) is counted on neither side, nor are HQQ's settings;
- ``bytes``: ``identical`` where the format's ``to_tensors`` gives the file's tensors again, byte for byte.

Exit status 1 where a value is further than 1 unit away.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qmm
from qmm.checkpoint.safetensors_read import SafetensorsFile
from qmm.formats import awq, bitsandbytes, compressed_tensors, gguf, gptq, hqq, mx

FOLDER = Path(__file__).parent.parent / "data" / "vectors"
CONSTANTS = {"weight.quant_map", "weight.nested_quant_map", *hqq.FACTS}
NOT_WRITTEN = {"bias", "input_scale", "round_zero"}  # no part of a weight, or only said of how it was found


@dataclass(frozen=True)
class Row:
    """What the table says of one vector."""

    name: str
    ulps: int
    memory: float
    identical: bool

    def __str__(self) -> str:
        values = "bit-equal" if self.ulps == 0 else f"{self.ulps} ulp"
        returned = "identical" if self.identical else "values only"
        return f"{self.name:<62} {values:<10} {self.memory:5.2f}x  {returned}"


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance of two float32 tensors in units in the last place; +0 turns -0 into 0."""
    x, y = ((t + 0).contiguous().view(torch.int32).long() for t in (a, b))
    x, y = (torch.where(v < 0, -(v & 0x7FFFFFFF), v) for v in (x, y))
    return int((x - y).abs().max())


def rows(folder: Path) -> Iterator[Row]:
    """Every vector of a folder."""
    return (one(about) for about in sorted(folder.glob("*.json")) if about.name != "index.json")


def one(about: Path) -> Row:
    """The vector that ``about`` (its ``.json``) describes."""
    config = json.loads(about.read_text())["quantization_config"]
    if config is None:
        return _gguf(about)
    path = about.with_suffix(".safetensors")
    file = SafetensorsFile(path)
    weights = list(qmm.load(path, prefix="layer.", config=config).values())
    stored = {name: file.tensor(name) for name in file.entries if name.startswith("layer.")}
    layer = {
        name.removeprefix("layer.").removeprefix("experts.gate_up_proj_"): t for name, t in stored.items()
    }
    expected = file.tensor("expected.weight")
    found = torch.stack([w.dequantize().t() for w in weights]).reshape(expected.shape)
    in_file = sum(t.nbytes for name, t in layer.items() if name not in CONSTANTS | NOT_WRITTEN)
    return Row(
        about.stem, ulps(found, expected), _memory(weights, in_file), _comes_back(weights, layer, config)
    )


def _gguf(about: Path) -> Row:
    """A GGUF file has one tensor, and its values in another file."""
    file = gguf.read(about.with_suffix(".gguf"))
    (name,) = file
    w = file[name]
    expected = SafetensorsFile(about.with_suffix(".expected.safetensors")).tensor("expected.weight")
    raw = torch.from_numpy(file.blocks(name).copy())
    same = torch.equal(gguf.to_blocks(w, file.info[name].qtype), raw)
    return Row(about.stem, ulps(w.dequantize().t(), expected), _memory([w], raw.nbytes), same)


def _memory(weights: list[qmm.QuantizedWeight], in_file: int) -> float:
    book = sum(0 if w.codebook is None else w.codebook.nbytes for w in weights)
    return (sum(w.nbytes for w in weights) - book) / in_file


def _comes_back(
    weights: list[qmm.QuantizedWeight], layer: Mapping[str, Tensor], config: Mapping[str, Any]
) -> bool:
    """Whether some spelling that the format knows (its versions, its strategies) has the file's bytes."""
    wanted = {name: t for name, t in layer.items() if name not in NOT_WRITTEN}
    return any(_same(written, wanted) for written in _written(weights, layer, config))


def _written(
    weights: list[qmm.QuantizedWeight], layer: Mapping[str, Tensor], config: Mapping[str, Any]
) -> Iterator[dict[str, Tensor]]:
    method, w = config["quant_method"], weights[0]
    choices: dict[str, tuple[Any, ...]] = {}
    if method == "gptq":
        write: Any = gptq.to_tensors
        choices = {
            "version": (config.get("checkpoint_format", "gptq"),),
            "zero_reading": (None, "unmasked", "word"),
        }
    elif method == "awq":
        write, choices = awq.to_tensors, {"version": (config["version"],)}
    elif method == "hqq":
        write, choices = hqq.to_tensors, {"view_as_float": (False, True)}
    elif method == "bitsandbytes":
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        write, choices = bitsandbytes.to_tensors, {"dtype": dtypes, "storage": (torch.uint8, *dtypes)}
    elif "blocks" in layer:
        yield mx.to_tensors(weights)
        return
    else:
        write = compressed_tensors.to_tensors
        choices = {
            "format": (None, "int-quantized"),
            "strategy": (None, "tensor", "channel", "group", "block"),
            "block": (None, (128, 128)),
            "packing": ("dense", "legacy"),
            "modelopt": (False, True),
            "scale_name": ("weight_scale", "weight_scale_inv"),
            "scale_dtype": (None, torch.uint8),
        }
    for values in itertools.product(*choices.values()):
        options = {key: value for key, value in zip(choices, values, strict=True) if value is not None}
        try:
            yield write(w, **options)
        except qmm.WeightFormatError:
            continue


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    a = {name: t for name, t in a.items() if name not in NOT_WRITTEN}
    return a.keys() == b.keys() and all(
        (t.dtype, t.shape) == (b[k].dtype, b[k].shape)
        and torch.equal(
            t.contiguous().reshape(-1).view(torch.uint8), b[k].contiguous().reshape(-1).view(torch.uint8)
        )
        for k, t in a.items()
    )


def main(folders: list[str]) -> int:
    """Print the table."""
    warnings.simplefilter(
        "ignore", qmm.FormatWarning
    )  # HQQ's axis 0; zero points that readers of v1 disagree on
    found = [row for folder in map(Path, folders or [str(FOLDER)]) for row in rows(folder)]
    for row in found:
        print(row)
    exact, near = (sum(row.ulps == n for row in found) for n in (0, 1))
    back, small = sum(row.identical for row in found), sum(row.memory <= 1.1 for row in found)
    print(
        f"{len(found)} vectors: {exact} bit-equal, {near} within 1 ulp, {len(found) - exact - near} further; "
        f"{back} with identical bytes; {small} at most 1.10x of the file's bytes"
    )
    return int(any(row.ulps > 1 for row in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
