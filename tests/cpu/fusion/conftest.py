"""Makes the shared graphs importable: test modules are imported by path, so that their folder is not on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
