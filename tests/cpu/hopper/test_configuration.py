"""From a problem to the configuration that is compiled: every field has a problem that sets it and nothing else."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from opfuse.graph_ops.ir.dims import symbol
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import GluLayout
from opfuse.kernels.hopper import dglu_support
from opfuse.kernels.sm90 import dglu_tune
from opfuse.kernels.sm90.config import Activation
from opfuse.kernels.sm90.dglu_config import DgluConfig, illegal, scratch_tensors

BF16, F16, F32 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT
E5M2 = DataType.FP8_E5M2
Options = dict[str, Any]

# field -> [(problem, what the field then holds)]; every other field but those of `along` stays as it was.
FIELDS: dict[str, list[tuple[Options, Any]]] = {
    "ab_dtype": [(dict(operands=F16), "fp16")],
    "b_major": [(dict(b_major="n"), "n"), (dict(b_major="n", n=96, k=96), "n")],
    "discrete_b": [(dict(changes={"b": dict(discrete=True)}), True)],
    "glu_layout": [
        (dict(layout=GluLayout.concatenated()), "concatenated"),
        (dict(layout=GluLayout.interleaved(1)), "interleaved1"),
    ],
    "act": [
        (dict(act="geglu"), Activation("geglu")),
        (dict(act="geglu", attributes=dict(geglu_alpha=1.0)), Activation("geglu", alpha=1.0)),
        (dict(act="geglu", attributes=dict(clamp_max=9.0)), Activation("geglu", clamp_max=9.0)),
        (dict(act="geglu", attributes=dict(clamp_min=-9.0)), Activation("geglu", clamp_min=-9.0)),
        (dict(act="geglu", attributes=dict(linear_offset=0.0)), Activation("geglu", offset=0.0)),
        (dict(act="situglu"), Activation("situglu")),
        (dict(act="situglu", attributes=dict(situ_beta1=2.0)), Activation("situglu", beta1=2.0)),
        (dict(act="situglu", attributes=dict(situ_beta2=3.0)), Activation("situglu", beta2=3.0)),
    ],
    "c_dtype": [(dict(changes={"c": dict(data_type=F16)}), "fp16"), (dict(changes={"c": dict(data_type=F32)}), "fp32")],
    "d_dtype": [
        (dict(without=("d",)), None),
        (dict(changes={"d": dict(data_type=F16)}), "fp16"),
        (dict(changes={"d": dict(data_type=F32)}), "fp32"),
    ],
    "has_prob": [(dict(roles=("prob",)), True)],
    "has_alpha": [(dict(roles=("alpha",)), True)],
    "alpha_exponent": [(dict(roles=("alpha",), attributes=dict(alpha_exponent=1)), 1)],
    "has_beta": [(dict(roles=("beta",)), True)],
    "has_dprob": [(dict(without=("dprob",)), False)],
    "activation_dtype": [
        (dict(roles=("activation",)), "bf16"),
        (dict(roles=("activation",), changes={"activation": dict(data_type=F16)}), "fp16"),
    ],
    "dbias_dtype": [
        (dict(roles=("dbias",)), "bf16"),
        (dict(roles=("dbias",), changes={"dbias": dict(data_type=F32)}), "fp32"),
    ],
    "has_amax": [(dict(roles=("amax",)), True)],
    "q_row_dtype": [
        (dict(roles=("q_row",)), "e4m3"),
        (dict(roles=("q_row",), changes={"q_row": dict(data_type=E5M2)}), "e5m2"),
    ],
    "q_col_dtype": [
        (dict(roles=("q_col",)), "e4m3"),
        (dict(roles=("q_col",), changes={"q_col": dict(data_type=E5M2)}), "e5m2"),
    ],
    "sf_swizzled": [
        (dict(roles=("q_row",), swizzled=False), False),
        (dict(roles=("q_row", "q_col"), swizzled=False), False),
    ],
    "deterministic": [(dict(deterministic=True), True)],
}  # fmt: skip
ALONG = {"alpha_exponent": {"has_alpha"}, "sf_swizzled": {"q_row_dtype", "q_col_dtype"}}
"""Fields that another one needs, to mean something."""

CASES = [(field, options, value) for field, cases in FIELDS.items() for options, value in cases]


def test_every_field_has_a_problem_that_sets_it() -> None:
    assert {*FIELDS, "schedule"} == {f.name for f in dataclasses.fields(DgluConfig)}


@pytest.mark.parametrize(("field", "options", "value"), CASES, ids=[f"{i} {c[0]}" for i, c in enumerate(CASES)])
def test_problem_sets_the_field(make_problem, field: str, options: Options, value: Any) -> None:
    first, config = dglu_support.configuration(make_problem()), dglu_support.configuration(make_problem(**options))
    assert getattr(config, field) == value != getattr(first, field)
    changed = {f.name for f in dataclasses.fields(DgluConfig) if getattr(config, f.name) != getattr(first, f.name)}
    assert changed - ALONG.get(field, set()) == {field}


# What is not compiled in: one object serves all of these.
DYNAMIC: list[Options] = [
    dict(rows=512),
    dict(experts=7),
    dict(rows=0),
    dict(changes={"a": dict(stride=(72, 1)), "c": dict(stride=(136, 1)), "d": dict(stride=(136, 1))}),
    dict(changes={"offsets": dict(multiple_of=1)}),
    dict(attributes=dict(alpha_exponent=1)),  # without alpha there is nothing to raise
    dict(changes={"d": dict(is_virtual=True, is_output=False)}),
]


@pytest.mark.parametrize("options", DYNAMIC)
def test_one_configuration_serves(make_problem, options: Options) -> None:
    assert dglu_support.scheduled(make_problem(**options)) == dglu_support.scheduled(make_problem())


def test_parameters_of_another_activation_do_not_count(make_problem) -> None:
    strange = make_problem(attributes=dict(geglu_alpha=9.0, clamp_max=1.0, situ_beta1=2.0))
    assert dglu_support.configuration(strange) == dglu_support.configuration(make_problem())


def test_the_configuration_is_a_cache_key(make_problem) -> None:
    for _, options, _ in CASES:
        fields = dglu_support.scheduled(make_problem(**options)).as_dict()
        assert json.loads(json.dumps(fields)) == fields


SHAPES = [(64, 64), (2048, 768), (7168, 2048), (2880, 2880), (256, 4096)]


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("roles", [(), ("dbias",), ("q_row",), ("q_row", "q_col"), ("q_col", "dbias", "activation")])
def test_schedule_is_the_tables_and_legal(make_problem, k: int, n: int, roles: tuple[str, ...]) -> None:
    problem = make_problem(k=k, n=n, roles=roles)
    config = dglu_support.scheduled(problem)
    assert config == dglu_tune.schedule_for(dglu_support.configuration(problem), n=n, k=k)
    assert illegal(config, n=n, k=k) == []


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("roles", [(), ("dbias",), ("q_row", "q_col")])
def test_variants_are_the_other_candidates(make_problem, entry, k: int, n: int, roles: tuple[str, ...]) -> None:
    problem = make_problem(k=k, n=n, roles=roles)
    names = entry.variants(problem)
    config = dglu_support.scheduled(problem)
    wanted = dglu_tune.candidates(config, n=n, k=k)
    schedules = [dglu_support.scheduled(problem, name).schedule for name in names]
    assert len(set(names)) == len(names) and sorted(map(repr, [config.schedule, *schedules])) == sorted(
        map(repr, wanted)
    )
    for name in names:
        varied = dglu_support.scheduled(problem, name)
        assert illegal(varied, n=n, k=k) == [] and dataclasses.replace(varied, schedule=config.schedule) == config


def test_symbols_fall_into_the_tables_middle_class(make_problem) -> None:
    free = make_problem(k=symbol("K", 64), n=symbol("N", 32))
    assert dglu_support.scheduled(free) == dglu_support.scheduled(make_problem(k=2048, n=2048))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(n=256), 2),  # dprob's partials are added up
        (dict(n=128), 1),  # one tile, which writes dprob
        (dict(n=symbol("N", 32)), 2),
        (dict(n=2048, without=("dprob",)), 1),
        (dict(without=("dprob",), roles=("dbias",)), 2),
        (dict(without=("dprob",), roles=("amax",)), 2),
        (dict(roles=("dbias", "amax", "q_row", "q_col", "activation")), 2),
        (dict(n=128, roles=("q_col", "dbias", "activation")), 2),
        (dict(n=96, roles=("q_col", "activation")), 1),
        (dict(n=128, without=("d",), roles=("q_row", "q_col", "activation")), 1),
        (dict(without=("dprob",), changes={"b": dict(discrete=True)}), 2 + 1),  # descriptors, addresses
        (dict(n=256, changes={"b": dict(discrete=True)}), 3 + 1),
    ],
)
def test_launches(make_problem, entry, options: Options, expected: int) -> None:
    assert entry.launches(make_problem(**options)) == expected


@pytest.mark.parametrize(
    ("experts", "rows", "columns", "options"),
    [(1024, 2**26, 4096, dict()), (256, 2**24, 16384, dict(roles=("dbias", "amax", "q_row", "q_col")))],
)
def test_c61_sizes_past_32_bits_are_counted(make_problem, experts: int, rows: int, columns: int, options: Any) -> None:
    """Workspace bytes are those of Python's integers, at sizes whose products pass 2**31."""
    from opfuse.kernels.sm90 import dglu_host

    config = dglu_support.scheduled(make_problem(n=columns, experts=experts, **options))
    tensors: Any = scratch_tensors(config, experts, rows, columns)
    parts = {name: r * c for name, r, c in tensors}
    assert max(parts.values()) * 4 > 2**31
    assert dglu_host.workspace_bytes(config, experts, rows, columns) >= 4 * sum(parts.values())
