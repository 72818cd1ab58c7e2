"""Reading a history step by step, so that it is compacted where it would have been, had it been said live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentcompact.session.messages import Message


@dataclass(frozen=True)
class Step:
    """Read the first `count` messages; quiet: without a look at the trigger, as a reply that is written is not."""

    count: int
    quiet: bool = False


def next_step(
    messages: Sequence[Message], common: int, tokens: Sequence[int], is_due: Callable[[int, int], bool]
) -> Step:
    """Return what to read next of a conversation whose first `common` messages are held.

    tokens: of each message behind those. is_due: whether so many pending tokens, of the first so many messages, would
    trigger a compaction. All is one step where nothing triggers; else the messages up to the last reply before the one
    that triggers come first, so that they can be compacted, and its turn is the step after.
    """
    pending = 0
    for count in range(common + 1, len(messages) + 1):
        pending += tokens[count - common - 1]
        replies_next = count == len(messages) or messages[count].role == "assistant"
        if not replies_next or not is_due(pending, count):
            continue
        spoken = [index for index in range(common, count) if messages[index].role == "assistant"]
        return Step(spoken[-1] + 1, quiet=True) if spoken else Step(count)
    return Step(len(messages))
