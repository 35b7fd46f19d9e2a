"""Links that leave docs/: they work where the repository is read, and become links of the site, or text, on it."""

import posixpath
import re
from collections.abc import Mapping
from types import MappingProxyType

from mkdocs.exceptions import PluginError

from scripts.site.schemas import ROOT

PAGES: Mapping[str, str] = MappingProxyType({"README.md": "index.md", "CHANGELOG.md": "changelog.md"})
"""Files outside docs/ that have a page of the site."""

_LINK = re.compile(r"\[([^\[\]]*)\]\((\.\./[^()#\s]*)(#[^()\s]*)?\)")


def relinked(markdown: str, source: str) -> str:
    """Return a page with its links that leave docs/ changed; source: the page's path in docs/.

    What has a page of the site is linked to there; of a file of the source the name remains. PluginError where a link
    leads to nothing.
    """

    def replaced(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        inside = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), target))
        if inside.startswith("docs/"):
            return found[0]
        if not (ROOT / inside).exists():
            raise PluginError(f"docs/{source}: the link to {target} leads to {inside}, which is not there")
        if inside in PAGES:
            return f"[{text}]({posixpath.relpath(PAGES[inside], posixpath.dirname(source) or '.')}{anchor})"
        return text if text.startswith("`") or text != inside else f"`{text}`"

    return _LINK.sub(replaced, markdown)
