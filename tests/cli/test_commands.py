"""doctor, explain, bench and cache through typer's runner; options and failures of every command; piped output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs typer: pip install 'qmm[cli]'")
pytest.importorskip("rich", reason="the command line needs rich: pip install 'qmm[cli]'")

import torch
import typer
from typer.testing import CliRunner

import qmm
from qmm.cli import INTERNAL_ERROR, USAGE_ERROR, main
from qmm.cli.app import app

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
PLAIN = ["--m", "1", "--n", "64", "--k", "128"]


def invoke(*arguments: str, **options: Any) -> Any:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False, **options)


def code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def piped(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """As a script would run it: no terminal anywhere."""
    return subprocess.run(
        [sys.executable, "-m", "qmm", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": ""} | env,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_version() -> None:
    done = invoke("--version")
    assert (done.exit_code, done.output) == (0, f"qmm {qmm.__version__}\n")


def test_every_command_has_help_with_exit_codes() -> None:
    group = typer.main.get_command(app)
    names = [[name] for name in group.commands if name != "cache"] + [["cache", "show"], ["cache", "clear"]]
    assert ["doctor"] in names and ["explain"] in names and ["bench"] in names and ["support"] in names
    for name in names:
        done = invoke(*name, "--help")
        assert done.exit_code == 0, name
        if name != ["support"]:
            assert "Exit code 0" in re.sub(r"\s+", " ", done.output), name


# doctor


def test_doctor() -> None:
    done = invoke("doctor")
    assert done.exit_code == (0 if not torch.cuda.is_available() else done.exit_code)
    for section in (
        "Versions",
        "Devices",
        "Backends",
        "Chosen by auto",
        "Caches",
        "Environment variables in force",
    ):
        assert section in done.output
    assert torch.__version__ in done.output
    for name in qmm.backends():
        assert re.search(rf"^  {name} +(usable|cannot run here)", done.output, re.M)


def test_doctor_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QMM_BACKEND", "torch")
    found = json.loads(invoke("doctor", "--json").output)
    assert found["versions"]["torch"] == torch.__version__
    assert found["environment"]["QMM_BACKEND"] == "torch"
    assert found["backends"]["torch"] == {
        "usable": True,
        "emulated": None,
        "kernels": ["blocks"],
        "reasons": [],
    }
    for name, backend in found["backends"].items():
        reasons = qmm.backends()[name].environment()
        assert [r["needs"] for r in backend["reasons"]] == [r.limit for r in reasons]
        assert backend["usable"] == (not reasons)
    assert set(found["chosen"]) == set(found["devices"])
    assert found["chosen"]["cpu"]["1"] == "torch.blocks"


def test_doctor_gives_the_command_that_fixes_it(tmp_path: Path) -> None:
    done = piped(
        "doctor", cwd=tmp_path, TRITON_INTERPRET="0", NUMBA_ENABLE_CUDASIM="0", CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        if line.strip().startswith("needs "):
            assert "(fix: " in line
    assert "triton  cannot run here" in done.stdout
    assert not CONTROL.search(done.stdout + done.stderr)


# explain


def test_explain_here() -> None:
    done = invoke("explain", *PLAIN)
    assert done.exit_code == 0
    assert re.search(
        r"^runs +torch\.blocks$" if not torch.cuda.is_available() else r"^runs ", done.output, re.M
    )


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        (["--device", "h200"], "triton.decode"),
        (["--device", "H200", "--deterministic", "batch"], "triton.decode"),
        (["--device", "h200", "--bits", "3"], "triton.tiled"),
        (["--device", "h200", "--act-order"], "triton.decode"),
        (["--device", "h200", "--codebook"], "triton.tiled"),
        (["--device", "a100", "--zeros", "int", "--scales", "bfloat16"], "triton.decode"),
        (["--device", "t4", "--zeros", "bias", "--bias", "--activation", "silu"], "triton.tiled"),
        (["--device", "h200", "--backend", "torch"], "torch.blocks"),
        (["--device", "h200", "--kernel", "triton.wgmma"], "triton.wgmma"),
        (["--device", "cpu"], "torch.blocks"),
    ],
)
def test_explain_a_described_device(options: list[str], kernel: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = invoke("explain", *PLAIN, *options)
    assert done.exit_code == 0
    assert re.search(rf"^runs +{re.escape(kernel)}$", done.output, re.M), done.output
    assert "(described; packages as installed here)" in done.output


def test_explain_as_json() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    found = json.loads(
        invoke("explain", "--m", "64", "--n", "8192", "--k", "8192", "--device", "h200", "--json").output
    )
    assert (found["backend"], found["kernel"]) == ("triton", "wgmma")
    assert found["config"]["split_k"] >= 1
    assert found["device"] == {"name": "NVIDIA H200", "described": True, "type": "cuda"}
    assert found["reasons"]["triton.decode"][0]["got"] == "64"
    least = found["least_us"]
    assert least["memory"] == pytest.approx((8192 * 8192 / 2 + 64 * 8192 * 2 + 64 * 2 * 8192 * 2) / 4.8e6)
    assert least["arithmetic"] == pytest.approx(2 * 64 * 8192 * 8192 / 989e6)


def test_explain_what_nothing_takes() -> None:
    done = invoke("explain", *PLAIN, "--device", "cpu", "--backend", "triton")
    assert done.exit_code == 1
    assert "nothing: the call would raise" in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "h2000"], "--device: must be here, h200"),
        (["--group-size", "0"], "--group-size: must be positive"),
        (["--scales", "int64"], "--scales: must be one of float16"),
        (["--codebook", "--zeros", "int"], "--codebook: goes with --zeros none"),
        (["--backend", "cuda"], "backend=: must be one of auto"),
        (["--kernel", "fastest"], "kernel: must be one of"),
    ],
)
def test_explain_bad_input_is_one_line(
    options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert code_of("explain", *PLAIN, *options) == USAGE_ERROR
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("qmm explain: ") and said in err and err.count("\n") == 1


# bench


BENCH = ["bench", "--shapes", "64x32", "--rows", "1,2", "--group-size", "32"]


def test_bench_saves_a_file_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs it")
    out = tmp_path / "b.json"
    done = invoke(*BENCH, "--out", str(out))
    assert done.exit_code == 0, done.output
    points = json.loads(out.read_text())["points"]
    assert {(p["contestant"], p["m"]) for p in points} == {
        (c, m) for c in ("torch.mm", "qmm") for m in (1, 2)
    }
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^64x32 +1 +[\d.]+ +[\d.]+ +[\d.]+ +\d+ +\d+% +torch\.blocks$", done.output, re.M)


def test_bench_without_matplotlib_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    done = invoke(*BENCH, "--out", str(tmp_path / "b.json"))
    assert done.exit_code == 0
    assert "no picture: it needs matplotlib" in done.output and "pip install matplotlib" in done.output


def test_bench_as_json_prints_json_alone(tmp_path: Path) -> None:
    done = piped(*BENCH, "--json", "--kernel", "torch.blocks", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {p["contestant"] for p in json.loads(done.stdout)["points"]} == {"torch.mm", "torch.blocks"}
    assert "saved qmm-bench.json" in done.stderr
    assert (tmp_path / "qmm-bench.json").read_text() == done.stdout


def test_bench_without_time_left(tmp_path: Path) -> None:
    done = invoke(*BENCH, "--seconds", "0", "--out", str(tmp_path / "b.json"))
    assert done.exit_code == 1
    assert "no time left" in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shapes", "64"], "--shapes: must be K x N"),
        (["--shapes", "0x4"], "--shapes: K and N must be positive"),
        (["--rows", "1,x"], "--rows: must be positive integers"),
        (["--kernel", "cublas"], "--kernel: must be one of triton.decode"),
        (["--rows", "1", "--shapes", "32x8", "--out", "/proc/nowhere/x.json"], "/proc/nowhere"),
    ],
)
def test_bench_bad_input_is_one_line(
    options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert code_of("bench", *options) == USAGE_ERROR
    err = capfd.readouterr().err
    assert said in err and err.count("\n") == 1


# cache


@pytest.fixture
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of Triton's with one entry of qmm and one of another program."""
    import qmm.backends

    folder = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    (place,) = qmm.backends.__path__
    for name, source in (("OURS", f"{place}/triton_gpu/tiled.py"), ("THEIRS", "/elsewhere/kernel.py")):
        entry = folder / name
        entry.mkdir(parents=True)
        (entry / "k.ttir").write_text(f'#loc = loc("{source}":1:0)\n')
        (entry / "k.cubin").write_bytes(b"\x7fELF" + bytes(996))
    return folder


