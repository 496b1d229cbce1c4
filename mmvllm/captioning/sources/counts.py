"""Counts by name, for a bounded number of names."""

from collections import Counter

MAX_NAMES = 200
OTHERS = "others"


class Counts(Counter):
    """How often each name was added; after `MAX_NAMES` different names, further ones count as "others"."""

    def add(self, name: str) -> None:
        self[name if name in self or len(self) < MAX_NAMES else OTHERS] += 1

    def shown(self, most: int) -> list[tuple[str, int]]:
        """Return the `most` frequent names with their counts; the rest is added up as "others"."""
        rows = [row for row in self.most_common() if row[0] != OTHERS]
        rest = self.total() - sum(number for _, number in rows[:most])
        return rows[:most] + ([(OTHERS, rest)] if rest else [])
