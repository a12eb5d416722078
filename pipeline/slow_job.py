"""A job that is slower as a whole: what is said where nothing in particular can be accused."""

from pipeline.suspect import Suspect
from pipeline.watch import JobWatch
from schemas.alerts import Component, ComponentName, ComponentType, Evidence, Kind


def whole_job() -> Component:
    """Return the component of an incident that accuses nothing in particular."""
    name = ComponentName(type=ComponentType.JOB)
    return Component(type=ComponentType.JOB, name=name, candidates=(name,))


def slow_job(reference_s: float, gained_s: float, z: float) -> Suspect:
    """Return the job, slower by `gained_s` than `reference_s`."""
    after_s = reference_s + gained_s
    slower = Evidence(what="iteration time", value=after_s, unit="s", reference=reference_s, source="host_call")
    return Suspect(
        kind=Kind.SLOW_JOB,
        component=whole_job(),
        excess_s=gained_s,
        z=z,
        watch=JobWatch(reference_s),
        sources=("host_call",),
        evidence=(slower,),
    )
