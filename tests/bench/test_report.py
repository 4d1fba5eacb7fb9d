"""bench.report and bench.grid: the saved grid says what the performance log says, and a grid run here can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import goals, grid, report
from qmm.timing import Point, Results, Roof
from qmm.timing.problem import Problem

ROOT = Path(__file__).parents[2]
SAVED = ROOT / "bench" / "results" / "h200-2026-12-01.json"
LOG_LINE = re.compile(
    r"\| (\d+x\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| [\d. ]*\| ([\d.]+) "
    r"\| (\w+) [\d.]+ \| ([\d.]+) \| (\d+)% \| (\w+) \|"
)


def test_the_saved_grid_is_the_log_s() -> None:
    logged = {
        (m[1], int(m[2])): m.groups()[2:]
        for m in map(LOG_LINE.match, (ROOT / "docs" / "performance-log.md").read_text().splitlines())
        if m
    }
    rows = report.rows_of(Results.load(SAVED))
    assert len(rows) == len(logged) == 98
    for row in rows:
        dense, ours, speed, peer, ratio, roof, kernel = logged[row.point.shape, row.point.m]
        assert (row.dense, row.point.us) == (float(dense), float(ours))
        assert row.point.kernel == f"triton.{kernel}"
        # the log's ratios were made of times with more digits
        assert row.dense / row.point.us == pytest.approx(float(speed), abs=0.02)
        assert row.roof_us / row.point.us == pytest.approx(float(roof) / 100, abs=0.01)
        assert row.point.us / row.peers[peer] == pytest.approx(float(ratio), abs=0.02)


def test_the_table_has_a_line_a_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(SAVED), "--goals"]) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 98
    assert len({len(line) for line in lines}) == 1
    assert re.search(r"^goals: \d+ of 98 points", printed, re.M)
    assert report.main([str(SAVED), "--ours", "nobody"]) == 1


def point(contestant: str, m: int, us: float, **more: object) -> Point:
    return Point(contestant, 4096, 4096, m, us, **more)


def results(*points: Point, device: str = "NVIDIA H200") -> Results:
    return Results({"device": device}, Roof(4.3e12, 790e12), list(points))


def test_a_live_peer_stands_for_the_recorded_one() -> None:
    (row,) = report.rows_of(
        results(point("torch.mm", 1, 10.0), point("qmm", 1, 5.0), point("humming", 1, 4.0))
    )
    assert row.peers["humming"] == 4.0
    assert "marlin" in row.peers
    assert row.best == ("humming", 4.0)
    assert "humming 4.0" in row.cells()
    (bare,) = report.rows_of(results(point("qmm", 1, 5.0), device="another"))
    assert bare.peers == {}
    assert bare.best is None
    assert bare.dense is None


def test_tinygemm_counts_beside_float16() -> None:
    tiny = point("tinygemm", 1, 3.0, dtype="bfloat16")
    (row,) = report.rows_of(results(point("qmm", 1, 5.0), tiny, device="another"))
    assert row.peers == {"tinygemm": 3.0}


def test_a_recorded_peer_scales_with_the_dense_matmul() -> None:
    slow, fast = (
        report.rows_of(results(point("torch.mm", 16, dense), point("qmm", 16, 5.0)))[0]
        for dense in (20.0, 10.0)
    )
    assert slow.peers["humming"] == pytest.approx(2 * fast.peers["humming"])


@pytest.mark.parametrize(
    ("m", "us", "dense", "peer", "misses"),
    [
        (1, 7.4, 40.0, 10.0, 0),
        (1, 7.6, 40.0, 10.0, 1),
        (32, 8.1, 40.0, 10.0, 1),
        (64, 8.9, 9.0, 10.0, 1),
        (64, 9.1, 9.0, 10.0, 2),
        (256, 10.0, 10.1, 10.5, 0),
        (2048, 101.0, 100.0, 90.0, 1),
    ],
)
def test_goals(m: int, us: float, dense: float, peer: float, misses: int) -> None:
    row = report.Row(point("qmm", m, us), dense, {"p": peer}, frozenset({"p"}), roof_us=1.0)
    assert len(goals.missed(row)) == misses


def test_a_share_of_the_roof_stands_in_for_a_peer() -> None:
    assert not goals.missed(report.Row(point("qmm", 1, 10.0), 40.0, {"p": 9.0}, frozenset(), roof_us=8.6))
    assert goals.missed(report.Row(point("qmm", 64, 10.0), 40.0, {"p": 9.0}, frozenset(), roof_us=9.9))


def test_the_spread_of_the_dense_matmul_counts_for_many_rows() -> None:
    row = report.Row(point("qmm", 2048, 101.0), 100.0, {}, frozenset(), 90.0, dense_spread=0.02)
    assert not goals.missed(row)


def test_a_grid_run_here_can_be_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pictures need it")
    out = tmp_path / "tiny.json"
    arguments = [
        "--contestants",
        "torch.mm,qmm,humming,tinygemm",
        "--shapes",
        "128x64,64x32",
        "--rows",
        "1,4",
    ]
    assert (
        grid.main([*arguments, "--rounds", "1", "--replays", "2", "--group-size", "32", "--out", str(out)])
        == 0
    )
    found = Results.load(out)
    assert {(p.contestant, p.shape, p.m) for p in found.points} == {
        (name, shape, m) for name in ("torch.mm", "qmm") for shape in ("128x64", "64x32") for m in (1, 4)
    }
    assert {left["why"] for left in found.left_out} == {"needs a GPU; got cpu"}
    assert report.main([str(out), "--pictures", str(tmp_path / "img")]) == 0
    names = {"tiny-times.png", "tiny-speedup.png", "tiny-roof.png"}
    assert {path.name for path in (tmp_path / "img").iterdir()} == names
    for path in (tmp_path / "img").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    assert "left out: humming 128x64 all rows: needs a GPU; got cpu" in capsys.readouterr().out


def test_a_grid_out_of_time_says_so(tmp_path: Path) -> None:
    out = tmp_path / "none.json"
    assert grid.main(["--contestants", "qmm", "--shapes", "64x32", "--seconds", "0", "--out", str(out)]) == 1
    assert Results.load(out).left_out[0]["why"] == "no time left"


def test_contestants_by_name() -> None:
    assert grid.contestant("triton.tiled").name == "triton.tiled"
    assert grid.contestant("qmm-dependent").name == "qmm-dependent"
    with pytest.raises(ValueError, match=r"contestants: must be of torch\.mm, qmm"):
        grid.contestant("nobody")


@pytest.mark.parametrize("name", list(grid.PEERS))
def test_a_peer_that_is_absent_says_what_to_install(name: str) -> None:
    peer = grid.PEERS[name]()
    assert peer.why_not(Problem(1024, 1024)) == "needs a GPU; got cpu"
    assert "bits" in peer.why_not(
        Problem(1024, 1024, bits=3, device="cuda")
    ) or "pip install" in peer.why_not(Problem(1024, 1024, bits=3, device="cuda"))
