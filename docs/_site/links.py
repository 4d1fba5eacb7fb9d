"""Links of the pages that leave ``docs/``: to a file of the repository, which is no page of the site.

On GitHub they lead to the file. Here they become ``text (path)`` without a link, or, once ``repo_url`` stands in
``mkdocs.yml``, a link to it. What leads nowhere is left for the strict build to refuse.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Of one page's text."""
    depth = page.file.src_uri.count("/")

    def other(found: re.Match[str]) -> str:
        label, up, path = found[1], found[2].count("../"), found[3]
        if up != depth + 1 or not (ROOT / path).exists():
            return found[0]
        if path in PAGES:
            return f"[{label}]({'../' * depth}{PAGES[path]}{found[4] or ''})"
        if config.repo_url:
            return f"[{label}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return f"`{path}`" if path.endswith(label) else f"{label} (`{path}`)"

    return LINK.sub(other, markdown)
