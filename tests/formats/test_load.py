"""``qmm.load``: finds files and configs, sorts tensors into layers, reads one layer at a time, says what it left."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qmm
from qmm.checkpoint.methods import METHODS, format_module
from qmm.checkpoint.safetensors_read import DTYPES, SafetensorsFile
from qmm.formats.patterns import matches

DATA = Path(__file__).parent.parent / "data"
VECTORS = {p.stem: p for folder in ("gptq", "vectors") for p in sorted((DATA / folder).glob("*.safetensors"))}
VECTORS = {name: p for name, p in VECTORS.items() if p.with_suffix(".json").is_file()}
TAGS = {
    torch.int32: "I32",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}
TAGS |= {torch.float8_e4m3fn: "F8_E4M3", torch.uint32: "U32"}


def image(tensors: Mapping[str, torch.Tensor], **metadata: str) -> bytes:
    """A safetensors file, put together here."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, t in tensors.items():
        begin = len(data)
        data += t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": TAGS[t.dtype], "shape": list(t.shape), "data_offsets": [begin, len(data)]}
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def gptq(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """A layer of K = 64, N = 16, 4 bits, groups of 32."""
    words = torch.randint(-(2**31), 2**31, (8, 16), generator=torch.Generator().manual_seed(seed))
    parts = {
        "qweight": words.int(),
        "qzeros": torch.full((2, 2), 0x77777777).int(),
        "scales": torch.ones(2, 16).half(),
    }
    return {f"{name}.{suffix}": t for suffix, t in parts.items()}


CONFIG = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "checkpoint_format": "gptq_v2",
    "desc_act": False,
}


def write(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Any = CONFIG, name: str = "model"
) -> Path:
    (folder / f"{name}.safetensors").write_bytes(image(tensors))
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.filterwarnings("ignore::qmm.FormatWarning")
def test_every_vector(tmp_path: Path, name: str) -> None:
    """A folder as on Hugging Face, links instead of files as in its cache: every format, by its own config."""
    config = json.loads(VECTORS[name].with_suffix(".json").read_text())["quantization_config"]
    (tmp_path / "model.safetensors").symlink_to(VECTORS[name])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    checkpoint = qmm.load(tmp_path, prefix="layer.")
    assert checkpoint.config == config
    assert set(checkpoint.unused) == set(checkpoint.plain)
    for tensor, why in checkpoint.unused.items():
        assert why.startswith("about activations" if "input_scale" in tensor else "not quantised"), why
    expected = SafetensorsFile(VECTORS[name]).tensor("expected.weight")
    experts = expected if expected.dim() == 3 else expected[None]
    assert len(checkpoint) == len(experts)
    for (layer, w), values in zip(checkpoint.items(), experts, strict=True):
        assert layer.startswith("layer")
        # at most one rounding apart; which format is exact is for its own tests
        assert torch.allclose(w.dequantize().t(), values, rtol=2.5e-7, atol=0), layer
        assert checkpoint.facts(layer).spec == w.spec
        assert w.nbytes > 0 and checkpoint.nbytes(layer) > 0


def test_all_vectors_are_here() -> None:
    methods = {
        json.loads(p.with_suffix(".json").read_text())["quantization_config"]["quant_method"]
        for p in VECTORS.values()
    }
    assert methods == set(METHODS) - {"qmm", "seed"}


