"""What is installed is what is in the checkout, and the two commands do what the README says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[3]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
SOURCES = ("graph_ops", "fusion_rules", "kernels")
HEAVY = ("torch", "cutlass", "cudnn", "triton", "networkx", "numpy")

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same module before it came into the standard library; pytest brings it
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules() -> dict[str, Path]:
    """Every module of the library by its installed path."""
    files = (p for top in SOURCES for p in (ROOT / top).rglob("*.py"))
    return {f"opfuse/{p.relative_to(ROOT).as_posix()}": p for p in files}


def test_every_package_is_marked_typed_and_has_an_init():
    for top in SOURCES:
        assert (ROOT / top / "py.typed").is_file()
    bare = {name for name, path in modules().items() if not (path.parent / "__init__.py").is_file()}
    assert bare == set()
    assert not (ROOT / "__init__.py").exists(), "opfuse is a namespace, so that nothing collides"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The unpacked wheel of a copy of the sources, and its metadata."""
    pytest.importorskip("setuptools", reason="builds a wheel without fetching a build environment")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for top in SOURCES:
        shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (file,) = out.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(out / "site")
    return out / "site"


def test_a_wheel_has_every_module_and_marker(wheel):
    inside = {p.relative_to(wheel).as_posix() for p in wheel.rglob("*") if p.is_file()}
    code = {name for name in inside if name.endswith(".py")}
    assert code == set(modules())
    assert {f"opfuse/{top}/py.typed" for top in SOURCES} <= inside
    assert not (wheel / "opfuse" / "__init__.py").exists()


def test_a_wheel_works_without_the_checkout(wheel, tmp_path):
    """In an interpreter that sees the wheel and the dependencies, but neither the checkout nor its editable install."""
    code = (
        "import sys, importlib\n"
        f"sys.path.insert(0, {str(wheel)!r}); sys.path.append({sysconfig.get_path('purelib')!r})\n"
        "from opfuse.graph_ops import DataType, Graph\n"
        "import opfuse.graph_ops.cli, opfuse.fusion_rules, opfuse.kernels.registry, opfuse.kernels.torch_ops\n"
        "g = Graph(); x = g.tensor('x', dim=(4,)); g.relu(x).set_output(True)\n"
        "text = str(g.explain(arch='sm90'))\n"
        "assert 'torch.relu' in text, text\n"
        "print(opfuse.graph_ops.__file__); print(opfuse.kernels.registry.__file__)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(wheel)) for line in done.stdout.split())


def test_importing_the_user_interface_loads_nothing_heavy():
    code = f"import sys, opfuse.graph_ops; print(sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------ constraints


def pins() -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def requirements() -> list[Requirement]:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(r for e in ("cuda", "test", "lint") for r in extras[e])]
    return [Requirement(r) for r in (*wanted, *PROJECT["build-system"]["requires"])]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_is_pinned_once_for_every_python(python):
    applicable = [p for p in pins() if p.marker is None or p.marker.evaluate({"python_version": python})]
    names = [canonical(p.name) for p in applicable]
    assert len(names) == len(set(names)), "two pins of one package"
    assert all(re.fullmatch(r"==[^*]+", str(p.specifier)) for p in applicable), "exact versions only"
    by_name = {canonical(p.name): p for p in applicable}
    for wanted in requirements():
        if wanted.marker is not None and not wanted.marker.evaluate({"python_version": python}):
            continue
        pin = by_name[canonical(wanted.name)]
        assert wanted.specifier.contains(str(pin.specifier).removeprefix("==")), f"{wanted} against {pin}"


def test_torch_is_pinned_where_the_plans_were_tested():
    (torch,) = (p for p in pins() if p.name == "torch")
    assert str(torch.specifier) == "==2.13.0"


def test_the_declared_pythons_are_those_of_the_makefile():
    supported = SpecifierSet(PROJECT["project"]["requires-python"])
    assert all(p in supported for p in PYTHONS) and "3.9" not in supported
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"python{p}" in makefile for p in PYTHONS)


# ------------------------------------------------------------------ commands


def dry_run(*arguments):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    command = ["make", "-n", "-B", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_make_test_sets_up_lints_types_and_tests():
    steps = dry_run("test")
    order = [steps.index(part) for part in ("pip install", "ruff check", "mypy", "-m pytest")]
    assert order == sorted(order)
    assert "constraints.txt" in steps and "[cuda,test,lint]" in steps and "[test,lint]" in steps


def test_make_demo_sets_up_and_runs_the_main_job_on_a_file():
    assert "samples/fused_vs_unfused.py" in dry_run("demo")
    steps = dry_run("demo", "FILE=some text.txt")
    assert "pip install" in steps and 'samples/fused_vs_unfused.py "some text.txt"' in steps


def test_ci_runs_the_test_command_of_the_readme_and_installs_nothing_itself():
    script = (ROOT / ".ci" / "run").read_text()
    commands = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert commands[0] == "set -euo pipefail" and commands[-1] == "exec make test </dev/null"
    assert not re.search(r"\b(pip|venv|apt|conda|uv)\b", "\n".join(commands))
