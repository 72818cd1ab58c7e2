"""Decoding a reply behind a conversation: streamed, stopped by strings or by hand, and held as it was generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentcompact.cache import CompactedCache
from agentcompact.engines import Engine, TokenConstraint
from agentcompact.engines.text_stream import TextStream
from agentcompact.session.messages import Message
from agentcompact.settings import SamplingSettings

OnText = Callable[[str], None]
"""Called with each new piece of a reply's text."""


@dataclass(frozen=True)
class DecodedReply:
    """A reply. token_ids: its tokens as they are held; None where its text ends inside a token, and none are held.

    decoded: tokens that were decoded for it.
    """

    message: Message
    token_ids: list[int] | None
    finish_reason: str
    decoded: int


def decode_reply(
    engine: Engine,
    cache: CompactedCache,
    begin_ids: Sequence[int],
    sampling: SamplingSettings,
    on_text: OnText | None = None,
    read_message: Callable[[str], Message] | None = None,
    *,
    constraint: TokenConstraint | None = None,
    keeps_partial: bool = True,
) -> DecodedReply:
    """Decode a reply behind a cache, which then holds it and `begin_ids`, what the template writes to begin it.

    on_text: gets the text as it comes. read_message: makes the message of the whole text. constraint: what the tokens
    keep to. keeps_partial: whether an interrupt behind the first token ends the reply there. After any other error, of
    a callback too, the cache is as it was.
    """
    start, prompt = cache.next_position, list(begin_ids)
    if not prompt:  # a template that begins no reply: its last token is read once more for its logits
        prompt = [cache.token_ids[-1]]
        cache.truncate(start - 1)
    stream, ids = TextStream(engine.decode_text, sampling.stop), list[int]()

    def on_token(_: int, token: int) -> None:
        ids.append(token)
        piece = stream.add(token)
        if piece and on_text is not None:
            on_text(piece)

    windows = cache.windows()
    try:
        text, reason = _decoded(engine, cache, prompt, sampling, on_token, ids, constraint, keeps_partial)
        rest = stream.finish(text)
        if rest and on_text is not None:
            on_text(rest)
        text = text.strip()
        message = Message(role="assistant", content=text) if read_message is None else read_message(text)
    except BaseException:  # a reply that nobody takes note of is not held either
        cache.restore_windows(windows)
        cache.roll_back(start)
        cache.reserve(0)
        if cache.next_position < start:
            engine.prefill(prompt, cache)
        raise
    kept = _without_stop(engine, ids, text) if reason == "stop" else len(ids)
    held = 0 if kept is None else len(begin_ids) + kept
    cache.truncate(min(cache.next_position, start + held))
    return DecodedReply(message, None if kept is None else ids[:kept], reason, len(ids))


def _decoded(
    engine: Engine,
    cache: CompactedCache,
    prompt: Sequence[int],
    sampling: SamplingSettings,
    on_token: Callable[[int, int], None],
    ids: list[int],
    constraint: TokenConstraint | None,
    keeps_partial: bool,
) -> tuple[str, str]:
    """Return text and finish reason, the tokens in `ids`; those so far where it is interrupted."""
    try:
        (made,) = engine.decode(cache, [prompt], sampling, on_token, constraint)
    except KeyboardInterrupt:
        if not ids or not keeps_partial:
            raise
        return engine.decode_text(ids), "interrupted"
    ids[:] = made.token_ids
    return made.text, made.finish_reason


def _without_stop(engine: Engine, ids: Sequence[int], text: str) -> int | None:
    """Return how many tokens make up the text before a stop string; None where it ends inside a token."""
    for count in range(len(ids), -1, -1):
        if engine.decode_text(ids[:count]).strip() == text:
            return count
    return None
