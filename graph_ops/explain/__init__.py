"""Why a plan is as it is: `explain(plan)` as text, JSON and Mermaid."""

from .model import ExplainedStep, ExplainedVerdict, Explanation, LeftAlone, explain

__all__ = ["ExplainedStep", "ExplainedVerdict", "Explanation", "LeftAlone", "explain"]
