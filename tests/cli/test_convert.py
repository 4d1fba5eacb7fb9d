"""``qmm convert``: the same weights in another format, with what was not quantised, whole or not at all."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

import qmm
from qmm.cli import main

pytest.importorskip("typer", reason="the command line needs typer: pip install 'qmm[cli]'")
pytest.importorskip("rich", reason="the command line needs rich: pip install 'qmm[cli]'")


def call(*arguments: object) -> int:
    """Exit code of the command."""
    with pytest.raises(SystemExit) as stopped:
        main(["convert", *map(str, arguments)])
    return int(stopped.value.code or 0)


def weight(seed: int, symmetric: bool = False) -> qmm.QuantizedWeight:
    return qmm.quantize(
        torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)), group_size=32, symmetric=symmetric
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Four layers, a bias and a norm, and the rest of a config.json."""
    weights = {f"layers.{i}.up": weight(i) for i in range(4)}
    plain = {"layers.0.up.bias": torch.randn(16), "norm.weight": torch.ones(2).bfloat16()}
    folder = tmp_path / "model"
    qmm.save(folder, weights, plain=plain, model_config={"model_type": "llama"}, max_shard_bytes=2000)
    return folder


@pytest.mark.parametrize("to", ["gptq_v2", "qmm"])
@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_same_weights(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, target: str
) -> None:
    assert call(model, tmp_path / target, "--to", to) == 0
    before, after = qmm.load(model), qmm.load(tmp_path / target)
    assert after.method == {"gptq_v2": "gptq", "qmm": "qmm"}[to] and set(after) == set(before)
    for name in before:
        assert torch.equal(after[name].dequantize(), before[name].dequantize())
    assert set(after.plain) == set(before.plain)
    assert all(torch.equal(after.tensor(name), before.tensor(name)) for name in before.plain)
    if target == "out":
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config == {"model_type": "llama", "quantization_config": after.config}
    shown = capsys.readouterr().out
    assert f"{target}: 4 layers" in shown and f"as {to}, 2 tensors as before" in shown
    assert "\x1b" not in shown and "\r" not in shown
    assert [line.split("  ")[1] for line in shown.splitlines()[:-1]] == [
        "2 of 6",
        "3 of 6",
        "5 of 6",
        "6 of 6",
    ]


OTHERS = (
    "tokenizer.json",
    "generation_config.json",
    "chat_template.jinja",
    "merges.txt",
    "tokenizer.model",
    "LICENSE",
)


