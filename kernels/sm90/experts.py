"""Weights that lie in separate buffers: one TMA descriptor per expert, written on the device from a pointer array."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.tensor_utils import TensorMapManager, TensorMapUpdateMode

DESCRIPTOR_BYTES = 128


def manager() -> TensorMapManager:
    return TensorMapManager(TensorMapUpdateMode.SMEM, DESCRIPTOR_BYTES)


def descriptor(descriptors: cute.Tensor, expert, space=cute.AddressSpace.generic):
    """Pointer to one expert's descriptor; `descriptors` is (L, 16) 64-bit words."""
    return manager().get_tensormap_ptr(descriptors[expert, None].iterator, space)


class DescribeExperts:
    """One warp per expert: the template descriptor with that expert's address."""

    @cute.jit
    def __call__(
        self, atom: cute.CopyAtom, pointers: cute.Tensor, descriptors: cute.Tensor, template: cute.Tensor, stream
    ):
        self.kernel(atom, pointers, descriptors, template).launch(
            grid=[cute.size(pointers), 1, 1], block=[32, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom, pointers: cute.Tensor, descriptors: cute.Tensor, template: cute.Tensor):
        expert = cute.arch.block_idx()[0]
        shared = cutlass.memory.SmemAllocator().allocate_array(Int64, DESCRIPTOR_BYTES // 8, byte_alignment=128)
        maps = manager()
        maps.init_tensormap_from_atom(atom, shared, 0)
        address = cute.make_ptr(template.element_type, pointers[expert], cute.AddressSpace.gmem, assumed_align=16)
        weights = cute.make_tensor(address, template.layout)
        target = descriptor(descriptors, expert, cute.AddressSpace.gmem)
        maps.update_tensormap((weights,), (atom,), (target,), 0, (shared,))
