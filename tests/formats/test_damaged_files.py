"""Damaged files: each kind gives one WeightFormatError that names the file, the tensor or layer, and the rule."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qmm

GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "checkpoint_format": "gptq_v2",
}
OWN = {"quant_method": "qmm", "version": 1}
DTYPES = {"<i4": "I32", "<f2": "F16", "<i8": "I64", "<f4": "F32", "|u1": "U8", "|i1": "I8"}


def gptq_layer(**changes: Any) -> dict[str, Any]:
    """K = 64, N = 16, two groups of 32; ``name=None`` leaves a tensor out."""
    rng = np.random.default_rng(0)
    parts = {
        "qweight": rng.integers(-(2**31), 2**31, (8, 16)).astype("<i4"),
        "qzeros": np.full((2, 2), 0x77777777, "<i4"),
        "scales": np.ones((2, 16), "<f2"),
        "g_idx": (np.arange(64) // 32).astype("<i4"),
    }
    return {f"up.{k}": v for k, v in {**parts, **changes}.items() if v is not None}


def own_layer(**changes: Any) -> dict[str, Any]:
    """K = 10, N = 4, 3 bits, two groups of 8: padding in the last word."""
    parts = {
        "qweight": np.full((1, 4), 0x12345678 & (2**30 - 1), "<i4"),
        "scales": np.ones((2, 4), "<f4"),
        "facts": np.array([1, 3, 8, 10, 0, -1, -1, 0], "<i8"),
    }
    return {f"up.{k}": v for k, v in {**parts, **changes}.items() if v is not None}


def header_of(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Header and data of a good file."""
    header, data = {}, b""
    for name, value in tensors.items():
        begin, data = len(data), data + value.tobytes()
        offsets = [begin, len(data)]
        header[name] = {"dtype": DTYPES[value.dtype.str], "shape": list(value.shape), "data_offsets": offsets}
    return header, data


