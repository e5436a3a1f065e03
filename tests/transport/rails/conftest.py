"""Connections over several devices.  How many a process has is fixed when it begins, so these tests
run in one of their own (tests/transport/test_rails.py).
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("AIORDMA_EMBEDDED_DEVICES") else ["test_*.py"]
