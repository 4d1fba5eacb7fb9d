"""``qmm convert``: a checkpoint in one format -> the same weights in another, whole or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from torch import Tensor

import qmm
from qmm.checkpoint import Checkpoint
from qmm.checkpoint.companions import companions
from qmm.checkpoint.folder import CONFIG_KEYS
from qmm.checkpoint.json_text import read_object
from qmm.cli.inspecting import plural
from qmm.cli.report import progress


class _Plain(Mapping[str, Tensor]):
    """The tensors of a checkpoint that are not quantised, read when asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> Tensor:
        return self._checkpoint.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.plain)

    def __len__(self) -> int:
        return len(self._checkpoint.plain)

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint.plain


def run(
    console: Console,
    source: Path,
    target: Path,
    to: str,
    *,
    prefix: str | None = None,
    overwrite: bool = False,
    lossy: bool = False,
    max_shard_bytes: int | None = None,
) -> None:
    """Convert, with a progress bar; one layer in memory at a time.

    Tensors that are not quantised are copied as they are; from folder to folder also the rest of ``config.json`` and
    the small files beside it (tokenizer, generation config, chat template ...).

    Raises:
        OSError: a file cannot be read or written, or ``target`` exists.
        WeightFormatError: the source is damaged, holds a part of a layer without the rest, or the format cannot hold a
            layer; nothing is written then.
        ValueError: ``target`` is no place for the format.
    """
    checkpoint = qmm.load(source, prefix)
    faults = [name for name in checkpoint.unused if name not in set(checkpoint.plain)]
    if faults:
        raise qmm.WeightFormatError(
            f"{source}: tensor {faults[0]!r}: {checkpoint.unused[faults[0]]} ({len(faults)} tensors in all; "
            "--prefix leaves tensors out)"
        )
    if not len(checkpoint):
        raise qmm.WeightFormatError(f"{source}: must hold quantised layers; got none")
    folders = source.is_dir() and target.suffix != ".safetensors"
    files, left_out = companions(source) if folders else ({}, {})
    total = len(checkpoint) + len(checkpoint.plain)
    with warnings.catch_warnings(record=True) as caught, progress(console, total) as step:
        warnings.simplefilter("always")
        qmm.save(
            target,
            checkpoint,
            to,
            plain=_Plain(checkpoint),
            model_config=_model_config(source),
            files=files,
            overwrite=overwrite,
            lossy=lossy,
            max_shard_bytes=max_shard_bytes,
            on_tensor=lambda name: step(name, advance=1),
        )
    texts = [str(w.message) for w in caught] + [
        f"{name}: not copied: {why}" for name, why in left_out.items()
    ]
    for text in dict.fromkeys(texts):
        console.print(Text(f"Warning: {text}"), style="yellow", soft_wrap=True)
    before = sum(map(checkpoint.nbytes, checkpoint))
    console.print(
        Text(
            f"{target}: {plural(len(checkpoint), 'layer')} ({before / 1e6:.1f} MB as {checkpoint.method}) as {to}, "
        )
        + Text(f"{plural(len(checkpoint.plain), 'tensor')} as before")
        + Text(f", {plural(len(files), 'other file')} copied" if files else ""),
        soft_wrap=True,
    )


def _model_config(source: Path) -> dict[str, Any]:
    """What the source's ``config.json`` says of the model; its quantisation is another now.

    Models of images and text may have it one level down, where it would contradict the new one.
    """
    path = source / "config.json"
    if not path.is_file():
        return {}
    found = {key: value for key, value in read_object(path).items() if key not in CONFIG_KEYS}
    text = found.get("text_config")
    if isinstance(text, dict):
        found["text_config"] = {key: value for key, value in text.items() if key not in CONFIG_KEYS}
    return found
