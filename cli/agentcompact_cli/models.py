"""`agentcompact models`: what is at hand, and how to name others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from agentcompact_cli.console import out, print_json, size
from agentcompact_cli.options import output_options

FORMS = {
    "smollm2": "the embedded model, SmolLM2-135M-Instruct; fetched and converted when it is first used",
    "FOLDER": "a folder as transformers saves it: config.json, safetensors, tokenizer",
    "FILE.gguf": "a GGUF file; converted once into the cache folder below",
    "OWNER/NAME": "a model on the Hugging Face hub",
}


@click.command(name="models")
@output_options
def command(quiet: bool, as_json: bool) -> None:
    """List the models that can be used without a download, and the forms of --model.

    \b
    Example:
      agentcompact models
      agentcompact models --json
    """
    from agentcompact.models import cache_root

    found = [*_converted(), *_from_hub()]
    if as_json:
        print_json({"cache_folder": str(cache_root()), "forms": FORMS, "models": found})
    elif quiet:
        for model in found:
            click.echo(model["name"])
    else:
        _print(found, cache_root())


def _converted() -> list[dict[str, Any]]:
    """The embedded model and other converted GGUF files."""
    from agentcompact.models.cache_dir import models_dir
    from agentcompact.models.embedded import EMBEDDED_FILE, EMBEDDED_SHA256
    from agentcompact.models.gguf import converted_folder, is_converted

    embedded = converted_folder(Path(EMBEDDED_FILE).stem, EMBEDDED_SHA256)
    ready = is_converted(embedded)
    models = [
        {
            "name": "smollm2",
            "kind": "embedded",
            "state": "ready" if ready else "will be fetched (98 MB) and converted when it is first used",
            "path": str(embedded) if ready else None,
            "bytes": _folder_bytes(embedded) if ready else None,
        }
    ]
    folders = sorted(models_dir().glob("*/config.json")) if models_dir().is_dir() else []
    models += [
        {
            "name": str(config.parent),
            "kind": "converted",
            "state": "ready",
            "path": str(config.parent),
            "bytes": _folder_bytes(config.parent),
        }
        for config in folders
        if config.parent != embedded and is_converted(config.parent)
    ]
    return models


def _from_hub() -> list[dict[str, Any]]:
    """Models that the hub's own cache holds."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, OSError, ValueError):  # none, unreadable, or a file where the folder should be
        return []
    return [
        {
            "name": repo.repo_id,
            "kind": "hub",
            "state": "downloaded",
            "path": str(repo.repo_path),
            "bytes": repo.size_on_disk,
        }
        for repo in sorted(repos, key=lambda repo: repo.repo_id)
        if repo.repo_type == "model"
    ]


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _print(found: list[dict[str, Any]], cache_folder: Path) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column()
    table.add_column(justify="right")
    for model in found:
        table.add_row(escape(model["name"]), model["state"], size(model["bytes"]) if model["bytes"] else "")
    out.print(table)
    out.print("\n--model takes:", style="bold")
    forms = Table(box=None, padding=(0, 2), show_header=False)
    forms.add_column(style="cyan", no_wrap=True)
    forms.add_column(overflow="fold")
    for form, meaning in FORMS.items():
        forms.add_row(form, meaning)
    out.print(forms)
    click.echo(f"\nConverted models lie in {cache_folder} (AGENTCOMPACT_CACHE_DIR changes that).")
