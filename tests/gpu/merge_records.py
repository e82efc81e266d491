"""Makes one record of the records of test processes that ran side by side on one GPU.

    python tests/gpu/merge_records.py OUT PART [PART ...]

Counts add up, seconds and exit status are the largest. Exits with 1 where parts are not of the same sources, versions
and GPU.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SAME = ("date", "gpu", "versions", "source")
ADDED = ("counts", "passed_by_file", "random_configurations")


def added(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record. Raises ValueError where parts do not belong together."""
    for name in SAME:
        if any(part[name] != parts[0][name] for part in parts):
            raise ValueError(f"{name} differs: {[part[name] for part in parts]}")
    out: dict[str, Any] = {name: parts[0][name] for name in SAME}
    out |= {"exit": max(part["exit"] for part in parts), "seconds": max(part["seconds"] for part in parts)}
    out["processes"] = len(parts)
    for name in ADDED:
        out[name] = added([part[name] for part in parts])
    out["not_passed"] = {}
    for part in parts:
        for outcome, names in part["not_passed"].items():
            out["not_passed"].setdefault(outcome, []).extend(names)
    out["measured"] = {}
    for part in parts:
        out["measured"] |= part["measured"]
    kernels = [part["measured"]["kernels"] for part in parts if "kernels" in part["measured"]]
    if kernels:
        out["measured"]["kernels"] = added(kernels)
        for name in ("seconds", "processes"):
            out["measured"]["kernels"][name] = max(one[name] for one in kernels)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    args = parser.parse_args()
    try:
        record = merged([json.loads(part.read_text()) for part in args.parts])
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
