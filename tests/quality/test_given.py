"""What the judge is given is kept for as long as the code that made it stays."""

from pathlib import Path

import pytest

from benchmarks.quality import given as module
from benchmarks.quality.corpus import Episode
from benchmarks.quality.given import given
from benchmarks.quality.trial import judged, outcome
from pipeline.observer import Counting
from pipeline.record import Record
from tests.pipeline.simulation import alerts_of

EPISODE = Episode("host_step", 4)


def test_what_is_kept_is_read_again_as_it_was_and_made_anew_when_the_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = given(EPISODE, tmp_path)
    (kept,) = tmp_path.glob("given-*/*.zst")
    with monkeypatch.context() as patched:
        patched.setattr(module, "_made", lambda _: pytest.fail("what is kept is not to be made again"))
        assert given(EPISODE, tmp_path) == made
        assert outcome(EPISODE, folder=tmp_path) == judged(made)
    kept.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(module, "_FILES", (*module._FILES, "pyproject.toml"))
    module._digest.cache_clear()
    given(EPISODE, tmp_path)
    (other,) = tmp_path.glob("given-*/*.zst")
    module._digest.cache_clear()
    assert other.parent != kept.parent


def test_the_code_that_is_looked_at_includes_the_window_and_the_simulator_and_not_the_judge() -> None:
    names = {path.relative_to(module._ROOT).as_posix() for path in module.sources()}
    assert {"pipeline/window_held.py", "detectors/period.py", "agents/simulated/physics.py", "schemas/codec.py"} < names
    assert not {"pipeline/judge.py", "detectors/bocpd.py", "pipeline/hypotheses.py"} & names


def test_both_stages_one_after_the_other_say_what_they_say_together() -> None:
    scenario = EPISODE.draw()[1]
    counting = Counting()
    together = alerts_of(module.records(scenario), counting)
    heard: list[Record] = []
    found = outcome(EPISODE, listener=heard.append)
    first = {alert.fingerprint: alert for alert in reversed(together)}
    assert sorted(one.onset for one in found.openings) == sorted(alert.onset_iteration for alert in first.values())
    assert len({a.fingerprint for a in together}) == len(found.openings) > 0
    assert found.unseen == {name: counting.counts[name] for name in module.NOT_SEEN if name in counting.counts}
