"""The ``qmm`` command. Its packages (typer, rich) load when it runs, and a missing one gives one clear line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE_ERROR = 2  # exit code: bad arguments, a file that cannot be read, a missing package


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ``arguments`` defaults to ``sys.argv[1:]``.

    Raises:
        SystemExit: always; 0 well, 1 a check failed, 2 bad usage, an unreadable file or a missing package.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(
            f"qmm: the command line needs typer and rich ({error}): pip install 'qmm[cli]'", file=sys.stderr
        )
        raise SystemExit(USAGE_ERROR) from None
    from qmm.cli.app import app

    app(args=None if arguments is None else list(arguments), prog_name="qmm")
