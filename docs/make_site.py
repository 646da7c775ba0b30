"""Gather the pages of the documentation site in build/pages: python docs/make_site.py (make site).

The site shows docs/, README.md, CHANGELOG.md, and whatever else of the repository these link to: files as they are, a
folder as a list of its files. Links are rewritten to where their targets lie on the site.
"""

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:)([^)#\s]+)")


def gather() -> None:
    """Write all pages, and all files that they link to."""
    shutil.rmtree(PAGES, ignore_errors=True)
    extras = [path for path in DOCS.rglob("*") if path.suffix in (".md", ".css", ".svg")]
    queue, seen = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(extras)], set()
    while queue:
        source = queue.pop()
        if source in seen:
            continue
        seen.add(source)
        text = list_folder(source) if source.is_dir() else source.read_text() if source.suffix == ".md" else None
        target = PAGES / site_path(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            shutil.copyfile(source, target)
        else:
            queue += [path for link in LINK.findall(text) if (path := resolve(source, link)).exists()]
            target.write_text(LINK.sub(lambda link, source=source: rewrite(source, link[1]), text))


def resolve(source: Path, link: str) -> Path:
    """Return the file or folder that a link of a page leads to; the README of a folder stands for it."""
    target = Path(os.path.normpath((source if source.is_dir() else source.parent) / link))
    return target / "README.md" if (target / "README.md").is_file() else target


def rewrite(source: Path, link: str) -> str:
    """Return a link of a page as it must be on the site; one that leads nowhere stays, for the build to report."""
    target = resolve(source, link)
    return os.path.relpath(site_path(target), site_path(source).parent) if target.exists() else link


def site_path(source: Path) -> Path:
    """Return where a file or folder of the repository lies on the site."""
    place = source.relative_to(DOCS if source.is_relative_to(DOCS) else ROOT)
    return (
        place / "index.md" if source.is_dir() else place.with_name("index.md") if place.name == "README.md" else place
    )


def list_folder(folder: Path) -> str:
    """Return a page that links to the files of a folder."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return f"# {folder.relative_to(ROOT)}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)


if __name__ == "__main__":
    gather()
