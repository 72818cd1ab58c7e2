"""The example agent, with the embedded model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "examples" / "langchain_agent.py"


def test_the_example_agent_reads_every_token_once_in_a_small_window(smollm2):
    made = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600, check=False)
    assert made.returncode == 0, made.stderr
    lines = made.stdout.splitlines()
    steps = [line.split() for line in lines if " positions: " in line]
    assert [step[5].partition("(")[0] for step in steps[:8]] == ["next_page", "write_note"] * 4
    assert all(float(step[3]) <= 700 for step in steps)
    assert int(steps[-1][0]) > 2 * 700
    assert any(line.strip().startswith("compacted") for line in lines)
    (total,) = [int(line.split()[0]) for line in lines if line.endswith("none twice.")]
    assert total < int(steps[-1][0])
