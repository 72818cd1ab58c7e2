"""What the model is asked for its summary, and the line that introduces it afterwards."""

from __future__ import annotations

from collections.abc import Sequence

# Tried on models of 0.1 and 0.5 billion parameters: one wrote the wish it read last ("no preamble") as its summary, and
# both copied the text more when no short sentences were asked for. So the length comes last.
INSTRUCTIONS = (
    "Summarise the whole text above in short sentences, for somebody who has to go on from the summary alone. Keep "
    "exactly as written the file paths, commands, numbers and names; keep decisions with their reasons, tasks that are "
    "still open, and what the user corrected. Use the language of the text and no preamble."
)
WORDS_PER_TOKEN = 0.7

_INTRODUCTION = "Summary of the text before:\n"


def summary_request(instructions: str, words: int, focus: str | None = None, opening: str = "") -> str:
    """Return the request for a summary of at most `words` words.

    focus: what to pay most attention to. opening: the first words of what is to be summarised, where other text comes
    before it.
    """
    parts = [instructions]
    if opening.strip():
        parts.append(f'Begin at "{opening.strip()}"; what comes before that stays as it is.')
    if focus and focus.strip():
        parts.append(f"Pay most attention to this: {focus.strip()}")
    parts.append(f"Write at most {words:,} words.")
    return " ".join(parts)


def finish_request(request: str, words: int) -> str:
    """Return the request for a summary whose beginning is there already and has to be brought to an end."""
    return f"{request} The beginning is written: go on where it stops and come to an end within {words:,} more words."


def words_in(tokens: int) -> int:
    """Return about how many words a number of tokens holds."""
    return max(1, int(tokens * WORDS_PER_TOKEN))


def framed(summary: str, *, follows: bool, goes_on: bool) -> str:
    """Return a summary with the line that introduces it, apart from text that it follows or that goes on after it."""
    return ("\n" if follows else "") + _INTRODUCTION + summary + ("\n\n" if goes_on else "")


def until_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return a text up to the first of the stop strings behind its first word, and whether there was one."""
    begun = len(text) - len(text.lstrip())
    found = [place for place in (text.find(stop, begun) for stop in stops) if place >= 0]
    return (text[: min(found)], True) if found else (text, False)