def test_the_folder_stays_usable(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is no weight comes along; old configs, other libraries' weights, hidden files do not."""
    for name in OTHERS:
        (model / name).write_text(f"this is {name}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("{{ x }}")
    for name in ("quantize_config.json", "pytorch_model.bin", ".gitattributes", "old.safetensors.index.json"):
        (model / name).write_text('{"quant_method": "qmm", "version": 1}')
    (model / "original").mkdir()
    config = json.loads((model / "config.json").read_text())
    nested = {"hidden_size": 64, "quantization_config": config["quantization_config"]}
    (model / "config.json").write_text(json.dumps({**config, "text_config": nested, "tie": True}))
    out = tmp_path / "out"
    assert call(model, out, "--to", "gptq_v2") == 0
    assert "2 tensors as before, 7 other files copied" in capsys.readouterr().out
    there = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert there == {*OTHERS, "additional_chat_templates/rag.jinja", "config.json", "model.safetensors"}
    assert all((out / name).read_bytes() == (model / name).read_bytes() for name in OTHERS)
    written = json.loads((out / "config.json").read_text())
    assert written["text_config"] == {"hidden_size": 64} and written["tie"] is True
    quantization = written["quantization_config"]
    assert quantization["quant_method"] == "gptq" and quantization["checkpoint_format"] == "gptq_v2"
    assert (quantization["bits"], quantization["group_size"]) == (4, 32)
    assert (quantization["desc_act"], quantization["sym"]) == (False, False)
    assert set(qmm.load(out)) == set(qmm.load(model))
    assert call(model, tmp_path / "one.safetensors", "--to", "qmm") == 0
    assert not (tmp_path / "tokenizer.json").exists()


def test_links_are_not_followed_out_of_the_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone may hold a link to anything; what is left out is said."""
    (tmp_path / "secret").write_text("secret")
    (model / "tokenizer.json").symlink_to("../secret")
    (model / "absolute.txt").symlink_to(tmp_path / "secret")
    (model / "chat_template.jinja").write_text("inside")
    (model / "copy.jinja").symlink_to("chat_template.jinja")
    (model / "nowhere").symlink_to("none")
    (model / "additional_chat_templates").symlink_to(tmp_path)
    (model / "large.json").write_bytes(bytes(2000))
    monkeypatch.setattr("qmm.checkpoint.companions.MAX_BYTES", 1000)
    out = tmp_path / "out"
    assert call(model, out, "--to", "qmm") == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "chat_template.jinja", "config.json", "copy.jinja", "model.safetensors",
    ]  # fmt: skip
    assert (out / "copy.jinja").read_text() == "inside" and not (out / "copy.jinja").is_symlink()
    shown = capsys.readouterr().out
    for name in ("tokenizer.json", "absolute.txt", "additional_chat_templates"):
        assert f"Warning: {name}: not copied: a link out of the folder" in shown
    assert "Warning: large.json: not copied: larger than" in shown


def test_a_snapshot_of_the_cache(model: Path, tmp_path: Path) -> None:
    """Hugging Face's cache: every file is a link to ../../blobs."""
    repo = tmp_path / "models--a--b"
    snapshot, blobs = repo / "snapshots" / "0123", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (model / "tokenizer.json").write_text("tokens")
    for i, path in enumerate(sorted(model.iterdir())):
        path.rename(blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    (tmp_path / "secret").write_text("secret")
    (snapshot / "vocab.json").symlink_to("../../../secret")
    assert call(snapshot, tmp_path / "out", "--to", "qmm") == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokens"
    assert not (tmp_path / "out" / "vocab.json").exists()
    assert set(qmm.load(tmp_path / "out")) == set(qmm.load(snapshot))


def test_shards_and_prefix(model: Path, tmp_path: Path) -> None:
    assert call(model, tmp_path / "out", "--to", "qmm", "--prefix", "layers.0.", "--max-shard-mb", 1) == 0
    assert list(qmm.load(tmp_path / "out")) == ["layers.0.up"]


def test_gguf(tmp_path: Path) -> None:
    """Q4_0 has a zero point of 8 and no minimum: GPTQ can hold it."""
    name, row = b"blk.0.up.weight", b"".join(struct.pack("<e", 0.5) + bytes(range(16)) for _ in range(2))
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", len(name)) + name
    head += struct.pack("<I2QIQ", 2, 64, 8, 2, 0)
    (tmp_path / "m.gguf").write_bytes(head + bytes(-len(head) % 32) + 8 * row)
    assert call(tmp_path / "m.gguf", tmp_path / "out.safetensors", "--to", "gptq_v2") == 0
    (before,), (after,) = (qmm.load(tmp_path / f).values() for f in ("m.gguf", "out.safetensors"))
    assert torch.equal(before.dequantize(), after.dequantize())


def test_refuses_to_overwrite(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.safetensors"
    path.write_text("mine")
    assert call(model, path, "--to", "qmm") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"qmm convert: {path}: exists") and error.count("\n") == 1
    assert path.read_text() == "mine"
    assert call(model, path, "--to", "qmm", "--overwrite") == 0
    assert len(qmm.load(path)) == 4
    (tmp_path / "folder").mkdir()
    assert call(model, tmp_path / "folder", "--to", "qmm", "--overwrite") == 2
    assert list((tmp_path / "folder").iterdir()) == []


def test_lossy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused, one line that names the layer; or done and said."""
    codes = torch.zeros(64, 16, dtype=torch.int32)
    w = qmm.QuantizedWeight.from_codes(
        codes, torch.ones(2, 16).half(), torch.full((2, 16), 7.5), bits=4, group_size=32
    )
    qmm.save(tmp_path / "in.safetensors", {"up": w})
    out = tmp_path / "out.safetensors"
    assert call(tmp_path / "in.safetensors", out, "--to", "gptq_v2") == 2
    error = capsys.readouterr().err
    assert error.startswith("qmm convert: layer 'up': zeros") and error.count("\n") == 1
    assert not out.exists()
    assert call(tmp_path / "in.safetensors", out, "--to", "gptq_v2", "--lossy") == 0
    assert "Warning: " in capsys.readouterr().out
    assert len(qmm.load(out)) == 1


def test_what_cannot_be_converted(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad sources and targets: one line each, exit code 2, nothing written."""
    qmm.save(tmp_path / "plain.safetensors", {}, plain={"norm": torch.ones(1)})
    (tmp_path / "cut.safetensors").write_bytes(bytes(3))
    qmm.save(tmp_path / "stray.safetensors", {"up": weight(0)})
    raw = (tmp_path / "stray.safetensors").read_bytes()
    (tmp_path / "stray.safetensors").write_bytes(raw.replace(b'"up.facts"', b'"up.other"'))
    out = tmp_path / "out"
    for source, target, words in (
        (tmp_path / "none", out, "No such file"),
        (tmp_path / "cut.safetensors", out, "at least 8 bytes"),
        (tmp_path / "plain.safetensors", out, "must hold quantised layers"),
        (tmp_path / "stray.safetensors", out, "stands without facts"),
        (model, tmp_path / "out.gguf", "path: must be"),
        (model, tmp_path / "no" / "folder", "No such file"),
    ):
        assert call(source, target, "--to", "qmm") == 2
        error = capsys.readouterr().err
        assert error.startswith("qmm convert: ") and error.count("\n") == 1 and words in error, error
        assert not target.exists()
    assert call(model, out, "--to", "awq") == 2
