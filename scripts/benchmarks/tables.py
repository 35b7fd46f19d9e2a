"""Tables in Markdown, printed and put into documents between markers."""

import re
from collections.abc import Sequence
from pathlib import Path

from pase.common.documents import write_atomically

ROOT = Path(__file__).parent.parent.parent


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (headers, ["---"] * len(headers), *rows)]
    return "\n".join(lines)


def publish(document: str, tables: dict[str, str], *, write: bool) -> None:
    """Print tables; with write, replace what stands between `<!-- NAME -->` and `<!-- /NAME -->` in a document."""
    for name, text in tables.items():
        print(f"\n## {name}\n\n{text}")
    if not write:
        return
    path = ROOT / "docs" / document
    page = path.read_text(encoding="utf-8")
    for name, text in tables.items():
        pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.DOTALL)
        page, found = pattern.subn(lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", page)  # type: ignore[misc]
        if found != 1:
            raise SystemExit(f"{path} has {found} places for the table {name!r}; expected 1")
    write_atomically(path, page)
    print(f"\nwritten to {path.relative_to(ROOT)}")
