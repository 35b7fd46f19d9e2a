"""The programs of docs/export-jax-torch.md, and the module that they import."""

import re
from pathlib import Path

from pase import load, search
from pase.views.exports import export

_PAGE = Path(__file__).parents[2] / "docs" / "export-jax-torch.md"


def write_example(framework: str, num_devices: int, folder: Path) -> None:
    """Write with_FRAMEWORK.py as the page has it, and strategy.py as its commands write it."""
    page = _PAGE.read_text(encoding="utf-8")
    found = re.search(r"pase search (\w+) --batch (\d+) ", page)
    assert found is not None
    plan = search(load(found[1], batch=int(found[2])), num_devices)
    (folder / "strategy.py").write_text(export(plan, framework).text, encoding="utf-8")
    name = f"with_{framework}.py"
    block = re.search(rf"^```python\n(# {name}\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    (folder / name).write_text(block[1], encoding="utf-8")
