"""The ``qmm`` command. Its packages (typer, rich) load when it runs, and a missing one gives one clear line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE_ERROR = 2  # exit code: bad arguments, a file that cannot be read, a missing package
INTERNAL_ERROR = 3  # exit code: a mistake of qmm's own
INTERRUPTED = 130  # as shells say of an interrupted command


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ``arguments`` defaults to ``sys.argv[1:]``.

    Raises:
        SystemExit: always; 0 well, 1 a check failed, 2 bad usage, an unreadable file or a missing package, 3 an
            error of qmm's own, 130 interrupted.
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
    from qmm.cli.failing import debugging

    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        app(args=given, prog_name="qmm")
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # whoever read the output has gone
        sys.stderr.close()
        raise SystemExit(1) from None
    except Exception as error:
        if debugging.get():
            raise
        text = (str(error).splitlines() or [""])[0]
        print(f"qmm: {type(error).__name__}: {text} (qmm --debug gives the traceback)", file=sys.stderr)
        raise SystemExit(INTERNAL_ERROR) from None
