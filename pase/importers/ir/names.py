"""`Names`: names that are unique, told by those that were wished for."""


class Names:
    """Names that are unique."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}

    def new(self, wish: str) -> str:
        """Return the name, or with a number behind it where it is taken."""
        name, count = wish, self._counts.get(wish, 1)
        while name in self._taken:
            count += 1
            name = f"{wish}_{count}"
        self._counts[wish] = count
        self._taken.add(name)
        return name
