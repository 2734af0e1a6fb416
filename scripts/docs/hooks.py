"""Changes that mkdocs makes to the pages: see ``hooks`` in mkdocs.yml."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_FOR_THE_TESTS = re.compile(r"<!-- block.*?-->\n?", re.DOTALL)
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Take out what is meant for the tests, and bring along the files of the repository that the page links to."""
    from mkdocs.structure.files import File

    def brought(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[1]))
        source = ROOT / target
        if target.startswith(("..", "docs/")) or not source.is_file():
            return link[0]  # for mkdocs to report
        uri = f"source/{target}.txt"  # which browsers show
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=source.read_text()))
        return f"]({posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or '.')})"

    return _OUTSIDE.sub(brought, _FOR_THE_TESTS.sub("", markdown))


def on_post_build(*, config: Any) -> None:
    """Write the index of the search also as a script: pages that are opened from a folder can load nothing else."""
    folder = Path(config.site_dir, "search")
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
