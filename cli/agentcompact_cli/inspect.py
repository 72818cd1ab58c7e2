"""`agentcompact inspect`: what a cache file holds, without its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentcompact_cli.console import out, print_json, size
from agentcompact_cli.options import output_options

if TYPE_CHECKING:
    from torch import Tensor

    from agentcompact.cache.file_checks import LayerHeader

STRIP = 48
SHADES = " ▁▂▃▄▅▆▇█"


@click.command(name="inspect")
@click.argument("cache_file", type=click.Path(path_type=Path))
@output_options
def command(cache_file: Path, quiet: bool, as_json: bool) -> None:
    """Show the model, strategy and settings, tokens, entries, bytes and ratio of CACHE_FILE, and a picture per layer.

    \b
    Example:
      agentcompact inspect book.kv
      agentcompact inspect book.kv --json
    """
    from agentcompact.cache.file import read_verified

    header, tensors = read_verified(cache_file)
    layers = [_layer_facts(index, facts, tensors) for index, facts in enumerate(header.layers)]
    entries = sum(layer["entries"] + layer["live_entries"] for layer in layers)
    facts: dict[str, Any] = {
        "file": str(cache_file),
        "file_bytes": cache_file.stat().st_size,
        "version": header.version,
        "tokens": header.tokens,
        "entries": entries,
        "entry_bytes": sum(t.nbytes for name, t in tensors.items() if name.startswith("layers.")),
        "dtype": next(
            (str(t.dtype).removeprefix("torch.") for name, t in tensors.items() if name.endswith("keys")),
            "none",
        ),
        **header.metadata.model_dump(mode="json"),
        "layers": layers,
    }
    if as_json:
        print_json(facts)
        return
    _print_facts(facts)
    if not quiet:
        _print_picture(facts, tensors)


def _layer_facts(index: int, facts: LayerHeader, tensors: dict[str, Tensor]) -> dict[str, Any]:
    offsets = tensors.get(f"layers.{index}.offsets")
    tail = tensors.get(f"layers.{index}.tail_keys")
    bias = tensors.get(f"layers.{index}.bias")
    return {
        "layer": index,
        "sliding": facts.sliding,
        "entries_per_head": offsets.diff().tolist() if offsets is not None else [],
        "entries": int(offsets[-1]) if offsets is not None else 0,
        "live_entries": int(tail.shape[1] * tail.shape[2]) if tail is not None else 0,
        "bias_min": float(bias.min()) if bias is not None and bias.numel() else 0.0,
        "bias_mean": float(bias.mean()) if bias is not None and bias.numel() else 0.0,
        "bias_max": float(bias.max()) if bias is not None and bias.numel() else 0.0,
    }


def _print_facts(facts: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row(
        "file", f"{escape(facts['file'])}  {size(facts['file_bytes'])}, version {facts['version']}, {facts['dtype']}"
    )
    table.add_row("document", f"{escape(facts['document']) or '-'}  sha256 {facts['document_sha256'][:16] or '-'}")
    table.add_row(
        "model",
        f"{escape(facts['model_source'])} ({facts['model_type']}, {facts['model_fingerprint'][:12]})",
    )
    table.add_row("prompt", facts["prompt"]["kind"])
    table.add_row("created", f"{facts['created'] or '-'} by agentcompact {facts['library_version'] or '-'}")
    table.add_row("tokens", f"{facts['tokens']:,}")
    table.add_row("entries", f"{facts['entries']:,} in {size(facts['entry_bytes'])}")
    for report in facts["reports"]:
        shrunk = report["entries_before"] / max(1, report["entries_after"])
        settings = ", ".join(f"{k}={v}" for k, v in report["settings"].items()) or "none"
        table.add_row(
            "compaction",
            f"{escape(report['strategy'])}, budget {report['budget']:,}: {report['entries_before']:,} -> "
            f"{report['entries_after']:,} entries ({shrunk:.1f}x) in {report['seconds'].get('total', 0):.1f} s",
        )
        table.add_row("", escape(f"settings: {settings}; seed {report['seed']}"), style="dim")
        for warning in report["warnings"]:
            table.add_row("", escape(f"warning: {warning}"))
    out.print(table)


def _print_picture(facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """A strip per layer: where in the document its entries lie, and how many each head has."""
    from rich.table import Table

    table = Table(
        box=None,
        padding=(0, 1),
        title="entries of each layer over the document, first token to last",
        title_justify="left",
    )
    table.add_column("layer", justify="right", style="bold")
    table.add_column("kept", no_wrap=True)
    table.add_column("a head", justify="right")
    table.add_column("bias min/mean/max", justify="right")
    strips = [_counts(tensors.get(f"layers.{layer['layer']}.positions"), facts["tokens"]) for layer in facts["layers"]]
    most = max((max(strip) for strip in strips if strip), default=0)
    for layer, strip in zip(facts["layers"], strips, strict=True):
        heads = layer["entries_per_head"]
        if not strip:
            kept = "window only" if layer["sliding"] else "live"
            table.add_row(str(layer["layer"]), f"[dim]{kept}, {layer['live_entries']:,} entries[/]", "", "")
            continue
        picture = "".join(SHADES[-(-count * (len(SHADES) - 1) // max(1, most))] for count in strip)
        span = f"{min(heads):,}" if min(heads) == max(heads) else f"{min(heads):,}-{max(heads):,}"
        bias = f"{layer['bias_min']:.2f} {layer['bias_mean']:.2f} {layer['bias_max']:.2f}"
        table.add_row(str(layer["layer"]), f"[cyan]{picture}[/]", span, bias)
    out.print(table)


def _counts(positions: Tensor | None, tokens: int) -> list[int]:
    """Entries of a layer in each of `STRIP` equal parts of the document."""
    if positions is None or not positions.numel():
        return []
    counts: list[int] = (
        positions.long()
        .mul(STRIP)
        .div(max(1, tokens), rounding_mode="floor")
        .clamp(0, STRIP - 1)
        .bincount(minlength=STRIP)
        .tolist()
    )
    return counts
