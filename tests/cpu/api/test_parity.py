"""Every parameter of NVIDIA's calls: accepted, in their order, with their default, and with an effect or a reason."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import logging
from pathlib import Path

import pytest
import torch
from opfuse.graph_ops import api as calls
from opfuse.graph_ops import scales

REQUIRED = inspect.Parameter.empty
DGLU_OPTIONS = {
    "acc_dtype": None, "mma_tiler_mn": (256, 256), "cluster_shape_mn": None, "sf_vec_size": 16, "vector_f32": False,
    "m_aligned": 256, "discrete_col_sfd": False, "act_func": "dswiglu", "linear_offset": None, "geglu_alpha": 1.702,
    "glu_clamp_max": 7.0, "glu_clamp_min": -7.0, "situ_beta1": 4.0, "situ_beta2": 25.0, "b_major": "k",
    "epilogue_op": None, "use_single_group_runtime_offsets": False, "use_dynamic_sched": False,
}  # fmt: skip
"""The defaults that the page's "Common parameters" give, and those of its prose."""

PAGES = {
    "grouped_gemm_dglu_wrapper": (
        ("a_tensor", "c_tensor", "sfa_tensor", "padded_offsets", "alpha_tensor", "beta_tensor", "prob_tensor",
         "dprob_tensor"),
        {"b_tensor": None, "sfb_tensor": None, "b_ptrs": None, "sfb_ptrs": None, "n": None, "b_dtype": None,
         "norm_const_tensor": None, "generate_dbias": False, "cd_major": "n", "current_stream": None, **DGLU_OPTIONS},
    ),
    "GroupedGemmDglu": (
        tuple(f"sample_{n}" for n in ("a", "c", "d_row", "d_col", "sfa", "padded_offsets", "alpha", "beta", "prob",
                                      "dprob")),
        {"sample_b": None, "sample_sfb": None, "sample_dbias": None, "num_experts": None, "b_shape": None,
         "b_dtype": None,
         "sample_sfd_row": None, "sample_sfd_col": None, "sample_amax": None, "sample_norm_const": None,
         **DGLU_OPTIONS},
    ),
    "discrete_grouped_gemm_swiglu_wrapper": (
        ("a_tensor", "b_ptrs", "sfa_tensor", "sfb_ptrs", "padded_offsets", "alpha_tensor", "n", "b_dtype"),
        {"norm_const_tensor": None, "prob_tensor": None, "acc_dtype": None, "c_dtype": None, "d_dtype": None,
         "cd_major": "n",
         "mma_tiler_mn": (256, 256), "cluster_shape_mn": None, "sf_vec_size": 16, "vector_f32": False, "m_aligned": 256,
         "discrete_col_sfd": False, "act_func": "swiglu", "b_major": "k", "current_stream": None},
    ),
    "DiscreteGroupedGemmSwiglu": (
        ("sample_a", "num_experts", "b_shape", "b_dtype", "sample_c", "sample_d", "sample_sfa", "sample_padded_offsets",
         "sample_alpha", "sample_d_col"),
        {"sample_sfd_row": None, "sample_sfd_col": None, "sample_amax": None, "sample_norm_const": None,
         "sample_prob": None,
         "acc_dtype": None, "mma_tiler_mn": (256, 256), "cluster_shape_mn": None, "sf_vec_size": 16,
         "vector_f32": False,
         "m_aligned": 256, "discrete_col_sfd": False, "act_func": "swiglu", "b_major": "k"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_names_and_defaults_are_those_of_the_pages(name):
    required, optional = PAGES[name]
    parameters = inspect.signature(getattr(calls, name)).parameters
    assert tuple(n for n, p in parameters.items() if p.default is REQUIRED) == required
    assert {n: parameters[n].default for n in optional} == optional
    assert getattr(calls, f"{name}_sm100" if name.endswith("wrapper") else f"{name}Sm100") is getattr(calls, name)


SOURCES = {
    "grouped_gemm_dglu_wrapper": ("grouped/dglu/api.py", "grouped_gemm_dglu_wrapper_sm100"),
    "GroupedGemmDglu": ("grouped/dglu/api.py", "GroupedGemmDgluSm100.__init__"),
    "GroupedGemmDglu.execute": ("grouped/dglu/api.py", "GroupedGemmDgluSm100.execute"),
    "discrete_grouped_gemm_swiglu_wrapper": (
        "discrete_grouped/swiglu/api.py",
        "discrete_grouped_gemm_swiglu_wrapper_sm100",
    ),
    "DiscreteGroupedGemmSwiglu": ("discrete_grouped/swiglu/api.py", "DiscreteGroupedGemmSwigluSm100.__init__"),
    "DiscreteGroupedGemmSwiglu.execute": ("discrete_grouped/swiglu/api.py", "DiscreteGroupedGemmSwigluSm100.execute"),
}


def installed_signature(path, name):
    """Parameters and literal defaults of a function of the installed cudnn-frontend, read and not imported."""
    try:
        source = importlib.metadata.distribution("nvidia-cudnn-frontend").locate_file(f"cudnn/gemm/cutedsl/{path}")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("nvidia-cudnn-frontend is not installed")
    body = ast.parse(Path(str(source)).read_text()).body
    *classes, function = name.split(".")
    for cls in classes:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == cls).body
    found = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == function]
    arguments = found[-1].args  # the overloads come first
    names = [a.arg for a in arguments.args if a.arg != "self"]
    defaults = [REQUIRED] * (len(names) - len(arguments.defaults)) + [ast.literal_eval(d) for d in arguments.defaults]
    keyword = {a.arg: ast.literal_eval(d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
    return {**dict(zip(names, defaults, strict=True)), **keyword}


@pytest.mark.parametrize("ours", SOURCES)
def test_order_and_defaults_are_those_of_the_installed_package(ours):
    theirs = installed_signature(*SOURCES[ours])
    target = calls
    for part in ours.split("."):
        target = getattr(target, part)
    parameters = {n: p.default for n, p in inspect.signature(target).parameters.items() if n != "self"}
    assert list(parameters.items()) == list(theirs.items())


# ---------------------------------------------------------------------- an effect or a reason


def dglu_call(api, kind, seed, **changes):
    """The results of a valid call with `changes`, as bytes by name; dprob too."""
    block = 32 if kind in ("e4m3", "fp4") else 16
    p = api.make(seed, kind, "e8m0", block, discrete="b_ptrs" in changes, wide_values=True)
    t = p.tensors
    arguments = dict(
        a_tensor=t["a_tensor"], c_tensor=api.column(t["c"].bfloat16()), sfa_tensor=t["sfa_tensor"],
        padded_offsets=t["padded_offsets"], alpha_tensor=t["alpha_tensor"], beta_tensor=t["beta_tensor"],
        prob_tensor=t["prob_tensor"], dprob_tensor=t["dprob_tensor"], b_tensor=t["b"], sfb_tensor=t.get("sfb"),
    )  # fmt: skip
    if kind == "e4m3":
        arguments |= dict(norm_const_tensor=torch.tensor([1.0]), d_dtype=torch.float8_e4m3fn)
    if kind != "bf16":
        arguments |= dict(sf_vec_size=block)
    if "b_ptrs" in changes:
        arguments |= dict(b_tensor=None, sfb_tensor=None, b_ptrs=t["b_ptrs"], sfb_ptrs=t.get("sfb_ptrs"), n=api.N,
                          b_dtype=api.STORED.get(kind, torch.bfloat16))  # fmt: skip
        changes = {k: v for k, v in changes.items() if k != "b_ptrs"}
    changes = {k: v(arguments) if callable(v) else v for k, v in changes.items()}
    out = calls.grouped_gemm_dglu_wrapper(**{**arguments, **changes})
    return {k: v.reshape(-1).view(torch.uint8).clone() if v is not None else None for k, v in out.items()}


def scaled(name, factor=-0.5):
    return {name: lambda arguments: arguments[name] * factor}


def doubled(name):
    """E8M0 scales, each times two."""
    return {name: lambda arguments: (arguments[name].view(torch.uint8) + 1).view(torch.float8_e8m0fnu)}


EFFECTS = [
    # (parameter, family, baseline, change)
    ("a_tensor", "bf16", {}, scaled("a_tensor")),
    ("c_tensor", "bf16", {}, scaled("c_tensor")),
    ("sfa_tensor", "fp4", {}, doubled("sfa_tensor")),
    ("padded_offsets", "bf16", {}, {"padded_offsets": torch.tensor([0, 256, 256], dtype=torch.int32)}),
    ("alpha_tensor", "bf16", {}, scaled("alpha_tensor")),
    ("beta_tensor", "bf16", {}, scaled("beta_tensor")),
    ("prob_tensor", "bf16", {}, scaled("prob_tensor")),
    ("prob_tensor", "bf16", {}, {"prob_tensor": None}),
    ("dprob_tensor", "bf16", {}, {"dprob_tensor": lambda a: a["dprob_tensor"] + 1}),
    ("dprob_tensor", "fp4", {}, {"dprob_tensor": None}),
    ("b_tensor", "bf16", {}, scaled("b_tensor")),
    ("sfb_tensor", "fp4", {}, doubled("sfb_tensor")),
    ("generate_dbias", "bf16", {}, {"generate_dbias": True}),
    ("norm_const_tensor", "e4m3", {}, scaled("norm_const_tensor", 3.0)),
    ("d_dtype", "bf16", {}, {"d_dtype": torch.float16}),
    ("d_dtype", "e4m3", {}, {"d_dtype": torch.float8_e5m2}),
    ("act_func", "bf16", {}, {"act_func": "dgeglu"}),
    ("act_func", "e4m3", {}, {"act_func": "dsituglu"}),
    ("linear_offset", "bf16", {"act_func": "dgeglu"}, {"linear_offset": 0.0}),
    ("geglu_alpha", "bf16", {"act_func": "dgeglu"}, {"geglu_alpha": 1.0}),
    ("glu_clamp_max", "bf16", {"act_func": "dgeglu"}, {"glu_clamp_max": 3.0}),
    ("glu_clamp_min", "bf16", {"act_func": "dgeglu"}, {"glu_clamp_min": -3.0}),
    ("situ_beta1", "fp4", {"act_func": "dsituglu"}, {"situ_beta1": 2.0}),
    ("situ_beta2", "fp4", {"act_func": "dsituglu"}, {"situ_beta2": 2.0}),
    ("epilogue_op", "fp4", {}, {"epilogue_op": "relu"}),
    ("epilogue_op", "fp4", {"epilogue_op": "relu"}, {"epilogue_op": "srelu"}),
    ("round_dgrad_to_input_dtype", "bf16", {}, {"round_dgrad_to_input_dtype": True}),
]  # fmt: skip


def nothing(results):
    return {k: v for k, v in results.items() if v is not None}


@pytest.mark.parametrize("parameter, kind, baseline, change", EFFECTS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_parameter_with_an_effect_changes_the_result(api, parameter, kind, baseline, change):
    seed = int(torch.seed() % 2**31)
    assert parameter in change
    before, after = dglu_call(api, kind, seed, **baseline), dglu_call(api, kind, seed, **{**baseline, **change})
    same = nothing(before).keys() == nothing(after).keys() and all(
        torch.equal(v, after[k]) for k, v in nothing(before).items()
    )
    assert not same, f"seed {seed}"


def test_discrete_col_sfd_moves_the_atoms_of_wide_outputs(api):
    results = []
    for by_expert in (False, True):
        p = api.make(7, "e4m3", "e8m0", 32, columns=128)
        t = p.tensors
        c = torch.randn(api.M, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
        out = calls.grouped_gemm_dglu_wrapper(
            t["a_tensor"], api.column(c), t["sfa_tensor"], torch.tensor([256, 512, 512], dtype=torch.int32),
            t["alpha_tensor"], t["beta_tensor"], t["prob_tensor"], t["dprob_tensor"], t["b"], t["sfb"], sf_vec_size=32,
            norm_const_tensor=torch.tensor([1.0]), d_dtype=torch.float8_e4m3fn, discrete_col_sfd=by_expert,
        )  # fmt: skip
        results.append(scales.from_atom_view(out["sfd_col_tensor"], 256, api.M // 32))
    plain, packed = results
    assert not torch.equal(plain.view(torch.uint8), packed.view(torch.uint8))
    ends = torch.tensor([256, 512, 512], dtype=torch.int32)
    assert torch.equal(scales.unpack_columns_by_expert(packed, ends, 32).view(torch.uint8), plain.view(torch.uint8))


SAME = [
    # what says where things lie, or how a kernel runs, and not what is computed
    ("b_ptrs", "bf16", {"b_ptrs": True}),
    ("b_ptrs", "fp4", {"b_ptrs": True}),
    ("acc_dtype", "bf16", {"acc_dtype": torch.float32}),
    ("use_dynamic_sched", "bf16", {"use_dynamic_sched": True}),
    ("vector_f32", "fp4", {"vector_f32": True}),
    ("mma_tiler_mn", "fp4", {"mma_tiler_mn": (128, 256)}),
    ("mma_tiler_mn", "bf16", {"mma_tiler_mn": (256, 96)}),
    ("cluster_shape_mn", "fp4", {"cluster_shape_mn": (2, 2)}),
    ("deterministic", "fp4", {"deterministic": True}),
    ("m_aligned", "bf16", {"m_aligned": 256}),
    ("epilogue_op", "bf16", {"epilogue_op": "identity"}),
]


@pytest.mark.parametrize("parameter, kind, change", SAME, ids=lambda v: v if isinstance(v, str) else "")
def test_the_others_leave_the_result_alone(api, parameter, kind, change):
    seed = int(torch.seed() % 2**31)
    before, after = dglu_call(api, kind, seed), dglu_call(api, kind, seed, **change)
    assert nothing(before).keys() == nothing(after).keys()
    assert all(torch.equal(v, after[k]) for k, v in nothing(before).items()), f"seed {seed}"


@pytest.mark.parametrize(
    "change", [c for n, k, c in SAME if n in ("use_dynamic_sched", "vector_f32", "mma_tiler_mn", "cluster_shape_mn")]
)
def test_a_schedule_option_is_reported_to_change_nothing(api, change, caplog):
    kind = "bf16" if change.get("mma_tiler_mn") == (256, 96) or "use_dynamic_sched" in change else "fp4"
    with caplog.at_level(logging.INFO, logger="opfuse.api"):
        dglu_call(api, kind, 3)
        assert not caplog.records
        dglu_call(api, kind, 3, **change)
    named = [r for r in caplog.records if r.code == "SCHEDULE_OPTION" and next(iter(change)) in r.getMessage()]
    assert named, caplog.text


def test_single_group_runtime_offsets_do_not_read_the_offset(api):
    p = api.make(5, "fp4", "e8m0", 32)
    t = p.tensors
    b, sfb = t["b"].view(torch.uint8)[:, :, :1], t["sfb"][..., :1]
    shared = dict(
        a_tensor=t["a_tensor"].view(torch.uint8), c_tensor=api.column(t["c"]), sfa_tensor=t["sfa_tensor"],
        alpha_tensor=t["alpha_tensor"][:1], beta_tensor=t["beta_tensor"][:1], prob_tensor=t["prob_tensor"],
        dprob_tensor=None, b_tensor=b, sfb_tensor=sfb, sf_vec_size=32,
    )  # fmt: skip
    whole = calls.grouped_gemm_dglu_wrapper(padded_offsets=torch.tensor([512], dtype=torch.int32), **shared)[0]
    half = calls.grouped_gemm_dglu_wrapper(padded_offsets=torch.tensor([256], dtype=torch.int32), **shared)[0]
    runtime = calls.grouped_gemm_dglu_wrapper(
        padded_offsets=torch.tensor([256], dtype=torch.int32), use_single_group_runtime_offsets=True, **shared
    )[0]
    assert torch.equal(runtime, whole) and not torch.equal(half, whole) and (half[256:] == 0).all()


def test_n_major_weights(api):
    """Dense weights say their major by their strides (FP8) or are canonical (BF16), discrete ones by b_major."""
    p = api.make(11)
    t = p.tensors
    k_major = t["b"]  # (N, K, L)
    n_major = k_major.permute(2, 1, 0).contiguous()  # canonical (L, K, N)
    pointers = torch.tensor([w.data_ptr() for w in n_major])
    shared = dict(
        a_tensor=t["a_tensor"], c_tensor=api.column(t["c"]), sfa_tensor=None, padded_offsets=t["padded_offsets"],
        alpha_tensor=t["alpha_tensor"], beta_tensor=t["beta_tensor"], prob_tensor=t["prob_tensor"], dprob_tensor=None,
    )  # fmt: skip
    wanted = calls.grouped_gemm_dglu_wrapper(**shared, b_tensor=k_major)[0]
    assert torch.equal(calls.grouped_gemm_dglu_wrapper(**shared, b_tensor=n_major, b_major="n")[0], wanted)
    discrete = dict(b_ptrs=pointers, n=api.N, b_dtype=torch.bfloat16)
    assert torch.equal(calls.grouped_gemm_dglu_wrapper(**shared, **discrete, b_major="n")[0], wanted)
    assert not torch.equal(calls.grouped_gemm_dglu_wrapper(**shared, **discrete, b_major="k")[0], wanted)


def test_n_major_fp8_weights_give_the_same_bytes(api):
    seed = int(torch.seed() % 2**31)
    n_major = {"b_tensor": lambda a: a["b_tensor"].view(torch.uint8).permute(2, 1, 0).contiguous().permute(2, 1,
                                                                                                           0).view(
        torch.float8_e4m3fn)}  # fmt: skip
    before, after = dglu_call(api, "e4m3", seed), dglu_call(api, "e4m3", seed, **n_major)
    assert all(torch.equal(v, after[k]) for k, v in nothing(before).items()), f"seed {seed}"


def test_canonical_layouts_give_canonical_outputs(api):
    """A (M, K), C (M, 2N), B (L, N, K), prob (M,): what the installed package calls canonical."""
    p = api.make(12)
    t = p.tensors
    shared = dict(padded_offsets=t["padded_offsets"], alpha_tensor=t["alpha_tensor"], beta_tensor=t["beta_tensor"],
                  sfa_tensor=None, dprob_tensor=None, generate_dbias=True)  # fmt: skip
    wanted = calls.grouped_gemm_dglu_wrapper(
        t["a_tensor"], api.column(t["c"]), prob_tensor=t["prob_tensor"], b_tensor=t["b"], **shared
    )
    seen = calls.grouped_gemm_dglu_wrapper(
        t["a_tensor"][..., 0], t["c"], prob_tensor=t["prob_tensor"].flatten(),
        b_tensor=t["b"].permute(2, 0, 1).contiguous(), **shared,
    )  # fmt: skip
    assert seen[0].shape == (api.M, 2 * api.N) and torch.equal(seen[0], wanted[0][..., 0])
    assert torch.equal(seen["dbias_tensor"], wanted["dbias_tensor"])


def test_the_recomputed_activation_is_the_forwards(api):
    p = api.make(13)
    t = p.tensors
    c = t["c"].bfloat16()
    activation = torch.full((api.M, api.N, 1), torch.nan, dtype=torch.bfloat16)
    out = calls.grouped_gemm_dglu_wrapper(
        t["a_tensor"], api.column(c), None, t["padded_offsets"], t["alpha_tensor"], t["beta_tensor"], t["prob_tensor"],
        None,
        t["b"], act_func="dgeglu", activation_tensor=activation,
    )  # fmt: skip
    assert out["activation_tensor"] is activation and len(out) == 8
    x = c.double() * p.per_row(t["beta_tensor"])
    api.close(activation, api.glu(x, t["prob_tensor"].double().view(-1, 1), "geglu"), 2**-8, f"seed {p.seed}")


# ---------------------------------------------------------------------- the forward


def swiglu_call(api, kind, seed, **changes):
    block = 32 if kind == "e4m3" else 16
    p = api.make(seed, kind, "e8m0", block, columns=2 * api.N, discrete=True)
    t = p.tensors
    arguments = dict(
        a_tensor=t["a_tensor"], b_ptrs=t["b_ptrs"], sfa_tensor=t["sfa_tensor"], sfb_ptrs=t["sfb_ptrs"],
        padded_offsets=t["padded_offsets"], alpha_tensor=t["alpha_tensor"], n=2 * api.N, b_dtype=api.STORED[kind],
        prob_tensor=t["prob_tensor"], sf_vec_size=block, norm_const_tensor=torch.ones(1) if kind == "e4m3" else None,
    )  # fmt: skip
    changes = {k: v(arguments) if callable(v) else v for k, v in changes.items()}
    out = calls.discrete_grouped_gemm_swiglu_wrapper(**{**arguments, **changes})
    return {k: v.reshape(-1).view(torch.uint8).clone() if v is not None else None for k, v in out.items()}


FORWARD = [
    ("a_tensor", "e4m3", {}, {"a_tensor": lambda a: (a["a_tensor"].view(torch.uint8) ^ 128).view(torch.float8_e4m3fn)},
     True),
    ("sfa_tensor", "e4m3", {}, doubled("sfa_tensor"), True),
    ("b_ptrs", "uint8", {}, {"b_ptrs": lambda a: a["b_ptrs"].flip(0)}, True),
    ("sfb_ptrs", "uint8", {}, {"sfb_ptrs": lambda a: a["sfb_ptrs"].flip(0)}, True),
    ("padded_offsets", "e4m3", {}, {"padded_offsets": torch.tensor([0, 256, 256], dtype=torch.int32)}, True),
    ("alpha_tensor", "e4m3", {}, scaled("alpha_tensor"), True),
    ("bias_tensor", "e4m3", {}, {"bias_tensor": lambda a: torch.linspace(-1, 1, 384).view(3, 128).bfloat16().t()},
     True),
    ("norm_const_tensor", "e4m3", {}, scaled("norm_const_tensor", 3.0), True),
    ("prob_tensor", "e4m3", {}, {"prob_tensor": None}, True),
    ("c_dtype", "e4m3", {}, {"c_dtype": torch.float32}, True),
    ("d_dtype", "e4m3", {}, {"d_dtype": torch.float8_e4m3fn}, True),
    ("act_func", "e4m3", {}, {"act_func": "geglu"}, True),
    ("linear_offset", "uint8", {"act_func": "geglu"}, {"linear_offset": 0.0}, True),
    ("geglu_alpha", "uint8", {"act_func": "geglu"}, {"geglu_alpha": 1.0}, True),
    ("glu_clamp_max", "uint8", {"act_func": "geglu"}, {"glu_clamp_max": 1.0}, True),
    ("glu_clamp_min", "uint8", {"act_func": "geglu"}, {"glu_clamp_min": -1.0}, True),
    ("acc_dtype", "uint8", {}, {"acc_dtype": torch.float32}, False),
    ("mma_tiler_mn", "uint8", {}, {"mma_tiler_mn": (128, 256)}, False),
    ("cluster_shape_mn", "uint8", {}, {"cluster_shape_mn": (2, 2)}, False),
    ("vector_f32", "uint8", {}, {"vector_f32": True}, False),
    ("use_dynamic_sched", "uint8", {}, {"use_dynamic_sched": True}, False),
    ("discrete_col_sfd", "e4m3", {}, {"discrete_col_sfd": True}, False),  # one atom of 128 columns: nothing to move
]  # fmt: skip


@pytest.mark.parametrize(
    "parameter, kind, baseline, change, moves", FORWARD, ids=lambda v: v if isinstance(v, str) else ""
)
def test_forward_parameters_do_what_they_say(api, parameter, kind, baseline, change, moves, caplog):
    seed = int(torch.seed() % 2**31)
    before = swiglu_call(api, kind, seed, **baseline)
    with caplog.at_level(logging.INFO, logger="opfuse.api"):
        after = swiglu_call(api, kind, seed, **{**baseline, **change})
    same = nothing(before).keys() == nothing(after).keys() and all(
        torch.equal(v, after[k]) for k, v in nothing(before).items()
    )
    assert same is not moves, f"seed {seed}"
    idle = parameter in ("mma_tiler_mn", "cluster_shape_mn", "vector_f32", "use_dynamic_sched")
    assert any(r.code == "SCHEDULE_OPTION" for r in caplog.records) is idle
