"""Hooks of mkdocs: files outside docs/ that its pages link to are on the site too, and there is a first page."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ("demo_model/README.md", "tiers.yaml", "SECURITY.md", "docker/nginx.conf")


def on_files(files: Files, config: Any) -> Files:
    for name in OUTSIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "index.md", content=(ROOT / "docs" / "getting-started.md").read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page with links as they are on the site, where the files outside docs/ lie beside its pages."""
    return markdown if "/" in page.file.src_uri else markdown.replace("](../", "](").replace("](docs/", "](")
