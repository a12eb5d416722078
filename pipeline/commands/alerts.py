"""`failslow alerts`: what the pipeline says, read by people or by other programs."""

import contextlib

import click

from pipeline.commands.options import bootstrap_option, examples
from pipeline.commands.options import command as declare_command
from pipeline.subscription import Subscription
from pipeline.terminal import alert_line, stdout
from schemas.alerts import Alert
from schemas.codec import InvalidRecord, decode_alert
from schemas.topics import ALERTS


@declare_command(
    name="alerts",
    epilog=examples(
        "failslow alerts --bootstrap kafka:9092 --follow",
        "failslow alerts --bootstrap kafka:9092 --json | jq 'select(.state == \"firing\")'",
    ),
)
@bootstrap_option
@click.option("--follow", is_flag=True, help="Go on with alerts as they come; else end with the newest.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, as on the topic.")
def command(bootstrap: str, *, follow: bool, as_json: bool) -> None:
    """Show the alerts that a broker holds, each revision once, in the order of its partition."""
    with (
        contextlib.suppress(KeyboardInterrupt),  # how --follow ends
        Subscription(bootstrap, [ALERTS], from_beginning=True) as subscription,
    ):
        newest = NewestRevisions()
        console = stdout()
        while follow or not subscription.has_caught_up:
            for record in subscription.poll():
                try:
                    alert = decode_alert(record.value)
                except InvalidRecord as error:
                    click.echo(f"passed over offset {record.offset} of partition {record.partition}: {error}", err=True)
                    continue
                if not newest.is_new(alert):
                    continue
                if as_json:
                    click.echo(record.value)
                else:
                    console.print(alert_line(alert))


class NewestRevisions:
    """Tells a revision that was delivered again; remembers the incidents that spoke last, up to a bound."""

    def __init__(self, incidents_max: int = 100_000) -> None:
        self._incidents_max = incidents_max
        self._revision: dict[tuple[str, str], int] = {}

    def is_new(self, alert: Alert) -> bool:
        """Say whether this revision has not been seen, and note it."""
        key = (alert.job_id, alert.fingerprint)
        known = self._revision.pop(key, 0)
        self._revision[key] = max(known, alert.revision)
        if len(self._revision) > self._incidents_max:
            del self._revision[next(iter(self._revision))]
        return alert.revision > known
