"""What makes a folder of weights usable beside its weights and configs: a tokenizer, a chat template, ...

Everything small that is no weight: those files have many names, and new ones come with every family of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 64 << 20  # the largest tokenizers take half of it
TEMPLATES = "additional_chat_templates"  # the one subfolder that is part of the layout

# Weights in this or another library's form, and what describes them alone
_WEIGHTS = (
    ".safetensors", ".index.json", ".gguf", ".ggml", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack",
    ".onnx", ".onnx_data", ".npz", ".npy", ".tflite", ".mlmodel", ".nemo", ".zip", ".tar", ".gz",
)  # fmt: skip
# written anew, or about the quantisation that the weights no longer have
_CONFIGS = ("config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")


def companions(folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The files to copy along with the weights of ``folder``.

    Hidden files, weights and configs are no part of it. A link is followed where it stays in the folder; in a
    snapshot of the Hugging Face cache, whose files are all links, where it stays in that model's part of the cache.

    Returns:
        ``{name, with / in it for a subfolder: the file itself}``, and ``{name: why it is left out}``.
    """
    root = folder.resolve()
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        root = root.parent.parent
    found: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    paths = list(_candidates(folder))
    if (folder / TEMPLATES).is_dir():
        inside = (folder / TEMPLATES).resolve().is_relative_to(root)
        paths += _candidates(folder / TEMPLATES) if inside else [folder / TEMPLATES]
    for path in paths:
        name = path.relative_to(folder).as_posix()
        real = path.resolve()
        if not real.is_relative_to(root):
            left_out[name] = "a link out of the folder"
        elif not real.is_file():
            continue
        elif real.stat().st_size > MAX_BYTES:
            left_out[name] = f"larger than {MAX_BYTES >> 20} MB"
        else:
            found[name] = real
    return found, left_out


def _candidates(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        name = path.name.lower()
        if not (path.is_dir() or name.startswith(".") or name in _CONFIGS or name.endswith(_WEIGHTS)):
            yield path
