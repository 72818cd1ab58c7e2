"""The summary as comma-separated values."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from agentcompact.evaluation.summary import SummaryRow


def csv_text(rows: Sequence[SummaryRow]) -> str:
    """Write every field of the rows, one row a line; None is empty, the kinds are JSON."""
    target = io.StringIO()
    writer = csv.DictWriter(target, fieldnames=list(SummaryRow.model_fields), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = row.model_dump(mode="json")
        values["kinds"] = json.dumps(values["kinds"], ensure_ascii=False) if values["kinds"] else ""
        writer.writerow(values)
    return target.getvalue()
