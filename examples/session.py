"""A conversation that compacts itself: python examples/session.py"""

from agentcompact import SamplingSettings, load_model
from agentcompact.session import Session

LINES = [
    "My boat is called Kittiwake and she lies in berth 14 at Orrin harbour. Please remember that.",
    "What is a lighthouse for?",
    "Why are harbours dredged?",
    "What do seagulls eat?",
    "What is the name of my boat?",
]

session = Session(
    load_model("smollm2"),
    window=400,
    trigger="70%",
    keep="messages:2",
    sampling=SamplingSettings(max_new_tokens=48),
    after_compaction=lambda report: print(f"  [held {report.held_before:.0f} -> {report.held_after:.0f}]"),
)
with session:
    for line in LINES:
        reply = session.send(line)
        print(f"> {line}\n{reply.text}\n  [{reply.prefilled} tokens read, {session.status().held:.0f} held]")
