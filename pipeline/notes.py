"""What the judge says of its reasoning while it judges: to nobody, unless somebody asks for an explanation.

Every place that weighs something tells it here in one line. Nothing comes back, so that no note can change a decision;
`Notes` does nothing and costs a call, `pipeline.weighing` makes hypotheses of what it is told.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from schemas.alerts import Alert, ComponentName
from schemas.table import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from detectors.verify import Shift
    from pipeline.changes import Change
    from pipeline.claims import Claims
    from pipeline.excess import Excess
    from pipeline.history import History
    from pipeline.incident import Incident
    from pipeline.ranks import RankSearch
    from pipeline.suspect import Span, Suspect
    from pipeline.telemetry import Telemetry


class Notes:
    """Takes none. Frame numbers are those of the history; times are seconds."""

    def frame(self, history: "History", /) -> None:
        """Begin the latest frame."""

    def compared(self, found: "Shift", onset: int, /, *, evidence: float | None = None) -> None:
        """Note that times since `onset` were compared with those before, maybe since so much evidence has added up."""

    def explained(self, change: "Change", grown_s: float, /) -> None:
        """Note that open incidents grew by `grown_s` where a change was confirmed."""

    def look(self, span: "Span", least_excess_s: float, /) -> None:
        """Begin to look for components that add so much to an iteration."""

    def ranks(self, search: "RankSearch", compute: "Excess", host: "Excess", found: "list[Suspect]", /) -> None:
        """Note that ranks were compared with their peers."""

    def links(
        self,
        suspect: "Suspect | None",
        scores: Mapping[ComponentName, tuple[float, bytes]],
        log_ratio: FloatArray,
        slow: BoolArray,
        told: BoolArray,
        predicted: Mapping[ComponentName, IntArray],
        /,
    ) -> None:
        """Note how likely each link makes the ratios of transfer times, (n_series,); unclear ones are not `told`."""

    def telemetry(self, read: "Telemetry", span: "Span", found: "list[Suspect]", /) -> None:
        """Note that only samples of clocks and hosts were there to go by."""

    def found(self, suspects: "list[Suspect]", claimed: "Claims", /) -> None:
        """End the look; what open incidents have claimed is accused no further."""

    def absorbed(self, suspect: "Suspect", effect_s: float, least_s: float, /) -> None:
        """Note that a suspect outlasts all others by `effect_s` only, of `least_s` at least."""

    def waiting(self, suspects: "list[Suspect]", deadline: int, /) -> None:
        """Note that somebody is looked for until the frame `deadline`, since what was found is not clear yet."""

    def passing(self, change: "Change", /) -> None:
        """Note that a slowdown without a culprit was over too soon to be one."""

    def balanced(self, what: str, ratio: float, least_ratio: float, excess_s: float, /) -> None:
        """Note how balanced the job's own work was: of a stage, or of the ranks in turns."""

    def accused(self, suspect: "Suspect", reference_s: float, accused_slowdown: float, /) -> None:
        """Note that an incident is opened, unless it stands already."""

    def follow(self, incidents: "Iterable[Incident]", /) -> None:
        """Note that open incidents are about to be asked whether they last."""

    def told(self, alert: Alert, /) -> None:
        """Note that an incident was told of again, or resolved."""

    def judged(self) -> None:
        """End the frame: what was weighed in it stands."""


NO_NOTES = Notes()
