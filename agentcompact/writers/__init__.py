"""Writers: small trained networks that write a compacted cache in one forward pass."""

from agentcompact.writers.fast_diamond import FastDiamond
from agentcompact.writers.file import WriterRecord, load_writer, read_record, save_writer
from agentcompact.writers.settings import WriterSettings
from agentcompact.writers.shipped import shipped_writer
from agentcompact.writers.writing import plan_chunks, write_span

__all__ = [
    "FastDiamond",
    "WriterRecord",
    "WriterSettings",
    "load_writer",
    "plan_chunks",
    "read_record",
    "save_writer",
    "shipped_writer",
    "write_span",
]
