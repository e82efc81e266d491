"""What a step of the expert MLP holds: storages that are alive after each op, counted as torch calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opfuse.graph_ops.torch import grouped_mlp
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

M, H, I, L = 64, 32, 96, 2


class Alive(TorchDispatchMode):
    """Elements of the storages that ops made under it, those still alive: the most, and after each of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0
        self.after: dict[str, int] = {}

    def now(self) -> int:
        self.made = {key: held for key, held in self.made.items() if not held[0].expired()}
        return sum(elements for _, elements in self.made.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {StorageWeakRef(t.untyped_storage()).cdata for t in args if isinstance(t, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = StorageWeakRef(tensor.untyped_storage())
                if storage.cdata not in given:
                    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                    self.made[storage.cdata] = (storage, elements)
        alive = self.now()
        self.most = max(self.most, alive)
        if function.namespace == "opfuse":
            self.after[function._opname] = alive
        return out


def elements(case: Any, *names: str) -> int:
    """Elements of tensors of the step by name."""
    size = {
        "x": M * H,
        "y": M * H,
        "h": M * 2 * I,
        "act": M * I,
        "prob": M,
        "w1": case.w1.numel(),
        "w2": case.w2.numel(),
    }
    return sum(size[name] for name in names)


@pytest.mark.parametrize(("save", "held"), [("activation", ("h", "act")), ("preactivation", ("h",)), ("inputs", ())])
def test_a_step_holds_no_more_than_its_gradients_need(save, held, make_case):
    case = make_case([32, 32], H=H, I=I, dtype=torch.bfloat16)
    dy, small = torch.randn_like(case.x), 16 * L
    with Alive() as alive:
        y = grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob, save=save)
        assert elements(case, "y", *held) <= alive.now() <= elements(case, "y", *held) + small
        gradients = torch.autograd.grad(y, list(case.leaves.values()), dy)
    found = [g.numel() for g in gradients]
    assert found == [elements(case, name) for name in ("x", "w1", "w2", "prob")]
    kept = elements(case, "y", "h", "w2", "prob")  # h's size twice: here it is that of its gradient
    assert alive.after["grouped_mlp_fc2_backward"] <= kept + elements(case, "h", "act") + small
    assert alive.after["grouped_mlp_fc1_backward"] <= kept + elements(case, "x", "w1") + small
    assert alive.most <= kept + max(elements(case, "x", "w1"), elements(case, "h", "act")) + small


def test_codes_take_no_zeros_in_place_of_gradients_that_nobody_has(make_case):
    case = make_case([32, 32], H=H, I=I, dtype=torch.bfloat16)
    with Alive() as alive:
        y = grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob, recipe="mxfp8", multiple_of=32)
        held = alive.now()
        torch.autograd.grad(y, list(case.leaves.values()), torch.ones_like(y))
    assert alive.most <= held + elements(case, "y", "x", "w1", "w2", "prob") + 16 * L
