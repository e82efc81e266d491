"""The command line: what it prints, its exit codes, and errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from opfuse.graph_ops import cli, environment
from opfuse.graph_ops.ir import from_json, to_json
from opfuse.kernels.arch import ARCHES


@pytest.fixture
def graph_file(tmp_path, plan_of):
    path = tmp_path / "dgrad.json"
    path.write_text(to_json(plan_of().graph))
    return path


def run(capsys, *arguments):
    code = cli.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ------------------------------------------------------------------ explain


@pytest.mark.parametrize("arch", ["sm90", "sm100", "cpu"])
def test_explain_a_file_as_text(capsys, graph_file, arch):
    code, out, err = run(capsys, "explain", graph_file, "--arch", arch)
    assert (code, err) == (0, "")
    assert out.startswith(f"Plan of fc2_dgrad on {arch}\n") and "\nSteps\n" in out
    assert "model.py:14" in out


def test_explain_as_json(capsys, graph_file):
    code, out, _ = run(capsys, "explain", graph_file, "--arch", "sm_100a", "--format", "json")
    data = json.loads(out)
    assert code == 0 and (data["format"], data["arch"], data["nodes"]) == ("opfuse.explanation", "sm100", 6)


def test_explain_as_mermaid(capsys, graph_file):
    code, out, _ = run(capsys, "explain", graph_file, "--format", "mermaid")
    assert code == 0 and out.startswith("flowchart TD\n")


def test_require_fused_exits_3_and_names_the_nodes(capsys, graph_file):
    code, out, err = run(capsys, "explain", graph_file, "--arch", "cpu", "--require-fused")
    assert code == cli.UNFUSED == 3
    assert "fc2" in err and "left unfused on cpu" in err and out.startswith("Plan of"), "the explanation is printed too"


def test_require_fused_is_content_where_no_rule_begins(capsys, tmp_path, monkeypatch):
    (tmp_path / "my_graphs.py").write_text(
        "from opfuse.graph_ops.builder import GraphBuilder\n"
        "def plain():\n    g = GraphBuilder(name='plain')\n"
        "    g.relu(g.tensor('x', dim=(4,))).set_output(True)\n    return g\n"
        "def nothing():\n    return None\nvalue = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "explain", "my_graphs:plain", "--require-fused")
    assert (code, err) == (0, "") and "Plan of plain on sm90" in out
    assert "my_graphs.py:4" in out
    for wrong in ("nothing", "value", "missing"):
        code, out, err = run(capsys, "explain", f"my_graphs:{wrong}")
        assert (code, out) == (2, "") and "SOURCE_FUNCTION" in err and "that returns a Graph" in err


def test_disabling_a_rule_is_told(capsys, graph_file):
    code, out, _ = run(capsys, "explain", graph_file, "--arch", "sm100", "--disable", "grouped_gemm_dglu")
    assert code == 0 and "FUSED" not in out
    code, _, err = run(capsys, "explain", graph_file, "--disable", "no_such_rule")
    assert code == 2 and "DISABLE_UNKNOWN" in err


@pytest.mark.parametrize(
    ("source", "content", "code", "says"),
    [
        ("missing.json", None, "SOURCE_FILE", "No such file"),
        (".", None, "SOURCE_FILE", "directory"),
        ("bad.json", "{", "JSON", "line 1"),
        ("bytes.json", "\xff\xfe", "JSON_FORMAT", "opfuse.graph"),
        ("other.json", '{"format": "onnx"}', "JSON_FORMAT", "onnx"),
        ("newer.json", '{"format": "opfuse.graph", "version": 99}', "JSON_VERSION", "99"),
        ("no_such_module_here:f", None, "SOURCE_MODULE", "no_such_module_here"),
        (":f", None, "SOURCE_FILE", "module:function"),
    ],
)
def test_what_cannot_be_read_is_exit_2_with_a_reason(capsys, tmp_path, monkeypatch, source, content, code, says):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / source).write_text(json.dumps(content) if source == "bytes.json" else content)
    exit_code, out, err = run(capsys, "explain", source)
    assert (exit_code, out) == (2, "")
    assert err.startswith(f"opfuse: {code}: ") and says in err and "Traceback" not in err


def test_text_that_is_no_text_is_exit_2(capsys, tmp_path):
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe\x00")
    code, _, err = run(capsys, "explain", path)
    assert code == 2 and err.startswith("opfuse: JSON: ")


def test_a_graph_that_is_not_well_formed_is_exit_2(capsys, graph_file):
    data = json.loads(graph_file.read_text())
    data["tensors"][0]["alignment"] = 3
    graph_file.write_text(json.dumps(data))
    code, _, err = run(capsys, "explain", graph_file)
    assert code == 2 and "ALIGNMENT" in err and "model.py:1" in err


def test_an_unknown_arch_names_the_known(capsys, graph_file):
    code, _, err = run(capsys, "explain", graph_file, "--arch", "sm42")
    assert code == 2 and "ARCH_UNKNOWN" in err and all(name in err for name in ARCHES)


@pytest.mark.parametrize("arguments", [[], ["explain"], ["explain", "x.json", "--format", "html"], ["fly"]])
def test_usage_errors_exit_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2 and "usage: opfuse" in capsys.readouterr().err


def test_help_and_version(capsys):
    for arguments in (["--help"], ["explain", "--help"], ["rules", "--help"], ["env", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0 and "opfuse" in capsys.readouterr().out


def test_the_file_that_a_graph_writes_is_the_graph(graph_file):
    assert cli.load(str(graph_file)) == from_json(graph_file.read_text())


def test_explain_imports_no_kernel_and_no_cuda(graph_file):
    heavy = "{'cutlass', 'cudnn', 'cuda', 'triton'}"
    code = (
        "import sys; from opfuse.graph_ops.cli import main\n"
        f"assert main(['explain', {str(graph_file)!r}, '--arch', 'sm100']) == 0\n"
        f"print(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


# ------------------------------------------------------------------ rules


def test_rules_in_every_format(capsys):
    from opfuse.fusion_rules.support import support_table

    rows = support_table()
    _, text, _ = run(capsys, "rules")
    _, markdown, _ = run(capsys, "rules", "--format", "markdown")
    _, as_json, _ = run(capsys, "rules", "--format", "json")
    data = json.loads(as_json)
    assert [(r["rule"], r["kernel"]) for r in data] == [(r.rule, r.kernel) for r in rows]
    table, _, matrix = markdown.partition("\n\n")
    assert len(table.strip().split("\n")) == 2 + len(rows)
    assert matrix.startswith("| rule | operands | weights | act | sm90 |")
    for row in rows:
        assert row.rule in text and f"`{row.rule}`" in markdown and row.algebra in text
        assert all(f"{c}: {r}" in text for c, r in zip(row.codes, row.requires, strict=True))
        if row.kernel:
            assert row.kernel in text and f"`{row.kernel}`" in markdown


# ------------------------------------------------------------------ env


def test_env_answers_every_probe(capsys):
    import torch

    code, out, _ = run(capsys, "env", "--json")
    facts = json.loads(out)
    assert code == 0 and list(facts) == list(environment.PROBES)
    assert facts["torch"]["version"] == torch.__version__
    assert facts["python"]["version"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    code, text, _ = run(capsys, "env")
    assert code == 0 and all(heading in text for heading in environment.PROBES)


def test_a_missing_package_is_unavailable_and_nothing_else_fails(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("opfuse", "no-such-distribution"))
    packages = environment.collect()["packages"]
    assert packages["no-such-distribution"] == "unavailable: not installed"
    assert not packages["opfuse"].startswith("unavailable")


@pytest.mark.parametrize("module", ["torch"])
def test_env_does_without_torch(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    facts = environment.collect()
    assert facts["torch"].startswith("unavailable: ") and facts["devices"].startswith("unavailable: ")
    assert "unavailable" in environment.render(facts)


def test_env_shows_the_cache_and_the_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("OPFUSE_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("OPFUSE_LOG", "+rules")
    facts = environment.collect()
    assert facts["kernel cache"] == {"folder": str(tmp_path / "none"), "entries": 0, "damaged": 0, "MiB": 0.0}
    assert facts["environment"]["OPFUSE_LOG"] == "+rules"
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / ("0" * 64 + ".o")).write_bytes(b"broken")
    assert environment.collect()["kernel cache"]["damaged"] == 1
