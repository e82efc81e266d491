"""Lists the packages: every folder that holds modules, under the namespace `opfuse`. The rest is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCES = ("graph_ops", "fusion_rules", "kernels")

folders = {path.parent.relative_to(ROOT) for top in SOURCES for path in (ROOT / top).rglob("*.py")}
setup(packages=sorted(".".join(("opfuse", *folder.parts)) for folder in folders))
