"""What a chat looks like: the status line with its bar, the table of messages, the report of a compaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcompact_cli.console import out, size

if TYPE_CHECKING:
    from agentcompact.session import CompactionReport, MessageStatus, SessionPolicy, SessionStatus

BAR_WIDTH = 30
_KINDS = (("system", "S"), ("pinned", "P"), ("compacted", "c"), ("live", "#"))


def bar(status: SessionStatus, width: int = BAR_WIDTH) -> str:
    """Draw how full the window is: S system, P pinned, c compacted, # live, . free."""
    drawn, filled = "", 0.0
    for kind, sign in _KINDS:
        held = getattr(status, kind)
        filled += held
        drawn += sign * max(int(held > 0), round(width * filled / max(1, status.window)) - len(drawn))
    return (drawn + "." * width)[:width]


def status_line(status: SessionStatus, policy: SessionPolicy) -> str:
    """Return one line: the bar, what is held of the window, the trigger and the strategy."""
    auto = "auto off" if not status.auto else "auto waits" if status.paused else f"compacts at {status.trigger:,}"
    logical = "" if round(status.held) == status.logical else f" · {status.logical:,} tokens so far"
    return (
        f"[{bar(status)}] {status.held:,.0f}/{status.window:,} held{logical} · {auto} · "
        f"{policy.strategy} {policy.ratio:g}x"
    )


def warning_line(status: SessionStatus) -> str | None:
    """Return the warning that the next message may bring a compaction, or None."""
    if not status.near_trigger:
        return None
    return f"{status.held:,.0f} of {status.trigger:,} held: compaction is near (/context, /pin, /auto)"


def report_line(report: CompactionReport) -> str:
    """Return a compaction in one line: before and after, and what the model noticed."""
    fidelity = report.fidelity
    noticed = (
        f"; next words agree {fidelity.top1:.0%}, KL {fidelity.kl:.3f} ({fidelity.tokens} tokens)"
        if fidelity.top1 is not None and fidelity.kl is not None
        else ""
    )
    moved = f"; keys moved down by {report.moved:,}" if report.moved else ""
    return (
        f"compacted {report.tokens:,} tokens with {report.strategy}: held {report.held_before:,.0f} -> "
        f"{report.held_after:,.0f}, {size(report.bytes_before)} -> {size(report.bytes_after)}, "
        f"{report.seconds:.1f} s{noticed}{moved}"
    )


def print_context(rows: list[MessageStatus], status: SessionStatus, policy: SessionPolicy) -> None:
    """Print the table of messages, and the totals."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=True)
    for name in ("", "role", "tokens", "entries", "bytes", "state", "text"):
        number = name in ("", "tokens", "entries", "bytes")
        table.add_column(name, justify="right" if number else "left", no_wrap=True, ratio=1 if name == "text" else None)
    for row in rows:
        known = row.state != "unread"
        table.add_row(
            str(row.number),
            row.role,
            f"{row.tokens:,}" if known else "",
            f"{row.entries:,.0f}" if known else "",
            size(row.nbytes) if known else "",
            row.state + (", pinned" if row.pinned else ""),
            Text(" ".join(row.text.split())[:200]),
        )
    out.print(table)
    parts = ", ".join(f"{kind} {getattr(status, kind):,.0f}" for kind, _ in _KINDS)
    out.print(status_line(status, policy), markup=False, soft_wrap=True)
    out.print(f"{parts}, free {status.free:,.0f}; {size(status.nbytes)}", markup=False, soft_wrap=True)
    if status.paused:
        out.print(f"automatic compaction waits: {status.paused}", markup=False, soft_wrap=True)
