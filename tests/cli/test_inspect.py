"""``qmm inspect``: the table, the totals, what is wrong, the exit codes."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import qmm
from qmm.cli import main

pytest.importorskip("typer", reason="the command line needs typer: pip install 'qmm[cli]'")
pytest.importorskip("rich", reason="the command line needs rich: pip install 'qmm[cli]'")

from qmm.cli import inspecting


def call(*arguments: object) -> int:
    """Exit code of the command."""
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", *map(str, arguments)])
    return int(stopped.value.code or 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Three layers of GPTQ, one with act-order, and a norm."""
    make = qmm.QuantizedWeight.from_codes
    codes, scales = torch.zeros(64, 16, dtype=torch.int32), torch.ones(2, 16).half()
    weights = {f"layers.{i}.up": make(codes, scales, bits=4, group_size=32) for i in range(2)}
    weights["down"] = make(codes, scales, bits=4, group_size=32, g_idx=torch.arange(64) % 2)
    plain = {"layers.0.up.bias": torch.ones(16), **{f"norm.{i}": torch.ones(2) for i in range(10)}}
    qmm.save(tmp_path / "model", weights, "gptq_v2", plain=plain)
    return tmp_path / "model"


def damage(model: Path) -> None:
    """An out-of-range group in ``down.g_idx``."""
    path = model / "model.safetensors"
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    start = json.loads(raw[8 : 8 + length])["down.g_idx"]["data_offsets"][0]
    raw[8 + length + start] = 77
    path.write_bytes(raw)


def test_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(model) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if "64 x 16" in line]
    assert [row[1] for row in rows] == ["layers.0.up", "layers.1.up", "down"]
    assert [cell for cell in rows[0] if cell != "│"][1:6] == ["gptq", "4", "32", "int", "no"]
    assert [("yes" in row) for row in rows] == [False, False, True]
    assert "3 layers, 0.0 million weights" in shown and "3 4-bit group 32" in shown
    assert "No problem found." in shown and "Headers checked" not in shown
    assert "Not quantised: 11 tensors" in shown and "layers.0.up.bias: not quantised: F32 [16]" in shown
    assert "and 3 more (--json lists all)" in shown
    assert "\x1b" not in shown


def test_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(model, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "gptq" and found["problems"] == {} and found["warnings"] == {}
    assert found["values_read"] == 3 and len(found["unused"]) == 11
    assert found["layers"]["down"] == {
        "format": "gptq",
        "bits": 4,
        "group_size": 32,
        "zeros": "int",
        "act_order": True,
        "in_features": 64,
        "out_features": 16,
        "nbytes": 8 * 16 * 4 + 2 * 2 * 4 + 2 * 16 * 2 + 64 * 4,
    }


@pytest.mark.parametrize("large", [False, True])
def test_a_broken_layer_does_not_stop_the_rest(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Found by the headers of a large model, too: a group index is always read."""
    if large:
        monkeypatch.setattr(inspecting, "READ_BYTES", 0)
    damage(model)
    assert call(model) == 1
    shown = capsys.readouterr().out
    assert "BROKEN" in shown and shown.count("64 x 16") == 2
    assert "1 problem\n" in shown and ("Headers checked; --check" in shown) == large
    assert "Problem: " in shown and "model.safetensors: layer 'down': g_idx: must be in [0, G)" in shown
    assert call(model, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert list(found["problems"]) == ["down"] and len(found["layers"]) == 2
    assert found["values_read"] == (0 if large else 2)
    assert call(model, "--json", "--check") == 1
    assert json.loads(capsys.readouterr().out)["values_read"] == 2


def test_parts_of_a_layer(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor without its layer is a problem."""
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"down.qweight"', b'"gone.weights"'))
    assert call(model) == 1
    shown = capsys.readouterr().out
    assert "3 problems" in shown and "Not used, and should be: 3 tensors" in shown
    assert "down.g_idx: stands without qweight: I32 [64]" in shown


def test_warnings_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that readers disagree on: GPTQ v1 with zero points of 0."""
    make, codes = qmm.QuantizedWeight.from_codes, torch.zeros(64, 16, dtype=torch.int32)
    zeros = torch.zeros(2, 16, dtype=torch.int32)
    w = make(codes, torch.ones(2, 16).half(), zeros, bits=4, group_size=32)
    qmm.save(tmp_path / "m", {"up": w}, "gptq_v2")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq"
    raw = (tmp_path / "m" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    start = 8 + length + json.loads(raw[8 : 8 + length])["up.qzeros"]["data_offsets"][0]
    (tmp_path / "m" / "model.safetensors").write_bytes(raw[:start] + b"\xff" * 16 + raw[start + 16 :])
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(tmp_path / "m") == 0
    assert "Warning: up" in capsys.readouterr().out
    assert call(tmp_path / "m", "--json") == 0
    assert list(json.loads(capsys.readouterr().out)["warnings"]) == ["up"]


def test_prefix_and_own_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = qmm.QuantizedWeight.from_codes(
        torch.zeros(8, 2, dtype=torch.int32),
        torch.ones(1, 2),
        bits=4,
        group_size=-1,
        codebook=torch.arange(16.0),
    )
    qmm.save(tmp_path / "w.safetensors", {"a[0]": book, "b": book})
    assert call(tmp_path / "w.safetensors", "--prefix", "a") == 0
    shown = capsys.readouterr().out
    assert "codebook" in shown and "a[0]" in shown and "1 layer," in shown


@pytest.mark.parametrize("what", ["missing", "damaged", "empty folder"])
def test_what_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    """One line, exit code 2."""
    path = tmp_path / "x.safetensors"
    if what == "damaged":
        path.write_bytes(bytes(3))
    assert call(tmp_path if what == "empty folder" else path) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("qmm inspect: ") and shown.err.count("\n") == 1
    assert str(tmp_path) in shown.err


def test_as_a_user_runs_it(model: Path) -> None:
    """Piped: no colours, no bar."""
    done = subprocess.run(
        [sys.executable, "-m", "qmm", "inspect", str(model)], capture_output=True, text=True, timeout=120
    )
    assert (
        done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout and "\r" not in done.stdout
    )
