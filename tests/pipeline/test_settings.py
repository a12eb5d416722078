"""Settings: the documented example is the defaults, and a mistake is named."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

import agents.config
from agents.config import AgentConfig
from pipeline.settings import (
    Driver,
    InvalidSettings,
    LogLevel,
    Settings,
    Stage,
    from_argument,
    load,
    override,
    to_argument,
)
from schemas.topics import EVENTS, ITERATIONS


def test_the_example_shows_every_field_with_its_default(repository: Path) -> None:
    example = repository / "failslow.toml"
    assert load(example) == Settings()
    assert list(tomllib.loads(example.read_text())["run"]) == [field.name for field in msgspec.structs.fields(Settings)]


def test_the_example_shows_every_field_of_the_agent_too(repository: Path) -> None:
    example = repository / "failslow.toml"
    assert agents.config.load(example) == AgentConfig()
    shown = tomllib.loads(example.read_text())["agent"]
    assert list(shown) == [field.name for field in msgspec.structs.fields(AgentConfig)]
    for name in ("nccl", "identity", "markers"):
        fields = msgspec.structs.fields(getattr(AgentConfig(), name))
        assert list(shown[name]) == [field.name for field in fields]


def test_every_field_of_the_example_is_explained(repository: Path) -> None:
    lines = (repository / "failslow.toml").read_text().splitlines()
    shared = {"metrics_port"}  # explained together with the line above
    for number, line in enumerate(lines):
        field = re.match(r"(\w+) =", line)
        if field and field.group(1) not in shared:
            assert lines[number - 1].startswith("# "), line


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('[run]\nbotstrap = "x:1"', "botstrap"),
        ('[run]\nstage = "judging"', "judging"),
        ("[run]\nwarmup_s = -1", "warmup_s"),
        ("[run]\nsession_timeout_s = 5", "session_timeout_s"),
        ("[run]\ncommit_interval_s = 0", "commit_interval_s"),
        ("[run]\nmetrics_port = 65536", "metrics_port"),
        ('[run]\nbootstrap = ""', "bootstrap"),
        ('[run]\nconsumer_group = ""', "consumer_group"),
        ("[run]\nwarmup_s =", "settings.toml"),
        ("[ran]\n", "ran"),
    ],
)
def test_a_mistake_is_named(content: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(content)
    with pytest.raises(InvalidSettings, match=named):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match=r"none\.toml: No such file"):
        load(tmp_path / "none.toml")


def test_options_win_and_what_is_not_given_stays() -> None:
    changed = override(Settings(warmup_s=7.0), stage="judge", driver=None, metrics_port=0)
    assert changed == Settings(warmup_s=7.0, stage=Stage.JUDGE, metrics_port=0)
    with pytest.raises(InvalidSettings, match="metrics_port"):
        override(Settings(), metrics_port=-1)


def test_settings_survive_the_way_to_another_process() -> None:
    settings = Settings(driver=Driver.PLAIN, log_level=LogLevel.DEBUG, state_dir="a b/ü", warmup_s=0.25)
    assert from_argument(to_argument(settings)) == settings
    with pytest.raises(InvalidSettings):
        from_argument("{")


def test_a_stage_consumes_its_topics() -> None:
    assert Stage.WINDOW.topics == (EVENTS,)
    assert Stage.JUDGE.topics == (ITERATIONS,)
    assert Stage.BOTH.topics == (EVENTS, ITERATIONS)


def test_state_is_kept_where_the_desktop_standard_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert Settings().state_folder == tmp_path / "failslow"
    assert Settings(state_dir="elsewhere").state_folder == Path("elsewhere")
