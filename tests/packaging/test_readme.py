"""What the README shows is true: the example runs, the lines are what CI runs, the links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from qmm.registry import TABLE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block_after(marker: str) -> str:
    """The first fenced block behind ``<!-- marker -->``."""
    found = re.search(rf"<!-- {re.escape(marker)} -->\n```\w*\n(.*?)```", README, re.S)
    assert found, marker
    return found[1]


def test_the_example_runs_and_explain_looks_as_shown() -> None:
    names: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block_after("example"), "README.md", "exec"), names)
    assert tuple(names["c"].shape) == (3, 512)  # type: ignore[attr-defined]
    labels = [line.split("  ")[0] for line in block_after("explain").splitlines() if line[:1].strip()]
    shown = [line.split("  ")[0] for line in printed.getvalue().splitlines() if line[:1].strip()]
    # a kernel that is not in the README (a new one, another package's) adds rows, and that is all
    assert [label for label in shown if label in labels] == labels, "explain prints other rows than shown"
    assert labels[:6] == shown[:6]


def test_the_setup_line_runs_what_ci_runs() -> None:
    command = block_after("ci:test").strip()
    assert "\n" not in command
    lines = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2
    assert lines[0].endswith("&& python -m qmm demo")
    assert lines[1].endswith(f"&& {command}")
    pinned = (ROOT / "constraints-cpu.txt").read_text()
    for line in lines:
        for requirement in re.findall(r"[\w-]+==[\w.]+", line):
            assert f"\n{requirement}\n" in pinned


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_backend_has_its_known_gaps_file() -> None:
    files = {path.stem for path in (ROOT / "tests" / "known_gaps").glob("*.txt")}
    assert files == {name for name, _ in TABLE}
