"""torch.compile: FX graphs imported into operation graphs, raised and fused; the rest stays the compiler's."""

from .backend import OpfuseJointPass, OpfusePass, backend
from .report import CompileExplanation, explain
from .rewrite import Options, Region

__all__ = ["CompileExplanation", "OpfuseJointPass", "OpfusePass", "Options", "Region", "backend", "explain"]
