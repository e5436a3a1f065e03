"""Parameters of tests, for those that need not run in all four ways."""

from __future__ import annotations

import pytest

one_loop = pytest.mark.parametrize("run", ["asyncio"], indirect=True)
by_cm = pytest.mark.parametrize("via", ["cm"], indirect=True)
by_tcp = pytest.mark.parametrize("via", ["tcp"], indirect=True)