def test_folder_with_one_file(tmp_path: Path) -> None:
    tensors = {**gptq("a.up"), "a.up.bias": torch.ones(16), "norm.weight": torch.ones(4).bfloat16()}
    checkpoint = qmm.load(write(tmp_path, tensors, name="some-model"))
    assert list(checkpoint) == ["a.up"] and len(checkpoint) == 1 and "a.up" in checkpoint
    assert checkpoint.unused == {
        "a.up.bias": "not quantised: F32 [16]",
        "norm.weight": "not quantised: BF16 [4]",
    }
    assert checkpoint.plain == ("a.up.bias", "norm.weight")
    assert torch.equal(checkpoint.tensor("norm.weight"), tensors["norm.weight"])
    assert torch.equal(checkpoint["a.up"].qweight, tensors["a.up.qweight"])
    assert checkpoint["a.up"] is not checkpoint["a.up"]
    assert "1 gptq layers, 2 tensors not used, 0 of them for a fault" in repr(checkpoint)
    assert checkpoint.facts("a.up").nbytes == 8 * 16 * 4 + 16 + 64
    with pytest.raises(KeyError, match=r"no layer 'up' \(there is a\.up\)"):
        checkpoint["up"]
    with pytest.raises(KeyError, match="no layer 'x' among 1"):
        checkpoint.facts("x")
    with pytest.raises(qmm.WeightFormatError, match=r"norm\.weight.*not quantised"):
        checkpoint["norm.weight"]
    with pytest.raises(KeyError, match=r"a\.up"):
        checkpoint.tensor("a.up")