def test_cache_show(triton_cache: Path) -> None:
    (row,) = json.loads(invoke("cache", "show", "--json").output)
    assert (row["folder"], row["entries"]) == (str(triton_cache), 1)
    assert row["bytes"] > 1000
    assert f"{triton_cache}: 1 entries of qmm" in invoke("cache", "show").output


def test_cache_clear_leaves_what_is_not_ours(triton_cache: Path) -> None:
    assert "would delete 1 entries" in invoke("cache", "clear", "--dry-run").output
    assert (triton_cache / "OURS").exists()
    done = invoke("cache", "clear")
    assert done.exit_code == 0 and "deleted 1 entries" in done.output
    assert [path.name for path in triton_cache.iterdir()] == ["THEIRS"]
    assert invoke("cache", "clear").exit_code == 0  # nothing to do


def test_cache_clear_all_asks(triton_cache: Path) -> None:
    assert invoke("cache", "clear", "--all", input="n\n").exit_code == 1
    assert len(list(triton_cache.iterdir())) == 2
    assert invoke("cache", "clear", "--all", "--yes").exit_code == 0
    assert list(triton_cache.iterdir()) == []


def test_no_cache_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "nothing"))
    assert "deleted 0 entries" in invoke("cache", "clear").output


def test_entries_of_a_real_kernel_are_recognised(tmp_path: Path) -> None:
    """What Triton writes for a kernel of qmm, compiled here with no GPU, counts as qmm's."""
    pytest.importorskip("triton", reason="triton is not installed")
    folder = Path(__file__).parents[1] / "triton"
    code = f"""
import sys; sys.path.append({str(folder)!r})
from compile_for_target import DeviceFacts, GPUTarget, sources, triton
from qmm.caches import caches, triton_folder
name, ast, options, dot = list(sources(("decode-int4-sym-fp16",), DeviceFacts(132, 227 << 10)))[-1]
assert name == "reduce"
triton.compile(ast, target=GPUTarget("cuda", 80, 32), options=options)
(cache,) = caches()
print(len(list(cache.entries())), len([e for e in triton_folder().iterdir() if any(e.glob("*.ttir"))]))
"""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env = clean | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    ours, compiled = map(int, done.stdout.split())
    assert ours == compiled >= 1


