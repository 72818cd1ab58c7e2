"""The columns of the tables for people: their titles, texts and meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentcompact.evaluation.summary import SummaryRow

MISSING = "n/a"
Text = Callable[[SummaryRow], str]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    brief: a narrower text for terminals. rank: in a narrow terminal the columns with the highest go first; None: never
    shown there. Columns that no row has a value for are left out everywhere.
    """

    title: str
    text: Text
    meaning: str = ""
    brief: Text | None = None
    rank: int | None = None
    numeric: bool = True


def plain(text: str) -> str:
    """Make one line of a text from elsewhere, without control characters."""
    return " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in text).split())


def number(value: float | None, form: str, factor: float = 1.0) -> str:
    """Write a number, or n/a for None."""
    return MISSING if value is None else format(value * factor, form)


def small(value: float | None) -> str:
    """Write an error or a divergence with three digits behind the point, or as a power where that shows nothing."""
    return number(value, ".1e" if value is not None and 0 < value < 0.0005 else ".3f")


def times(value: float | None) -> str:
    """Write a ratio: 8x."""
    return MISSING if value is None else f"{value:.4g}x"


def multiple(value: float | None) -> str:
    """Write a measured ratio: 8.04x."""
    return MISSING if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """Write a share as per cent, without the sign."""
    return number(value, ".1f", 100)


def interval(value: float | None, low: float | None, high: float | None) -> str:
    """Write a share with its interval: 71.2 (66.0-75.9)."""
    if value is None or low is None or high is None:
        return percent(value)
    return f"{percent(value)} ({percent(low)}-{percent(high)})"


def brief_interval(value: float | None, low: float | None, high: float | None) -> str:
    """Write a share with its interval in whole per cent: 71.2 (66-76)."""
    if value is None or low is None or high is None:
        return percent(value)
    return f"{percent(value)} ({100 * low:.0f}-{100 * high:.0f})"


def status(row: SummaryRow) -> str:
    """Say whether cells failed."""
    return f"{row.failed} failed" if row.failed else "ok"


LENGTH = Column("length", lambda r: number(r.length, ",.0f"), rank=0)
RATIO = Column(
    "ratio", lambda r: times(r.ratio), "The compaction ratio asked for: tokens over entries per head.", rank=0
)
STRATEGY = Column("strategy", lambda r: plain(r.strategy), rank=0, numeric=False)
COMPACTIONS = Column(
    "compactions",
    lambda r: number(r.compactions, ",.0f"),
    "How often the text was compacted in a row to the same budget; a piece of other text arrived before each but the "
    "first.",
    rank=0,
)
STATUS = Column("status", status, rank=0, numeric=False)

MEASURES = (
    Column(
        "documents",
        lambda r: str(r.documents),
        "Documents that worked; the other columns are about these.",
    ),
    Column("questions", lambda r: str(max(r.questions, r.choices)), "Questions that were scored.", rank=7),
    Column(
        "accuracy %",
        lambda r: interval(r.accuracy, r.accuracy_low, r.accuracy_high),
        "Mean score of the generated answers, with its 95 % interval by a two-stage bootstrap (documents, then "
        "questions). A question scores 1 if its answer is found, or the share of its answers that are.",
        brief=lambda r: brief_interval(r.accuracy, r.accuracy_low, r.accuracy_high),
        rank=1,
    ),
    Column(
        "choices %",
        lambda r: interval(r.choice_accuracy, r.choice_low, r.choice_high),
        "Share of multiple-choice questions where the right option has the highest mean log-probability, with its "
        "95 % interval.",
        brief=lambda r: brief_interval(r.choice_accuracy, r.choice_low, r.choice_high),
        rank=4,
    ),
    Column(
        "utility",
        lambda r: number(r.utility, ".1f"),
        "100 (A - N) / (F - N) for the accuracies A of this cache, F of the full cache and N without the document, "
        "over documents that worked with all three. n/a where F is not above N.",
        rank=2,
    ),
    Column("choice utility", lambda r: number(r.choice_utility, ".1f"), "The same for choices.", rank=10),
    Column(
        "KL",
        lambda r: small(r.kl),
        "Mean KL divergence, in nats, from the full cache's next-token distribution, over its own greedy "
        "continuations. 0 is no change.",
        rank=5,
    ),
    Column(
        "top-1 %",
        lambda r: percent(r.top1),
        "Share of those tokens that stay the likeliest.",
        rank=8,
    ),
    Column(
        "output error",
        lambda r: small(r.output_error),
        "Relative error of attention outputs on the questions' queries.",
        rank=9,
    ),
    Column("mass error", lambda r: small(r.mass_error), "Mean relative error of the attention mass."),
    Column("log mass error", lambda r: small(r.log_mass_error), "Mean absolute error of the mass's logarithm."),
    Column(
        "overlap %",
        lambda r: percent(r.overlap),
        "Share of the kept entries that selection by full attention keeps too.",
    ),
    Column(
        "compaction s",
        lambda r: number(r.compaction_seconds, ".2f"),
        "Seconds a compaction took, without the prefill.",
        rank=6,
    ),
    Column(
        "x prefill",
        lambda r: multiple(r.compaction_per_prefill),
        "Those seconds as a multiple of the prefill's.",
        rank=3,
    ),
    Column(
        "entries",
        lambda r: number(r.entries, ",.0f"),
        "Key-value pairs in all compacted layers and heads.",
        rank=12,
    ),
    Column("MB", lambda r: number(r.bytes, ",.1f", 1e-6), "Size of the cache in megabytes (10^6 bytes).", rank=11),
    Column(
        "reached",
        lambda r: multiple(r.reached_ratio),
        "Entries per head of the full cache over those of this one: the ratio as measured.",
    ),
    Column(
        "tokens/s",
        lambda r: number(r.decode_tokens_per_second, ",.1f"),
        "Tokens decoded per second.",
        rank=13,
    ),
    Column("vs full", lambda r: multiple(r.relative_decode), "That speed over the full cache's."),
)


def shown(rows: Sequence[SummaryRow]) -> list[Column]:
    """Give the columns that say something about these rows."""
    lengths = [LENGTH] if any(row.length is not None for row in rows) else []
    states = [STATUS] if any(row.failed for row in rows) else []
    measures = [column for column in MEASURES if any(column.text(row) != MISSING for row in rows)]
    repeated = [COMPACTIONS] if any(row.compactions > 1 for row in rows) else []
    return [*lengths, *repeated, STRATEGY, RATIO, *measures, *states]


def glossary(rows: Sequence[SummaryRow]) -> list[tuple[str, str]]:
    """Say what each of those columns means."""
    return [(column.title, column.meaning) for column in shown(rows) if column.meaning]
