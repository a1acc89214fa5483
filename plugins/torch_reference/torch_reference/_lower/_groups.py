"""Groups of rows that an offset tensor delimits, as counts. Free of torch: the support check imports it too."""

from __future__ import annotations

__all__ = ["offset_groups"]


def offset_groups(offsets: int, experts: int) -> int:
    """Groups that ``offsets`` entries describe: as many starts, or starts and the end; 0 if they describe none.

    The number of groups is a positive multiple of ``experts``, which tells the two forms apart; a single expert takes
    starts and end when there are two entries or more.
    """
    if experts > 1 and offsets % experts == 0:
        return offsets
    if experts >= 1 and offsets > 1 and (offsets - 1) % experts == 0:
        return offsets - 1
    return 1 if experts == 1 and offsets == 1 else 0
