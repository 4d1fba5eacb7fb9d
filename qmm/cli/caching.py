"""``qmm cache``: what lies on the disk because of qmm, and deleting it."""

from __future__ import annotations

from typing import Annotated

import typer

from qmm.cli.consoles import print_json
from qmm.cli.failing import failing

app = typer.Typer(no_args_is_help=True, help="Compiled kernels on the disk: what is there, and deleting it.")


@app.command("show")
def show(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array in the place of the text.")] = False,
) -> None:
    """List the caches: folder, entries that are qmm's, their size.

    Exit code 0.
    """
    from qmm.caches import caches, size

    rows = []
    for cache in caches():
        ours = list(cache.entries())
        rows.append(
            {
                "name": cache.name,
                "folder": str(cache.folder),
                "entries": len(ours),
                "bytes": sum(map(size, ours)),
            }
        )
    if as_json:
        print_json(rows)
        return
    for row in rows:
        typer.echo(f"{row['name']}: {row['folder']}: {row['entries']} entries of qmm, {_mb(row['bytes'])}")


@app.command("clear")
def clear(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")
    ] = False,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Delete entries of other programs in shared folders too; asks first."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete compiled kernels that are qmm's; they are compiled again when needed. Other programs' stay.

    Exit code 0: done, or nothing to do; 1: the question of --all was answered with no; 2: an entry cannot be deleted.
    """
    from qmm.caches import caches, remove, size

    with failing("cache clear", OSError):
        for cache in caches():
            ours = list(cache.entries())
            if everything and cache.folder.is_dir():
                ours = sorted(cache.folder.iterdir())
            freed = sum(map(size, ours))
            what = f"{len(ours)} entries, {_mb(freed)}, in {cache.folder} ({cache.name})"
            if dry_run:
                typer.echo(f"would delete {what}")
                continue
            if everything and cache.shared and ours and not yes:
                typer.confirm(f"Delete {what}, those of other programs too?", abort=True)
            for entry in ours:
                remove(entry)
            typer.echo(f"deleted {what}")


def _mb(count: object) -> str:
    assert isinstance(count, int)
    return f"{count / 1e6:.1f} MB"
