"""Few cells of a grid that hold every combination of the values of any few of its sides.

Greedy, as AETG (Cohen et al. 1997): of some random cells the one with most combinations not seen yet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Cell = dict[str, object]
_CANDIDATES = 30


def covering(
    sides: Mapping[str, Sequence[object]],
    *,
    strength: int,
    least: int,
    seed: int,
    is_legal: Callable[[Cell], bool] = lambda cell: True,
) -> list[Cell]:
    """At least `least` different legal cells; the first of them have every legal combination of `strength`
    values that random cells come upon, each 30 times in vain before it is given up."""
    rng = random.Random(seed)
    names, seen = list(sides), set[tuple[tuple[str, object], ...]]()
    cells: list[Cell] = []
    known: set[tuple[object, ...]] = set()

    def draw() -> Cell:
        while True:
            cell = {name: rng.choice(values) for name, values in sides.items()}
            if is_legal(cell) and tuple(cell.values()) not in known:
                return cell

    def fresh(cell: Cell) -> set[tuple[tuple[str, object], ...]]:
        return set(combinations(cell.items(), strength)) - seen

    def keep(cell: Cell) -> None:
        seen.update(fresh(cell))
        known.add(tuple(cell.values()))
        cells.append(cell)

    assert strength <= len(names), (strength, names)
    in_vain = 0
    while in_vain < _CANDIDATES:
        best = max((draw() for _ in range(_CANDIDATES)), key=lambda cell: len(fresh(cell)))
        if fresh(best):
            in_vain = 0
            keep(best)
        else:
            in_vain += 1
    while len(cells) < least:
        keep(draw())
    return cells
