"""Where a model's tensors and its quantisation config are: a folder as Hugging Face lays it out, or one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from qmm.checkpoint.json_text import parse_object, read_object
from qmm.checkpoint.safetensors_read import SafetensorsFile
from qmm.errors import WeightFormatError

INDEX = "model.safetensors.index.json"
CONFIG_KEY = "quantization_config"  # in config.json, and in the metadata of a file that qmm wrote
CONFIG_KEYS = (CONFIG_KEY, "compression_config")  # the second is what old compressed-tensors files have
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass
class Found:
    """The files of a checkpoint.

    Attributes:
        files: ``{tensor name: file}``, from the index or the files' headers.
        unindexed: ``{tensor name: reason}`` of tensors that the index does not list.
    """

    files: dict[str, SafetensorsFile] = field(default_factory=dict)
    unindexed: dict[str, str] = field(default_factory=dict)


def model_file(folder: Path) -> Path:
    """The index, the one safetensors file or the one GGUF file of a folder.

    Raises:
        WeightFormatError: there is none, or more than one.
    """
    for name in (INDEX, "model.safetensors"):
        if (folder / name).is_file():
            return folder / name
    names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    for endings in ((".safetensors.index.json",), (".safetensors",), (".gguf",)):
        mine = [name for name in names if name.endswith(endings)]
        if len(mine) == 1:
            return folder / mine[0]
        if mine:
            raise WeightFormatError(
                f"{folder}: must hold {INDEX}, model.safetensors or one file ({endings[0]}); got {', '.join(mine[:5])}"
            )
    pickles = [name for name in names if name.endswith(_PICKLES)]
    got = (
        f"{pickles[0]}, a pickle, which can run any code when read"
        if pickles
        else ", ".join(names[:5]) or "nothing"
    )
    raise WeightFormatError(f"{folder}: must hold {INDEX}, a .safetensors or a .gguf file; got {got}")


def open_index(path: Path) -> Found:
    """The files that an index names.

    Raises:
        OSError: a file cannot be opened.
        WeightFormatError: the index is damaged, names a file outside its folder or a missing one, or a tensor that
            the file does not have.
    """
    table = read_object(path).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise WeightFormatError(f"{path}: weight_map must map tensor names to files; got {str(table)[:100]}")
    opened: dict[str, SafetensorsFile] = {}
    found = Found()
    for name, file in table.items():
        what = f"{path}: tensor {name!r}"
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or file != Path(file).name
            or "\\" in file
        ):
            raise WeightFormatError(
                f"{what}: its file must be a .safetensors file in the same folder; got {str(file)[:100]!r}"
            )
        if file not in opened:
            if not (path.parent / file).is_file():
                raise WeightFormatError(f"{what}: its file must exist; got no {file}")
            opened[file] = SafetensorsFile(path.parent / file)
        if name not in opened[file].entries:
            raise WeightFormatError(
                f"{what}: must be in {file}; got {len(opened[file].entries)} other tensors there"
            )
        found.files[name] = opened[file]
    for file in opened.values():
        for name in file.entries:
            if name not in table:
                found.unindexed[name] = f"not in {path.name}: {file.entries[name]} in {file.path.name}"
    return found


def find_config(file: SafetensorsFile | None, folder: Path) -> tuple[dict[str, Any], str] | None:
    """The quantisation config, and the name of the file that it stands in; None where nothing has one.

    That in the metadata of ``file`` is its own and counts alone. Otherwise the folder's ``config.json``,
    ``quantize_config.json`` (GPTQ) and ``hf_quant_config.json`` (ModelOpt) are looked at.

    Raises:
        WeightFormatError: damaged, or two of them contradict each other.
    """
    own = _from_metadata(file)
    if own is not None:
        return own
    found = [f for f in (_from_config(folder), *_from_writers(folder)) if f is not None]
    for (config, where), (other, there) in pairwise(found):
        for key in ("quant_method", "bits", "group_size", "desc_act", "checkpoint_format"):
            if key in config and key in other and config[key] != other[key]:
                raise WeightFormatError(
                    f"{where}: {key} must be what {Path(there).name} says, {str(other[key])[:100]!r}; "
                    f"got {str(config[key])[:100]!r}"
                )
    return found[0] if found else None


def _from_metadata(file: SafetensorsFile | None) -> tuple[dict[str, Any], str] | None:
    text = None if file is None else file.metadata.get(CONFIG_KEY)
    if file is None or text is None:
        return None
    where = f"{file.path}: metadata {CONFIG_KEY}"
    return parse_object(text.encode(), where), where


def _from_config(folder: Path) -> tuple[dict[str, Any], str] | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    whole = read_object(path)
    # models of images and text keep the language model's config one level down
    for part in (whole, whole.get("text_config")):
        for key in CONFIG_KEYS:
            config = part.get(key) if isinstance(part, dict) else None
            if config is not None:
                return _object(config, f"{path}: {key}"), str(path)
    return None


def _from_writers(folder: Path) -> list[tuple[dict[str, Any], str]]:
    found = []
    path = folder / "quantize_config.json"
    if path.is_file():
        # AutoGPTQ's file, older than the key
        found.append(({"quant_method": "gptq"} | read_object(path), str(path)))
    path = folder / "hf_quant_config.json"
    if path.is_file():
        config = _object(read_object(path).get("quantization"), f"{path}: quantization")
        found.append(({"quant_method": "modelopt"} | config, str(path)))
    return found


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WeightFormatError(f"{where}: must be an object; got {str(value)[:100]}")
    return value


def config_text(config: Mapping[str, Any]) -> str:
    """A quantisation config as the metadata of a file keep it.

    Raises:
        ValueError: something in it is not JSON.
    """
    try:
        return json.dumps(dict(config), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"config: must be JSON (names to strings, numbers, lists, objects); got {error}"
        ) from None
