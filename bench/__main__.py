"""`python -m bench NAME`: runs the comparison of that name."""

from __future__ import annotations

import sys

from . import cost, echo, many

COMPARISONS = {"cost": cost.main, "echo": echo.main, "many": many.main}

if len(sys.argv) < 2 or sys.argv[1] not in COMPARISONS:
    sys.exit(f"usage: python -m bench {{{','.join(COMPARISONS)}}} [-h]")
COMPARISONS[sys.argv[1]](sys.argv[2:])