def image(header: Mapping[str, Any] | str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file from its parts, right or wrong."""
    raw = (
        header
        if isinstance(header, bytes)
        else (header if isinstance(header, str) else json.dumps(header)).encode()
    )
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def one(
    dtype: object = "I32", shape: object = (2,), offsets: object = (0, 8), data: int = 8, **more: Any
) -> bytes:
    """A file with one tensor ``t``."""
    return image({"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}}, bytes(data))


def two(first: tuple[int, int], second: tuple[int, int], data: int) -> bytes:
    """A file with two tensors of bytes."""
    entries = {
        name: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]}
        for name, (a, b) in (("s", first), ("t", second))
    }
    return image(entries, bytes(data))


HEADERS: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["at least 8 bytes", "got 0"]),
    "seven-bytes": (bytes(7), ["at least 8 bytes", "got 7"]),
    "header-absurd": (struct.pack("<Q", 2**63) + bytes(16), ["at most 100000000 bytes", str(2**63)]),
    "header-past-end": (image("{}", length=99), ["truncated", "99 bytes", "10 bytes"]),
    "not-utf8": (image(b'{"\xff": 1}'), ["header", "UTF-8", "0xff"]),
    "not-json": (image('{"t": '), ["header", "must be JSON"]),
    "not-an-object": (image("[1]"), ["header", "JSON object", "list"]),
    "nested-deep": (image('{"t":' * 100_000), ["header", "nest"]),
    "nested-lists": (image('{"t":' + "[" * 100_000), ["header", "nest"]),
    "tensor-twice": (image('{"t": {}, "t": {}}'), ["'t' twice"]),
    "key-twice": (image('{"t": {"dtype": "U8", "dtype": "I8"}}'), ["'dtype' twice"]),
    "integer-long": (image('{"t": {"shape": [' + "9" * 5000 + "]}}"), ["digits", "5000"]),
    "half-surrogate": (image(r'{"\ud800": {}}'), ["surrogate"]),
    "entry-a-number": (image({"t": 1}), ["'t'", "dtype, shape and data_offsets"]),
    "entry-key-missing": (image({"t": {"dtype": "U8", "shape": [0]}}), ["'t'", "data_offsets"]),
    "entry-key-more": (one(stride=[1]), ["'t'", "dtype, shape and data_offsets"]),
    "dtype-unknown": (one("I7"), ["'t'", "dtype must be one of", "I7"]),
    "dtype-a-list": (one(["I32"]), ["'t'", "dtype must be one of"]),
    "shape-negative": (one(shape=[-2]), ["'t'", "shape", "-2"]),
    "shape-fraction": (one(shape=[2.0]), ["'t'", "shape", "2.0"]),
    "shape-true": (one(shape=[True, 2]), ["'t'", "shape", "True"]),
    "shape-a-number": (one(shape=2), ["'t'", "shape"]),
    "dims-many": (one(shape=[1] * 17 + [2]), ["'t'", "16 sizes"]),
    "empty-and-huge": (one(shape=[0, 2**62, 4], offsets=[0, 0], data=0), ["'t'", "product less than 2**63"]),
    "offsets-one": (one(offsets=[8]), ["'t'", "data_offsets", "[8]"]),
    "offsets-reversed": (one(offsets=[8, 0]), ["'t'", "begin <= end"]),
    "offsets-negative": (one(offsets=[-8, 0]), ["'t'", "begin <= end"]),
    "offset-past-end": (one(offsets=[2**40, 2**40 + 8]), ["'t'", "truncated"]),
    "data-cut": (one(data=7), ["'t'", "truncated", "ends at byte"]),
    "size-and-offsets": (one(shape=[3]), ["'t'", "needs 12 bytes", "have 8"]),
    "overlap": (two((0, 4), (3, 8), 8), ["overlap", "'s'", "'t'"]),
    "same-place": (two((0, 4), (0, 4), 4), ["overlap"]),
    "gap": (two((0, 4), (6, 8), 8), ["'t'", "follow 's' at once", "2 bytes"]),
    "gap-first": (two((2, 4), (4, 8), 8), ["'s'", "must begin where the header ends"]),
    "more-behind": (one(data=9), ["last tensor", "1 bytes more"]),
    "metadata-number": (image({"__metadata__": {"n": 1}}), ["__metadata__", "strings"]),
    "metadata-config": (
        image({"__metadata__": {"quantization_config": "{"}}),
        ["metadata quantization_config", "JSON"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_header(tmp_path: Path, case: str) -> None:
    data, words = HEADERS[case]
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(qmm.WeightFormatError) as caught:
        qmm.load(tmp_path / "bad.safetensors")
    assert all(word in str(caught.value) for word in [*words, "bad.safetensors"]), caught.value
    assert len(str(caught.value)) < 600


def folder(
    path: Path, tensors: Mapping[str, Any] | None = None, config: Any = GPTQ, **files: str | bytes | None
) -> Path:
    """A good folder, then ``files`` (``__`` in a name stands for a dot) written over it; None removes one."""
    all_files: dict[str, str | bytes | None] = {
        "model.safetensors": image(*header_of(gptq_layer() if tensors is None else tensors)),
        "config.json": json.dumps({"quantization_config": config}),
        **{name.replace("__", "."): content for name, content in files.items()},
    }
    for name, content in all_files.items():
        if content is not None:
            (path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def index(path: Path, table: Any, **files: str | bytes | None) -> Path:
    """A folder whose tensors are in ``one.safetensors``."""
    content = table if isinstance(table, str) else json.dumps({"weight_map": table})
    shard = image(*header_of(gptq_layer()))
    files = {"model__safetensors": None, "one__safetensors": shard, **files}
    return folder(path, model__safetensors__index__json=content, **files)


def with_config(**changes: Any) -> Callable[[Path], Path]:
    """The GPTQ folder with another config; None takes a key away."""
    config = {k: v for k, v in {**GPTQ, **changes}.items() if v is not None}
    return lambda path: folder(path, config=config)


GOOD_MAP = dict.fromkeys(gptq_layer(), "one.safetensors")
OPENING: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "index-not-json": (lambda p: index(p, "{"), ["index.json", "JSON"]),
    "index-no-map": (lambda p: index(p, "{}"), ["index.json", "weight_map"]),
    "index-map-a-list": (lambda p: index(p, ["up.qweight"]), ["index.json", "weight_map"]),
    "index-tensor-twice": (
        lambda p: index(p, '{"weight_map": {"t": "one.safetensors", "t": "one.safetensors"}}'),
        ["index.json", "'t' twice"],
    ),
    "index-parent": (
        lambda p: index(p, {**GOOD_MAP, "up.scales": "../one.safetensors"}),
        ["index.json", "'up.scales'", "same folder", "../one"],
    ),
    "index-absolute": (
        lambda p: index(p, {"t": str(p / "one.safetensors")}),
        ["index.json", "'t'", "same folder"],
    ),
    "index-backslash": (lambda p: index(p, {"t": "..\\one.safetensors"}), ["index.json", "'t'", "same folder"]),
    "index-pickle": (lambda p: index(p, {"t": "pytorch_model.bin"}), ["index.json", "'t'", ".safetensors file"]),
    "index-a-number": (lambda p: index(p, {"t": 1}), ["index.json", "'t'", "got '1'"]),
    "index-no-shard": (lambda p: index(p, {"t": "two.safetensors"}), ["index.json", "'t'", "no two.safetensors"]),
    "index-no-tensor": (
        lambda p: index(p, {**GOOD_MAP, "down.qweight": "one.safetensors"}),
        ["index.json", "'down.qweight'", "must be in one.safetensors"],
    ),
    "shard-cut": (
        lambda p: index(p, GOOD_MAP, one__safetensors=image(*header_of(gptq_layer()))[:-1]),
        ["one.safetensors", "'up.g_idx'", "truncated"],
    ),
    "config-not-json": (lambda p: folder(p, config__json="{'a': 1}"), ["config.json", "JSON"]),
    "config-a-list": (lambda p: folder(p, config=[1]), ["config.json", "quantization_config", "object"]),
    "config-key-twice": (lambda p: folder(p, config__json='{"a": 1, "a": 2}'), ["config.json", "'a' twice"]),
    "config-none": (
        lambda p: folder(p, config__json=None),
        ["quantisation config", "'up.qweight'"],
    ),
    "config-no-method": (with_config(quant_method=None), ["config.json", "quant_method", "gptq, awq"]),
    "config-method-unknown": (with_config(quant_method="aqlm"), ["config.json", "quant_method", "aqlm"]),
    "config-contradicted": (
        lambda p: folder(p, quantize_config__json=json.dumps({"bits": 8, "group_size": 32})),
        ["config.json", "bits", "quantize_config.json says, '8'", "got '4'"],
    ),
    "folder-empty": (lambda p: p, ["must hold model.safetensors.index.json", "nothing"]),
    "folder-pickle": (
        lambda p: folder(p, model__safetensors=None, pytorch_model__bin=b"\x80\x02."),
        ["pytorch_model.bin", "pickle"],
    ),
    "folder-two-files": (
        lambda p: folder(p, model__safetensors=None, a__safetensors=b"", b__safetensors=b""),
        ["one file", "a.safetensors, b.safetensors"],
    ),
    "file-pickle": (lambda p: folder(p, model__pt=b"\x80\x02.") / "model.pt", ["model.pt", "a .safetensors file"]),
}  # fmt: skip


@pytest.mark.parametrize("case", OPENING)
def test_opening(tmp_path: Path, case: str) -> None:
    build, words = OPENING[case]
    path = build(tmp_path)
    with pytest.raises(qmm.WeightFormatError) as caught:
        qmm.load(path)
    assert all(word in str(caught.value) for word in [*words, str(tmp_path)]), caught.value


def gptq(**changes: Any) -> Callable[[Path], Path]:
    """A folder with a changed layer."""
    return lambda path: folder(path, gptq_layer(**changes))


def own(config: Any = OWN, **changes: Any) -> Callable[[Path], Path]:
    """The same in qmm's own format."""
    return lambda path: folder(path, own_layer(**changes), config)


def facts(**changes: int) -> np.ndarray[Any, Any]:
    """``facts`` of :func:`own_layer` with other numbers."""
    numbers = {"version": 1, "bits": 3, "group": 8, "k": 10, "kind": 0, "ratio": -1, "zero": -1, "divides": 0}
    return np.array(list({**numbers, **changes}.values()), "<i8")


LAYERS: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "no-scales": (gptq(scales=None), ["scales"]),
    "no-zeros": (gptq(qzeros=None), ["qzeros"]),
    "codes-float": (gptq(qweight=np.ones((8, 16), "<f4")), ["qweight", "int32", "float32"]),
    "codes-bytes": (gptq(qweight=np.ones((8, 16), "|u1")), ["qweight", "int32", "uint8"]),
    "codes-3d": (gptq(qweight=np.ones((1, 8, 16), "<i4")), ["qweight", "2 dimensions"]),
    "zeros-shape": (gptq(qzeros=np.ones((2, 3), "<i4")), ["qzeros", "[2, 2]", "[2, 3]"]),
    "zeros-float": (gptq(qzeros=np.ones((2, 2), "<f2")), ["qzeros", "int32"]),
    "scales-shape": (gptq(scales=np.ones((3, 16), "<f2"), qzeros=np.ones((3, 2), "<i4")), ["scales", "2", "3"]),
    "scales-columns": (gptq(scales=np.ones((2, 15), "<f2")), ["scales"]),
    "scales-int": (gptq(scales=np.ones((2, 16), "<i4")), ["scales", "dtype"]),
    "scales-empty": (gptq(scales=np.ones((0, 16), "<f2")), ["scales"]),
    "g_idx-large": (gptq(g_idx=np.full(64, 2, "<i4")), ["g_idx", "[0, G)", "2"]),
    "g_idx-negative": (gptq(g_idx=np.full(64, -1, "<i4")), ["g_idx", "-1"]),
    "g_idx-short": (gptq(g_idx=np.zeros(63, "<i4")), ["g_idx"]),
    "g_idx-float": (gptq(g_idx=np.zeros(64, "<f4")), ["g_idx", "dtype"]),
    "config-bits": (with_config(bits=9), ["bits", "9"]),
    "config-bits-text": (with_config(bits="four"), ["bits", "four"]),
    "config-bits-none": (with_config(bits=None), ["bits"]),
    "config-bits-wrong": (with_config(bits=8), ["up"]),
    "config-group": (with_config(group_size=0), ["group_size", "0"]),
    "config-group-list": (with_config(group_size=[32]), ["group_size", "[32]"]),
    "config-format": (with_config(checkpoint_format="marlin"), ["checkpoint_format", "marlin"]),
    "own-version": (own({**OWN, "version": 2}), ["version", "must be 1", "got 2"]),
    "own-no-version": (own({"quant_method": "qmm"}), ["version", "None"]),
    "own-facts-version": (own(facts=facts(version=7)), ["facts", "version must be 1", "7"]),
    "own-facts-dtype": (own(facts=np.ones(8, "<i4")), ["facts", "int64 [8]", "int32"]),
    "own-facts-short": (own(facts=np.ones(6, "<i8")), ["facts", "int64 [8]", "[6]"]),
    "own-bits": (own(facts=facts(bits=9)), ["bits", "9"]),
    "own-bits-contradict": (own(facts=facts(bits=8)), ["qweight", "3 rows", "1"]),
    "own-group": (own(facts=facts(group=0)), ["group_size", "0"]),
    "own-k-absurd": (own(facts=facts(k=2**62)), ["in_features", str(2**62)]),
    "own-kind": (own(facts=facts(kind=9)), ["zero kind", "9"]),
    "own-kind-without-zeros": (own(facts=facts(kind=1)), ["zeros", "given"]),
    "own-padding": (own(qweight=np.full((1, 4), -1, "<i4")), ["qweight", "bits past code 9"]),
    "own-no-codes": (own(qweight=None), ["qweight", "must have"]),
    "own-scales-rows": (own(scales=np.ones((3, 4), "<f4")), ["scales", "2 rows", "3"]),
    "own-scale-dtype": (own(scales=np.ones((2, 4), "|u1")), ["scales", "dtype"]),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.filterwarnings("ignore::qmm.FormatWarning")
def test_layer(tmp_path: Path, case: str) -> None:
    """Opens; the layer is refused when it is read, and its facts say so too."""
    build, words = LAYERS[case]
    checkpoint = qmm.load(build(tmp_path))
    assert list(checkpoint) == ["up"]
    for read in (checkpoint.__getitem__, checkpoint.facts):
        with pytest.raises(qmm.WeightFormatError) as caught:
            read("up")
        text = str(caught.value)
        assert all(word in text for word in [*words, "model.safetensors", "layer 'up'"]), text


@pytest.mark.parametrize("missing", ["qweight", "facts"])
def test_parts_without_their_key(tmp_path: Path, missing: str) -> None:
    """No layer, and each part is said to stand alone."""
    build = gptq(qweight=None) if missing == "qweight" else own(facts=None)
    checkpoint = qmm.load(build(tmp_path))
    assert not len(checkpoint) and not checkpoint.plain
    assert "up.scales" in checkpoint.unused
    assert all(f"stands without {missing}" in why for why in checkpoint.unused.values())


def gguf_file(
    kind: int = 2, dims: tuple[int, ...] = (32, 2), offset: int = 0, data: int = 36, version: int = 3
) -> bytes:
    """One tensor ``up.weight``: type 2 is Q4_0, of 18 bytes a block."""
    name = b"up.weight"
    head = b"GGUF" + struct.pack("<IQQ", version, 1, 0) + struct.pack("<Q", len(name)) + name
    head += struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return head + bytes(-len(head) % 32) + bytes(data)


GGUF: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["GGUF file"]),
    "magic": (b"GGML" + bytes(60), ["GGUF file", "GGML"]),
    "version": (gguf_file(version=9), ["version", "9"]),
    "data-cut": (gguf_file(data=35), ["'up.weight'", "truncated"]),
    "header-cut": (gguf_file()[:40], ["truncated"]),
    "offset-past-end": (gguf_file(offset=1 << 40), ["'up.weight'", "truncated"]),
    "offset-unaligned": (gguf_file(offset=1), ["'up.weight'", "offset", "32"]),
    "shape-absurd": (gguf_file(dims=(32, 1 << 57)), ["'up.weight'", "truncated"]),
    "empty-and-huge": (gguf_file(kind=0, dims=(4, 1 << 62, 0)), ["'up.weight'", "product", "2**63"]),
    "k-not-blocks": (gguf_file(dims=(33, 2)), ["'up.weight'", "block of 32"]),
    "dims-many": (gguf_file(dims=(32, 1, 1, 1, 1)), ["'up.weight'", "4 dimensions"]),
}


