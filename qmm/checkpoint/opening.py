"""``qmm.load``: a folder, a safetensors file or a GGUF file -> :class:`Checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qmm.checkpoint.checkpoint import Checkpoint
from qmm.checkpoint.folder import INDEX, Found, find_config, model_file, open_index
from qmm.checkpoint.from_gguf import GGUFCheckpoint
from qmm.checkpoint.from_safetensors import SafetensorsCheckpoint
from qmm.checkpoint.methods import SIGNS
from qmm.checkpoint.safetensors_read import SafetensorsFile
from qmm.errors import WeightFormatError


def load(
    path: str | os.PathLike[str], prefix: str | None = None, *, config: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open a quantised checkpoint. Reads headers and configs only; a layer is read when it is asked for.

    Args:
        path: a folder as on Hugging Face (sharded or not), a ``.safetensors`` file, an index of shards
            (``.safetensors.index.json``) or a GGUF file. Formats: GPTQ, AWQ, HQQ, compressed-tensors, bitsandbytes,
            FP8, MXFP4, GGUF and what :func:`qmm.save` wrote; the config's ``quant_method`` says which.
        prefix: only tensors whose names begin so are looked at; names stay whole. None means all.
        config: the quantisation config, where the files have none, or instead of theirs.

    Returns:
        A mapping layer name -> :class:`qmm.QuantizedWeight` (on the CPU), with ``unused`` (every tensor that is in no
        layer, and why) and ``config``. A layer's name is that of its module, ``model.layers.0.mlp.up_proj``; in a GGUF
        file that of its tensor, ``blk.0.ffn_up.weight``.

    Raises:
        OSError: a file cannot be opened.
        WeightFormatError: a file is damaged, contradicts another, or is in no known format; names file, tensor and
            rule. Nothing in a file is run (no pickles), and files outside the folder are not opened.

    Example:
        >>> import tempfile, torch, qmm
        >>> folder = tempfile.mkdtemp() + "/model"
        >>> qmm.save(folder, {"mlp.up_proj": qmm.quantize(torch.randn(8, 64), group_size=32)}, "gptq_v2")
        >>> weights = qmm.load(folder)  # or "Qwen2.5-7B-Instruct-GPTQ-Int4", a folder from elsewhere
        >>> qmm.matmul(torch.randn(3, 64), weights["mlp.up_proj"]).shape
        torch.Size([3, 8])
    """
    path = Path(path)
    file = model_file(path) if path.is_dir() else path
    if _is_gguf(file):
        return GGUFCheckpoint(file, prefix)
    if file.name.endswith(".index.json"):
        found, single = open_index(file), None
    elif file.name.endswith(".safetensors"):
        single = SafetensorsFile(file)
        found = Found(dict.fromkeys(single.entries, single))
    else:
        raise WeightFormatError(
            f"{file}: must be a folder, a .safetensors file, a .gguf file or {INDEX}; got {file.suffix or 'no suffix'}"
        )
    if prefix is not None:
        found.files = {name: f for name, f in found.files.items() if name.startswith(prefix)}
        found.unindexed = {name: why for name, why in found.unindexed.items() if name.startswith(prefix)}
    if config is not None:
        return SafetensorsCheckpoint(path, found, dict(config), "config")
    known = find_config(single, file.parent)
    if known is None:
        sign = next((name for name in found.files if name.rpartition(".")[2] in SIGNS), None)
        if sign is not None:
            raise WeightFormatError(
                f"{path}: needs a quantisation config (config.json beside it, or config=) to read {sign!r}; got none"
            )
        return SafetensorsCheckpoint(path, found, {}, "")
    return SafetensorsCheckpoint(path, found, *known)


def _is_gguf(file: Path) -> bool:
    if file.suffix == ".gguf":
        return True
    with file.open("rb") as opened:
        return opened.read(4) == b"GGUF"