# failures


def test_a_traceback_only_with_debug(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError):  # which Python prints
        main(["--debug", "inspect", "nowhere"])
    assert code_of("inspect", "nowhere") == USAGE_ERROR
    err = capfd.readouterr().err
    assert err.startswith("qmm inspect: ") and err.count("\n") == 1


def test_an_error_of_qmm_s_own(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> dict:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr("qmm.cli.doctor.examine", broken)
    assert code_of("doctor") == INTERNAL_ERROR
    assert capfd.readouterr().err == "qmm: ZeroDivisionError: a mistake (qmm --debug gives the traceback)\n"
    with pytest.raises(ZeroDivisionError):
        main(["--debug", "doctor"])


def test_bad_usage_names_the_option(capfd: pytest.CaptureFixture[str]) -> None:
    assert code_of("explain", "--m", "1") == USAGE_ERROR
    assert "--n" in capfd.readouterr().err
    assert code_of("nothing") == USAGE_ERROR


@pytest.mark.parametrize(
    "arguments",
    [["explain", *PLAIN, "--json"], BENCH, ["support"]],
    ids=lambda a: " ".join(a[:1] + a[-1:]),
)
def test_piped_output_has_no_control_characters(arguments: list[str], tmp_path: Path) -> None:
    done = piped(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not CONTROL.search(done.stdout + done.stderr)
