"""What a writer is: its architecture, its sizes, what its parts share, and how it begins."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Sharing = Literal["global", "layer", "head", "layer_head"]


class WriterSettings(BaseModel):
    """A writer's architecture; fixed when its training begins, and kept in its file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: Literal["fast_diamond"] = Field("fast_diamond", description="the writer's kind")
    context: int = Field(1024, ge=2, description="entries that one application reads, as trained")
    latents: int = Field(128, ge=1, description="entries that one application writes")
    share_latents: Sharing = Field(
        "layer_head", description="what one set of latents serves: all (global), a layer, a head number, or one head"
    )
    share_projections: Sharing = Field("layer_head", description="the same for W_K, W_V and W_O")
    initialisation: Literal["anchored", "identity", "kvid"] = Field(
        "anchored",
        description="W_V and W_O begin as the identity; latents and W_K as block-diagonal identity (identity), the "
        "same with the first latent on the contexts' first entry, the attention sink (anchored), or at random (kvid)",
    )
    rope_base: float = Field(10.0, gt=1, description="base of the rotary embedding inside the writer")
    rope_unit: Literal["latent", "entry"] = Field(
        "latent", description="what counts as a distance of 1 there: from one latent to the next, or between entries"
    )
    positions: Literal["spread", "packed"] = Field(
        "spread", description="where the written keys are rotated to: evenly over the span, or its first positions"
    )
    weights: Literal["trained", "none", "conserved"] = Field(
        "trained",
        description="the bias of written entries: trained for each latent, on top of the mean weight of what is read; "
        "0; or the logarithm of how many entries each stands for",
    )