@pytest.mark.parametrize("case", GGUF)
def test_gguf(tmp_path: Path, case: str) -> None:
    data, words = GGUF[case]
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(qmm.WeightFormatError) as caught:
        qmm.load(tmp_path)
    assert all(word in str(caught.value) for word in [*words, "bad.gguf"]), caught.value


def test_the_good_ones(tmp_path: Path) -> None:
    """What the damage was done to is sound: nothing above is refused for another reason."""
    for name, build in {"gptq": gptq(), "own": own(), "index": lambda p: index(p, GOOD_MAP)}.items():
        (tmp_path / name).mkdir()
        checkpoint = qmm.load(build(tmp_path / name))
        assert checkpoint["up"].shape in ((64, 16), (10, 4))
        assert checkpoint.unused == {}
    (tmp_path / "good.gguf").write_bytes(gguf_file())
    assert qmm.load(tmp_path / "good.gguf")["up.weight"].shape == (32, 2)


def test_file_that_shrinks_while_open(tmp_path: Path) -> None:
    """An error, where reading the map would kill the process."""
    path = folder(tmp_path) / "model.safetensors"
    checkpoint = qmm.load(tmp_path)
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(qmm.WeightFormatError, match=r"model\.safetensors.*'up.*shrink"):
        checkpoint["up"]


def test_every_truncation(tmp_path: Path) -> None:
    good = image(*header_of(own_layer()))
    for length in range(len(good)):
        (tmp_path / "cut.safetensors").write_bytes(good[:length])
        with pytest.raises(qmm.WeightFormatError):
            qmm.load(tmp_path / "cut.safetensors", config=OWN)
