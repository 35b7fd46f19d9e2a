"""The changelog as a page: CHANGELOG.md, whose links start from the root, seen from docs/."""

import re

from scripts.site.schemas import ROOT

_LINK = re.compile(r"\]\((?:\./)?docs/([^()\s]*)\)")


def changes_page(name: str) -> str:
    """Return the changelog without its title, which the page has; name: of its file."""
    _, _, body = (ROOT / name).read_text(encoding="utf-8").partition("\n")
    return _LINK.sub(r"](\1)", body)
