"""`failslow schema`: what consumers of alerts can rely on."""

import click

from schemas.published import alert_json_schema


@click.group(name="schema")
def command() -> None:
    """Print the published form of what goes over the wire."""


@command.command(name="alert")
def alert() -> None:
    """Print the JSON Schema of alerts, as in schemas/alert.schema.json."""
    click.echo(alert_json_schema(), nl=False)