def shard(folder: Path) -> dict[str, torch.Tensor]:
    """Two files; the layer ``b`` is cut."""
    a, b = gptq("a", 1), gptq("b", 2)
    first = {**a, "b.qweight": b.pop("b.qweight")}
    second = {**b, "extra": torch.ones(1)}
    (folder / "1.safetensors").write_bytes(image(first))
    (folder / "2.safetensors").write_bytes(image(second))
    table = {**dict.fromkeys(first, "1.safetensors"), **dict.fromkeys(b, "2.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    (folder / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))
    return {**first, **second}


def test_shards(tmp_path: Path) -> None:
    tensors = shard(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        checkpoint = qmm.load(path)
        assert list(checkpoint) == ["a", "b"]
        assert torch.equal(checkpoint["b"].qweight, tensors["b.qweight"])
        assert checkpoint.unused == {"extra": "not in model.safetensors.index.json: F32 [1] in 2.safetensors"}


def test_prefix(tmp_path: Path) -> None:
    """Names stay whole."""
    shard(tmp_path)
    assert list(qmm.load(tmp_path, prefix="b.")) == list(qmm.load(tmp_path, "b")) == ["b"]
    assert qmm.load(tmp_path, prefix="b.").unused == {}
    assert not qmm.load(tmp_path, prefix="c")


CONFIGS: dict[str, dict[str, object]] = {
    "config": {"config.json": {"quantization_config": CONFIG}},
    "nested": {"config.json": {"text_config": {"quantization_config": CONFIG}}},
    "older-key": {"config.json": {"compression_config": CONFIG}},
    "autogptq": {"quantize_config.json": {k: v for k, v in CONFIG.items() if k != "quant_method"}},
    "both": {
        "config.json": {"quantization_config": CONFIG},
        "quantize_config.json": {"bits": 4, "group_size": 32},
    },
}


@pytest.mark.parametrize("case", CONFIGS)
def test_where_the_config_stands(tmp_path: Path, case: str) -> None:
    write(tmp_path, gptq("up"), None)
    for name, content in CONFIGS[case].items():
        (tmp_path / name).write_text(json.dumps(content))
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert qmm.load(path).config == CONFIG
        assert qmm.load(path)["up"].group_size == 32


def test_config_of_modelopt(tmp_path: Path) -> None:
    tensors = {"up.weight": torch.ones(4, 8).to(torch.float8_e4m3fn), "up.weight_scale": torch.tensor(2.0)}
    write(tmp_path, tensors, None)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert torch.equal(qmm.load(tmp_path)["up"].dequantize(), torch.full((8, 4), 2.0))


def test_config_by_hand(tmp_path: Path) -> None:
    """Instead of the file's."""
    write(tmp_path, gptq("up"), {**CONFIG, "group_size": 64})
    assert qmm.load(tmp_path, config=CONFIG)["up"].group_size == 32
    with pytest.raises(
        qmm.WeightFormatError, match=r"config: quant_method must be one of qmm, gptq.*got 'x'"
    ):
        qmm.load(tmp_path, config={"quant_method": "x"})


def test_model_that_is_not_quantised(tmp_path: Path) -> None:
    checkpoint = qmm.load(write(tmp_path, {"up.weight": torch.ones(2, 2)}, None))
    assert not checkpoint and checkpoint.config == {}
    assert checkpoint.unused == {"up.weight": "not quantised: F32 [2, 2]"}


def test_layers_left_alone(tmp_path: Path) -> None:
    """Which are listed is said; codes without a scale are a layer unless they are listed."""
    eight = torch.ones(4, 8).to(torch.float8_e4m3fn)
    tensors = {
        "model.up.weight": eight,
        "model.up.weight_scale_inv": torch.ones(1, 1),
        "model.down.weight": eight,
        "lm_head.weight": torch.ones(4, 8),
        "norm.weight": torch.ones(8),
        "vision.up.weight": eight,
        "old.weight_scale_inv": torch.ones(1, 1),
    }
    config = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "vision"],
    }
    checkpoint = qmm.load(write(tmp_path, tensors, config))
    assert list(checkpoint) == ["model.up", "model.down"]
    assert checkpoint.unused == {
        "lm_head.weight": "not quantised (listed in modules_to_not_convert): F32 [4, 8]",
        "norm.weight": "not quantised: F32 [8]",
        "vision.up.weight": "not quantised (listed in modules_to_not_convert): F8_E4M3 [4, 8]",
        "old.weight_scale_inv": "stands without weight_packed or weight: F32 [1, 1]",
    }
    assert "old.weight_scale_inv" not in checkpoint.plain
    assert checkpoint["model.up"].shape == (8, 4)
    with pytest.raises(qmm.WeightFormatError, match=r"model\.safetensors: layer 'model\.down'.*scale"):
        checkpoint["model.down"]


@pytest.mark.parametrize(
    ("pattern", "layer", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("lm_head", "my_lm_head", False),
        ("model.layers.1", "model.layers.1.up", True),
        ("model.layers.1", "model.layers.10.up", False),
        ("re:.*lm_head", "model.lm_head", True),
        ("re:.*lm_head", "model.lm_head.x", True),
        ("re:.*lm_head$", "model.lm_head.x", False),
        (r"re:^model\.layers\.0\..*", "model.layers.0.up", True),
        ("model.layers.*.self_attn", "model.layers.3.self_attn", True),
        ("model.layers.*.self_attn", "model.layers.self_attn", False),
        ("a*b*a", "aba", True),
        ("a*b*a", "ab", False),
        ("re:lm_head$", "lm_head", True),
        ("re:lm_head$", "x.lm_head", False),
        ("re:(a+)+$", "a" * 40 + "b", False),
        (r"re:.*layers\.\d+\.mlp\.gate$", "model.layers.12.mlp.gate", True),
        (r"re:.*layers\.\d+\.mlp\.gate$", "model.layers.12.mlp.gate_proj", False),
        ("re:.*(q|k)_proj", "layers.0.k_proj", True),
    ],
)
def test_patterns(pattern: str, layer: str, expected: bool) -> None:
    assert matches(pattern, layer) is expected


def test_a_file_s_expressions_are_not_run() -> None:
    started = time.perf_counter()
    assert not matches("re:" + "(a*)*" * 20 + "b", "a" * 5000)
    assert not matches("re:" + ".*a" * 300 + "b", "a" * 5000)
    assert not matches("re:(.*a){20}(a|aa)+b", "a" * 5000)
    assert time.perf_counter() - started < 1


def test_experts_are_read_one_by_one(tmp_path: Path) -> None:
    """gpt-oss keeps a stack of them in one tensor."""
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8)
    tensors = {"e.up_proj_blocks": blocks, "e.up_proj_scales": torch.full((3, 8, 2), 127, dtype=torch.uint8)}
    checkpoint = qmm.load(write(tmp_path, tensors, {"quant_method": "mxfp4"}))
    assert list(checkpoint) == ["e.up_proj[0]", "e.up_proj[1]", "e.up_proj[2]"] and not checkpoint.unused
    assert checkpoint.nbytes("e.up_proj[1]") == 8 * 2 * 17
    (tmp_path / "one").mkdir()
    alone = {name: t[1:2] for name, t in tensors.items()}
    (one,) = qmm.load(write(tmp_path / "one", alone, {"quant_method": "mxfp4"})).values()
    assert torch.equal(checkpoint["e.up_proj[1]"].dequantize(), one.dequantize())
    # a stack whose tensors disagree is one layer, refused by its format
    tensors["e.up_proj_scales"] = tensors["e.up_proj_scales"][:2]
    checkpoint = qmm.load(write(tmp_path, tensors, {"quant_method": "mxfp4"}))
    with pytest.raises(qmm.WeightFormatError, match=r"layer 'e\.up_proj': scales"):
        checkpoint["e.up_proj"]


