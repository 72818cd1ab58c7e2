"""`agentcompact strategies`: what there is, with settings and defaults."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import click

from agentcompact_cli.console import out, print_json
from agentcompact_cli.options import output_options


@click.command(name="strategies")
@click.argument("name", required=False)
@output_options
def command(name: str | None, quiet: bool, as_json: bool) -> None:
    """List all strategies, or NAME alone, with what each does, its settings and their defaults.

    \b
    Example:
      agentcompact strategies
      agentcompact strategies two_pass --json
    """
    from agentcompact.strategies import strategy_class, strategy_names

    found = [strategy_class(each) for each in ([name] if name else strategy_names())]
    facts = [
        {
            "name": each.name,
            "summary": each.summary,
            "needs": sorted(each.needs),
            "settings": [
                {
                    "name": key,
                    "default": field.get_default(),
                    "choices": list(get_args(field.annotation)) if get_origin(field.annotation) is Literal else None,
                    "description": field.description or "",
                }
                for key, field in each.settings_type.model_fields.items()
            ],
        }
        for each in found
    ]
    if as_json:
        print_json(facts)
    elif quiet:
        for each in facts:
            click.echo(each["name"])
    else:
        _print(facts)


def _print(facts: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    for each in facts:
        out.print(f"[bold]{each['name']}[/]  {escape(each['summary'])}")
        table = Table(box=None, padding=(0, 2), show_header=False)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold", style="dim")
        for setting in each["settings"]:
            others = [choice for choice in setting["choices"] or [] if choice != setting["default"]]
            also = f" (or {', '.join(others)})" if others else ""
            table.add_row(f"  {setting['name']}={setting['default']}", escape(setting["description"] + also))
        if each["settings"]:
            out.print(table)
    out.print("\nChange a setting with --set NAME=VALUE.", style="dim")
