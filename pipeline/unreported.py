"""What could not be judged is said: an incident names the number of ranks of which nobody reports anything."""

from msgspec.structs import replace

from schemas.alerts import Alert, Evidence, Kind, Severity


def with_unreported(alert: Alert, n_ranks: int) -> Alert:
    """Return the alert with the number of ranks that no agent reports, as of now: of those it can say nothing.

    Information about the job has no evidence and is left as it is.
    """
    if n_ranks == 0 or (alert.kind is Kind.SLOW_JOB and alert.severity is Severity.INFO):
        return alert
    unknown = Evidence(what="ranks that no agent reports: unknown", value=float(n_ranks), unit="count")
    return replace(alert, evidence=(*alert.evidence, unknown))
