"""The README is true: its example runs, its table is current, its commands and links exist."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from pathlib import Path

import pytest
from opfuse.fusion_rules.support import support_table
from opfuse.graph_ops import cli, support_matrix
from opfuse.graph_ops.support_text import markdown

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
TABLES = {
    "support table": lambda: markdown(support_table()),
    "support matrix": lambda: support_matrix.markdown(support_matrix.support_matrix()),
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def test_the_entry_points_exist():
    """The second block is a list of entry points, not a program: each import and attribute is there."""
    from opfuse.graph_ops import Graph

    _, entries = blocks("python")
    imports = [line.split("#")[0] for line in entries.splitlines() if line.startswith("from ")]
    assert len(imports) == 3
    for line in imports:
        exec(line, {})
    assert "hf.register()" in entries and "Graph.from_cudnn(" in entries and 'backend="opfuse"' in entries
    assert callable(importlib.import_module("opfuse.graph_ops.torch.hf").register) and callable(Graph.from_cudnn)
    assert "opfuse" in {e.name for e in importlib.metadata.entry_points(group="torch_dynamo_backends")}


def test_the_example_runs(capsys):
    example, _ = blocks("python")
    scope: dict = {}
    exec(compile(example, str(README), "exec"), scope)
    printed = capsys.readouterr().out
    assert printed.startswith("Plan of fc2_dgrad on sm90\n") and "README.md:" in printed
    assert printed.count("torch.float8_e4m3fn") == 2
    out = scope["out"]
    assert {n: tuple(out[n].shape) for n in out} == {
        "q": (512, 512), "sf": (512, 16), "qt": (512, 512), "sft": (512, 16), "dprob": (512,), "dbias": (4, 512)
    }  # fmt: skip
    assert "1 fused kernel over 5 of 5 nodes" in printed, "the example shows what the project is for"
    assert not out["dprob"][384:].any() and out["dprob"][:384].all(), "rows past the last offset are zero"
    assert not out["dbias"][1].any() and out["dbias"][0].any(), "an empty expert sums to zero"


@pytest.mark.parametrize("name", TABLES)
def test_the_generated_tables_are_current(name):
    wanted = TABLES[name]() + "\n"
    place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)
    if os.environ.get("OPFUSE_UPDATE_GOLDENS"):
        README.write_text(place.sub(lambda _: wanted, README.read_text()))
    (table,) = place.findall(README.read_text())
    assert table == wanted, "OPFUSE_UPDATE_GOLDENS=1 pytest tests/cpu/setup/test_readme.py writes it"


def test_links_lead_to_what_is_there():
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert len(links) > 8
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_there_are_two_set_up_commands_and_make_has_them():
    commands = re.findall(r"^make (\w+)", blocks("sh")[0], re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)


@pytest.mark.parametrize("line", [line for block in blocks("sh")[1:] for line in block.splitlines()])
def test_the_command_lines_work(capsys, monkeypatch, line):
    monkeypatch.chdir(ROOT)
    program, *arguments = line.split("#")[0].split()
    assert program == "opfuse" and cli.main(arguments) == 0
    assert capsys.readouterr().out.strip()
