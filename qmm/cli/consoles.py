"""Where output goes: as wide as the terminal, or as a table needs where it goes to a file."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

_PIPED_WIDTH = 140  # where output goes to a file, nothing says how wide it may be


def make_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or as a table needs."""
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, width=_PIPED_WIDTH, stderr=stderr)


def print_json(value: Any) -> None:
    """One JSON value on standard output, and nothing else."""
    print(json.dumps(value, indent=2, default=str))
