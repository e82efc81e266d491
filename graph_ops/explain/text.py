"""An Explanation as text, the way a database prints EXPLAIN."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ...fusion_rules.verdict import VerdictKind
from ...kernels.condition import Reason
from ..plan import Estimate
from .model import ExplainedStep, ExplainedVerdict, Explanation, LeftAlone

INDENT = "  "


def render(explanation: Explanation) -> str:
    """The whole explanation; sections that have nothing to say are left out."""
    sections = (
        _header(explanation),
        _steps(explanation),
        _raisings(explanation),
        _left(explanation),
        _others(explanation),
    )
    return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section)))


def seconds_text(seconds: float) -> str:
    """1.5e-4 -> '150.0 us'."""
    return _scaled(seconds, 1e-9, 1000, ("ns", "us", "ms", "s"))


def bytes_text(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    return f"{count:.0f} B" if count < 1024 else _scaled(count, 1, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def flops_text(count: float) -> str:
    """2.1e12 -> '2.1 TFLOP'."""
    return (
        f"{count:.0f} FLOP"
        if count < 1000
        else _scaled(count, 1, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))
    )


def _scaled(value: float, unit: float, step: float, names: Sequence[str]) -> str:
    value /= unit
    for name in names[:-1]:
        if value < step:
            return f"{value:.1f} {name}"
        value /= step
    return f"{value:.1f} {names[-1]}"


def plural(count: int, noun: str) -> str:
    """3, 'launch' -> '3 launches'."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def _header(e: Explanation) -> Iterator[str]:
    bound = ", ".join(f"{name} = {value}" for name, value in e.bindings.items())
    yield f"Plan of {e.graph.name} on {e.arch}"
    nodes, fused = len(e.graph.nodes), e.fused_nodes
    if not e.may_fuse:
        yield f"{INDENT}unfused on request: {plural(nodes, 'node')}, each on its own"
    elif not fused:
        yield f"{INDENT}nothing fused: {plural(nodes, 'node')}, each on its own{_lone(e)}"
    else:
        kernels = plural(len(e.fused_steps), "fused kernel")
        yield f"{INDENT}{kernels} over {fused} of {plural(nodes, 'node')}; {nodes - fused} left unfused{_lone(e)}"
    yield f"{INDENT}estimated, not measured" + (f", at {bound}" if bound else "")
    yield ""
    rows = (
        ("time", seconds_text(e.estimate.seconds), seconds_text(e.unfused_estimate.seconds)),
        ("bytes moved", bytes_text(e.estimate.bytes), bytes_text(e.unfused_estimate.bytes)),
        ("arithmetic", flops_text(e.estimate.flops), flops_text(e.unfused_estimate.flops)),
        ("launches", str(e.estimate.launches), str(e.unfused_estimate.launches)),
        ("peak workspace", bytes_text(e.workspace_bytes), bytes_text(e.unfused_workspace_bytes)),
    )
    yield f"{INDENT}{'':<16}{'this plan':>14}{'all unfused':>14}"
    for label, mine, apart in rows:
        yield f"{INDENT}{label:<16}{mine:>14}{apart:>14}"


def _lone(e: Explanation) -> str:
    """Which kernels run single nodes in torch's stead."""
    kernels = Counter(step.title for step in e.lone_kernels)
    return "".join(f", {count} by {title}" for title, count in sorted(kernels.items()))


def _steps(e: Explanation) -> Iterator[str]:
    yield "Steps"
    width = len(str(len(e.steps)))
    for number, step in enumerate(e.steps, 1):
        yield from _step(f"{INDENT}{number:>{width}}. ", step)


def _step(lead: str, step: ExplainedStep) -> Iterator[str]:
    pad = " " * (len(lead) + 2)
    if step.is_fused:
        yield f"{lead}FUSED {step.title} (rule {step.rule})"
        for position, node in enumerate(step.nodes):
            yield f"{pad}{'absorbs ' if position == 0 else '        '}{node.path}"
    else:
        rule = f" (rule {step.rule})" if step.is_lone_kernel else ""
        yield f"{lead}{step.title}{rule}: {'; '.join(node.path for node in step.nodes)}"
    yield f"{pad}reads   {_bound(step.reads)}"
    yield f"{pad}writes  {_bound(step.writes)}"
    capture = "capturable" if step.capturable else f"not capturable: {step.capture_reason}"
    yield f"{pad}{_work(step.estimate)}; {capture}"


def _bound(pairs: Sequence[tuple[str, str]]) -> str:
    return ", ".join(role if role == name else f"{role}={name}" for role, name in pairs) or "nothing"


def _work(estimate: Estimate) -> str:
    return ", ".join((
        f"est. {seconds_text(estimate.seconds)}", bytes_text(estimate.bytes), flops_text(estimate.flops),
        plural(estimate.launches, "launch"),
    ))  # fmt: skip


def _raisings(e: Explanation) -> Iterator[str]:
    if e.raisings:
        yield "Raised before fusing"
    for raising in e.raisings:
        numbers = ", ".join(map(str, raising.nodes))
        yield f"{INDENT}{raising.rule}: nodes {numbers} as declared became {raising.into}"


def _left(e: Explanation) -> Iterator[str]:
    if e.left_alone and e.may_fuse:
        yield "Left unfused"
        for left in e.left_alone:
            yield from _left_node(left)


def _left_node(left: LeftAlone) -> Iterator[str]:
    yield f"{INDENT}{left.node.path}" + (f", runs as {left.kernel}" if left.kernel else "")
    for verdict in left.verdicts:
        yield from _verdict(verdict, INDENT * 2, left.node.name)
    if left.told_at:
        yield f"{INDENT * 2}see {'also ' if left.verdicts else ''}{', '.join(left.told_at)}"
    elif not left.verdicts and left.kernel is None:
        yield f"{INDENT * 2}no rule reaches it"


def _others(e: Explanation) -> Iterator[str]:
    # That a rule does not match where another one did is no news; the JSON has it.
    near = [v for v in e.alternatives if v.kind is not VerdictKind.NO_MATCH]
    if near:
        yield "Also considered for fused nodes"
    for verdict in near:
        yield from _verdict(verdict, INDENT, "")


def _verdict(verdict: ExplainedVerdict, pad: str, told_at: str) -> Iterator[str]:
    kernel = f", kernel {verdict.kernel}" if verdict.kernel else ""
    if verdict.kind is VerdictKind.NO_MATCH:
        fitted = ", ".join(verdict.with_nodes)
        about = f"; nearest miss: {fitted} fitted" if fitted else ""
    else:
        others = [n for n in verdict.with_nodes if n != told_at]
        about = f", with {', '.join(others)}" if others else ""
    yield f"{pad}{verdict.rule}{kernel}: {verdict.kind.value}{about}"
    for reason in verdict.reasons:
        yield from _reason(reason, pad + INDENT)
    if not verdict.reasons:
        yield f"{pad}{INDENT}(no reason was recorded)"


def _reason(reason: Reason, pad: str) -> Iterator[str]:
    yield f"{pad}{reason.code}: observed {reason.observed}; required {reason.required}"
    if reason.hint:
        yield f"{pad}{INDENT}hint: {reason.hint}"
    if reason.where:
        yield f"{pad}{INDENT}at {reason.where}"
