"""``qmm.save``: weights -> safetensors, in one file or in shards, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from qmm.checkpoint.folder import CONFIG_KEY, INDEX, config_text
from qmm.checkpoint.safetensors_write import SafetensorsWriter
from qmm.checkpoint.targets import TARGETS, Target
from qmm.checkpoint.temporary import Temporary
from qmm.weight import QuantizedWeight

_TORCH = {"format": "pt"}  # other libraries want to know whose tensors these are
_FOREIGN = (".gguf", ".bin", ".pt", ".pth", ".ckpt")


def save(
    path: str | os.PathLike[str],
    weights: Mapping[str, QuantizedWeight],
    format: str = "qmm",
    *,
    config: Mapping[str, Any] | None = None,
    plain: Mapping[str, Tensor] | None = None,
    model_config: Mapping[str, Any] | None = None,
    files: Mapping[str, Path] | None = None,
    overwrite: bool = False,
    lossy: bool = False,
    max_shard_bytes: int | None = None,
    on_tensor: Callable[[str], None] | None = None,
) -> None:
    """Write weights, one at a time; a :class:`qmm.Checkpoint` as ``weights`` is read one layer at a time.

    Nothing stands under ``path`` until all of it does: data go to a hidden temporary file or folder beside it, which
    takes the name at the end. What a killed process left there for the same ``path`` is removed.

    Args:
        path: a ``.safetensors`` file, or a folder to make (``config.json`` and ``model.safetensors``, or shards).
        weights: layer name -> weight.
        format: ``"qmm"`` (every weight, exactly) or ``"gptq_v2"`` (2 to 8 bits, whole zero points or none, no
            codebook, no second level; zero points come back as kind int).
        config: more for the quantisation config of the file; may not contradict the weights.
        model_config: the rest of a folder's ``config.json``.
        files: more files for a folder, by their names there (``/`` for a subfolder): a tokenizer's, for example.
        plain: tensors that are not quantised, by name, written as they are.
        overwrite: replace an existing file. (An existing folder is never replaced.)
        lossy: let the format round what it cannot hold, and warn of the loss.
        max_shard_bytes: bytes of tensors in one file of a folder; a layer is not cut. None means one file.
        on_tensor: called with each name when it is done.

    Raises:
        FileExistsError: ``path`` exists.
        WeightFormatError: the format cannot hold a weight; names the layer, the field and the rule.
        ValueError: an unknown format, a name twice, a config that contradicts the weights, or ``files`` for no folder
            or with a name that is not for them.

    Example:
        >>> import tempfile, torch, qmm
        >>> path = tempfile.mkdtemp() + "/w.safetensors"
        >>> w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
        >>> qmm.save(path, {"up": w})
        >>> torch.equal(qmm.load(path)["up"].qweight, w.qweight)
        True
    """
    path = Path(path)
    if format not in TARGETS:
        raise ValueError(f"format: must be one of {', '.join(TARGETS)}; got {format!r}")
    if path.suffix in _FOREIGN:
        raise ValueError(f"path: must be a .safetensors file or a folder; got {path}")
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: must be at least 1; got {max_shard_bytes}")
    plain = {} if plain is None else plain
    single = path.suffix == ".safetensors"
    if single and max_shard_bytes is not None:
        raise ValueError(f"max_shard_bytes: needs a folder to put shards in; got {path}")
    files = dict(files or {})
    _check_files(files, path, single)
    _refuse_existing(path, overwrite and single)
    target = TARGETS[format](weights, dict(config or {}), lossy)
    names = [f"{layer}.{suffix}" for layer in weights for suffix in target.suffixes]
    known = set(names)
    twice = next((name for name in plain if name in known), None)
    if twice is not None:
        raise ValueError(f"plain: names must not be those of a layer's tensors; got {twice!r}")
    names += plain
    text = config_text(target.config)
    if single:
        with SafetensorsWriter(path, names, _TORCH | {CONFIG_KEY: text}) as file:
            for batch in _batches(weights, plain, target, on_tensor):
                for name, tensor in batch.items():
                    file.add(name, tensor)
            _refuse_existing(path, overwrite)
    else:
        with _new_folder(path) as folder:
            whole = {**dict(model_config or {}), CONFIG_KEY: json.loads(text)}
            (folder / "config.json").write_text(json.dumps(whole, indent=2) + "\n")
            _write_shards(folder, names, _batches(weights, plain, target, on_tensor), max_shard_bytes)
            for name, source in files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source, folder / name)


def _check_files(files: Mapping[str, Path], path: Path, single: bool) -> None:
    if files and single:
        raise ValueError(f"files: need a folder to stand in; got {path}")
    for name in files:
        parts = PurePosixPath(name).parts
        plain = 1 <= len(parts) <= 2 and parts[0] != "/" and ".." not in parts and "\\" not in name
        if not plain or name == "config.json" or name.endswith((".safetensors", ".safetensors.index.json")):
            raise ValueError(
                "files: names must be plain, in the folder or one below, and none that the weights take; "
                f"got {name[:100]!r}"
            )


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if os.path.lexists(path) and not (overwrite and path.is_file()):
        raise FileExistsError(
            f"{path}: exists; a file is replaced where overwriting is asked for, a folder never"
        )


def _batches(
    weights: Mapping[str, QuantizedWeight],
    plain: Mapping[str, Tensor],
    target: Target,
    on_tensor: Callable[[str], None] | None,
) -> Iterator[dict[str, Tensor]]:
    """What belongs together, by names in the file, made when asked for: a layer, or a plain tensor."""
    for name in weights:
        yield {f"{name}.{suffix}": t for suffix, t in target.tensors(name, weights[name]).items()}
        if on_tensor is not None:
            on_tensor(name)
    for name in plain:
        yield {name: plain[name]}
        if on_tensor is not None:
            on_tensor(name)


def _write_shards(
    folder: Path, names: list[str], batches: Iterator[dict[str, Tensor]], limit: int | None
) -> None:
    """``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on with their index."""
    shards: list[list[str]] = []
    total = 0
    batch = next(batches, None)
    while batch is not None or not shards:
        written: list[str] = []
        with SafetensorsWriter(folder / str(len(shards)), names, _TORCH) as file:
            while batch is not None:
                if (
                    written
                    and limit is not None
                    and file.nbytes + sum(t.nbytes for t in batch.values()) > limit
                ):
                    break
                for name, tensor in batch.items():
                    file.add(name, tensor)
                written += batch
                batch = next(batches, None)
        total += file.nbytes
        shards.append(written)
    if len(shards) == 1:
        os.replace(folder / "0", folder / "model.safetensors")
        return
    table: dict[str, str] = {}
    for i, written in enumerate(shards):
        shard = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / str(i), folder / shard)
        table |= dict.fromkeys(written, shard)
    index = {"metadata": {"total_size": total}, "weight_map": table}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """A hidden folder beside ``path`` that takes its name when the block ends without an exception."""
    temporary = Temporary(path, folder=True)
    try:
        yield temporary.path
        _refuse_existing(path, overwrite=False)
        os.rename(temporary.path, path)  # refuses a folder that has appeared meanwhile, unless it is empty
    finally:
        temporary.close()