def test_opening_reads_headers_only(tmp_path: Path) -> None:
    """A file of 40 GB (with holes: no disk) opens at once; one layer of it is read."""
    n, k, count = 16384, 16384, 320
    header: dict[str, Any] = {}
    at = 0
    for i in range(count):
        shapes = {
            "qweight": ("I32", [k // 8, n], 4),
            "qzeros": ("I32", [1, n // 8], 4),
            "scales": ("F16", [1, n], 2),
        }
        for suffix, (dtype, shape, size) in shapes.items():
            end = at + size * shape[0] * shape[1]
            header[f"layers.{i}.up.{suffix}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
    raw = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {**CONFIG, "group_size": -1}}))
    started = time.perf_counter()
    checkpoint = qmm.load(tmp_path)
    facts = [checkpoint.facts(name) for name in checkpoint]
    assert time.perf_counter() - started < 15  # on a busy machine; reading it all takes minutes
    assert len(facts) == count and sum(f.nbytes for f in facts) == at > 40e9
    assert facts[0].spec.group_size == k


def test_gguf(tmp_path: Path) -> None:
    """Names are those of its tensors; what is not quantised can be read."""
    row = b"".join(struct.pack("<e", 0.5) + bytes(range(16)) for _ in range(2))
    tensors = [
        (b"blk.0.up.weight", 2, (64, 3), 3 * row),
        (b"norm.weight", 0, (2, 1), struct.pack("<2f", 1, 2)),
    ]
    tensors.append((b"none", 1, (0,), b""))
    head, data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0), b""
    for name, kind, dims, content in tensors:
        head += (
            struct.pack("<Q", len(name))
            + name
            + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        )
        data += content + bytes(-len(content) % 32)
    for name in ("model.gguf", "unnamed"):  # known by its first bytes, too
        (tmp_path / name).write_bytes(head + bytes(-len(head) % 32) + data)
    for path in (tmp_path / "model.gguf", tmp_path / "unnamed", tmp_path):
        checkpoint = qmm.load(path)
        assert list(checkpoint) == ["blk.0.up.weight"] and checkpoint.method == "gguf"
        w, facts = checkpoint["blk.0.up.weight"], checkpoint.facts("blk.0.up.weight")
        assert facts.spec == w.spec and facts.format == "gguf Q4_0" and facts.nbytes == 108
        assert checkpoint.nbytes("blk.0.up.weight") == 108
        assert checkpoint.unused == {
            "norm.weight": "not quantised: F32 [1, 2]",
            "none": "not quantised: F16 [0]",
        }
        assert torch.equal(checkpoint.tensor("norm.weight"), torch.tensor([[1.0, 2.0]]))
        assert checkpoint.tensor("none").shape == (0,)
    assert not qmm.load(tmp_path, prefix="blk.1.") and not qmm.load(tmp_path, prefix="blk.1.").unused
    for read in (checkpoint.__getitem__, checkpoint.facts):
        with pytest.raises(qmm.WeightFormatError, match="not quantised"):
            read("norm.weight")
    with pytest.raises(KeyError):
        checkpoint.tensor("blk.0.up.weight")


def test_against_the_library(tmp_path: Path) -> None:
    """Every dtype that both know, read as the safetensors package reads it."""
    library = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")
    tensors = {}
    for tag, (bits, name) in DTYPES.items():
        dtype = getattr(torch, name, None) if name else None
        if dtype is None or tag in ("C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ"):
            continue
        raw = torch.from_numpy(np.random.default_rng(0).integers(0, 2, 6 * bits // 8).astype(np.uint8))
        tensors[tag] = raw.view(dtype).reshape(2, 3).clone()
        tensors[f"{tag} empty"], tensors[f"{tag} scalar"] = (
            tensors[tag][:0].clone(),
            tensors[tag][0, 0].clone(),
        )
    library.save_file(tensors, tmp_path / "all.safetensors", metadata={"some": "thing"})
    file = SafetensorsFile(tmp_path / "all.safetensors")
    assert file.metadata == {"some": "thing"} and set(file.entries) == set(tensors) and len(tensors) > 40
    for name, t in tensors.items():
        mine = file.tensor(name)
        assert (mine.dtype, mine.shape) == (t.dtype, t.shape), name
        if t.numel():
            assert torch.equal(mine.reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8)), name


def test_dtype_that_torch_has_not(tmp_path: Path) -> None:
    """No reason to refuse the file; asking for the tensor is."""
    raw = json.dumps({"t": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "t.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(2))
    checkpoint = qmm.load(tmp_path)
    assert checkpoint.unused == {"t": "not quantised: F4 [4]"}
    with pytest.raises(qmm.WeightFormatError, match=r"t\.safetensors: tensor 't': dtype.*got F4"):
        checkpoint.tensor("t")


@pytest.mark.filterwarnings("ignore::qmm.FormatWarning")
def test_unsigned_group_index(tmp_path: Path) -> None:
    """Found by the fuzzer: torch has no minimum of uint32."""
    for name, index in {"plain": torch.arange(64) // 32, "turned": torch.arange(64) % 2}.items():
        (tmp_path / name).mkdir()
        checkpoint = qmm.load(write(tmp_path / name, {**gptq("up"), "up.g_idx": index.to(torch.uint32)}))
        assert checkpoint.facts("up").spec == checkpoint["up"].spec
        assert checkpoint.facts("up").spec.act_order == (name == "turned")


def test_what_a_format_module_offers() -> None:
    """The interface that the table relies on."""
    for method, entry in METHODS.items():
        module = format_module(method)
        keys = {module.KEY} if isinstance(module.KEY, str) else set(module.KEY)
        assert keys <= module.SUFFIXES, method
        assert entry.described_by <= module.SUFFIXES and entry.underscored <= module.SUFFIXES, method
        assert callable(module.from_checkpoint)


def test_missing_files(tmp_path: Path) -> None:
    for name in ("none", "none.safetensors", "none.gguf"):
        with pytest.raises(FileNotFoundError):
            qmm.load(tmp_path / name)


def test_needs_no_other_package(tmp_path: Path) -> None:
    """Not even safetensors; and importing qmm loads none of this."""
    write(tmp_path, gptq("up"))
    code = f"""
import sys, qmm
assert not [m for m in sys.modules if m.startswith("qmm.checkpoint")]
path = {str(tmp_path)!r}
qmm.save(path + "/copy.safetensors", qmm.load(path))
assert isinstance(qmm.load(path + "/copy.safetensors"), qmm.Checkpoint)
found = [m for m in ("safetensors", "typer", "rich", "gguf") if m in sys.modules]
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
