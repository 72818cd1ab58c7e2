"""How a writer is trained."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from agentcompact.writers import WriterSettings


class TrainingSettings(BaseModel):
    """One training run; the defaults are the paper's (appendix A, table 2) where it has them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    writer: WriterSettings = Field(default_factory=WriterSettings)
    updates: int = Field(3000, ge=1, description="updates of the loss on continuations")
    attention_updates: int = Field(
        0, ge=0, description="updates before those on the attention outputs of each layer alone, several times cheaper"
    )
    attention_weight: float = Field(
        0.0, ge=0, description="what the error of attention outputs counts beside the loss on continuations"
    )
    accumulate: int = Field(8, ge=1, description="examples of one update")
    attention_accumulate: int = Field(1, ge=1, description="examples of one update on attention outputs")
    learning_rate: float = Field(3e-4, gt=0)
    attention_learning_rate: float = Field(3e-3, gt=0)
    warmup: int = Field(100, ge=0, description="updates over which the learning rate rises")
    floor: float = Field(0.1, ge=0, le=1, description="the cosine's last learning rate, as a fraction of the highest")
    clip: float = Field(1.0, gt=0, description="largest norm of an update's gradient")
    cue: int = Field(64, ge=1, description="tokens read before the continuation")
    continuation: int = Field(128, ge=1, description="tokens that the loss is taken over")
    cues: int = Field(4, ge=1, description="different cues of each window of a document")
    windows: int = Field(2, ge=1, description="windows of each document at most")
    most_windows: int = Field(0, ge=0, description="windows to train on at most, of all documents; 0 for no limit")
    beyond: int = Field(512, ge=0, description="tokens behind the context that cues are also taken from, at most")
    applications: int = Field(1, ge=1, description="times that the writer is applied before the loss, chunk by chunk")
    held_out: float = Field(0.1, gt=0, lt=1, description="fraction of the documents that are kept for measuring")
    held_out_examples: int = Field(16, ge=1, description="examples of the held-out loss")
    measure_every: int = Field(50, ge=1, description="updates between measurements of the held-out loss")
    checkpoint_every: int = Field(10, ge=1, description="updates between checkpoints")
    seed: int = 0

    @property
    def context(self) -> int:
        """Tokens of the context: each application after the first reads what was written and new entries."""
        return self.writer.context + (self.applications - 1) * (self.writer.context - self.writer.latents)

    @property
    def reads_attention(self) -> bool:
        """Whether some loss is on attention outputs."""
        return self.attention_updates > 0 or self.attention_weight > 0

    @property
    def total(self) -> int:
        return self.attention_updates + self.updates
