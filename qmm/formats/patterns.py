"""Names of layers against the patterns of a config, in time that a file cannot make long."""

from __future__ import annotations


def matches(pattern: str, layer: str) -> bool:
    """Whether a pattern of a config's lists means ``layer``.

    A name means the module, and all under it, wherever it stands. A glob means the whole name, a ``re:`` pattern its
    beginning (as ``re.match`` has it, which the libraries use). Both are understood as far as they consist of plain
    text and wildcards; others mean nothing here. (A file's regular expressions are not run: one can be written that
    takes years.)
    """
    if not pattern.startswith("re:") and "*" not in pattern:
        return f".{pattern}." in f".{layer}."
    parts = pattern.split("*")
    if pattern.startswith("re:"):
        text = pattern.removeprefix("re:").removeprefix("^")
        text = text.removesuffix("$") if text.endswith("$") else text + ".*"
        parts = text.replace(".*", "*").replace("\\.", ".").split("*")
    if any(c in part for part in parts for c in "\\()[]{}|?+^$"):
        return False
    if len(parts) == 1:
        return layer == parts[0]
    first, *middle, last = parts
    at = len(first)
    for part in middle:
        at = layer.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return layer.startswith(first) and layer.endswith(last) and len(layer) - len(last) >= at
