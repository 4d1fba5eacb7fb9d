"""Every block of the tutorial runs, and prints what the page shows behind it; '...' ends a line that may differ."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE.read_text(), re.S | re.M)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page shows what a machine without a GPU prints")
def test_the_tutorial_prints_what_it_shows() -> None:
    assert len(BLOCKS) == PAGE.read_text().count("```python") >= 5, "a block without its output"
    names: dict[str, object] = {}
    for code, shown in BLOCKS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, PAGE.name, "exec"), names)
        lines, expected = printed.getvalue().splitlines(), shown.splitlines()
        for line, want in zip(lines, expected, strict=False):
            open_end = want.endswith("...")
            assert line == want or (open_end and line.startswith(want[:-3])), line
        assert len(lines) == len(expected) or expected[-1].endswith("...")
