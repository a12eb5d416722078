"""The compose file, read and not run: what it starts is what the other tests start natively."""

import re
import subprocess
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests.integration import apache_kafka

REPOSITORY = Path(__file__).resolve().parent.parent
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
OURS = {name: service["command"] for name, service in SERVICES.items() if service["image"].startswith("failslow:")}
KAFKA_PROPERTIES = REPOSITORY / "deploy" / "kafka" / "server.properties"
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*")


def mounts(service: dict[str, Any]) -> dict[str, Path]:
    """Files and folders of this repository that a service sees, by their path inside of it."""
    bound = [volume.split(":") for volume in service.get("volumes", ()) if volume.startswith(".")]
    return {parts[1]: REPOSITORY / parts[0] for parts in bound}


def properties() -> dict[str, str]:
    lines = KAFKA_PROPERTIES.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def parse(words: list[str]) -> click.Context:
    """Parse a command line with the real command, without running it; a misspelt option raises."""
    (entry,) = metadata.entry_points(group="console_scripts", name=words[0])
    command: click.Command = entry.load()
    context = click.Context(command, info_name=words[0])
    rest = words[1:]
    while isinstance(command, click.Group):
        child = command.get_command(context, rest[0])
        assert child is not None, f"no command {rest[0]!r}"
        command, context, rest = child, click.Context(child, parent=context, info_name=rest[0]), rest[1:]
    return command.make_context(words[-1], list(rest), parent=context.parent)


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_is_pinned_to_one_version(name: str) -> None:
    assert PINNED.fullmatch(SERVICES[name]["image"])


def test_the_images_that_our_own_is_built_from_are_pinned() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.MULTILINE)
    assert bases
    assert all(PINNED.fullmatch(base) for base in bases)


def test_our_image_carries_the_version_of_the_distribution() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert {SERVICES[name]["image"] for name in OURS} == {f"failslow:{version}"}


def test_the_image_installs_with_the_uv_of_the_makefile_and_contains_every_package() -> None:
    (version,) = re.findall(r"^UV_VERSION := (\S+)$", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
    assert f"uv=={version}" in DOCKERFILE
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copied = {source for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.M) for source in line.split()[:-1]}
    assert {*packages, "pyproject.toml", "requirements.lock", "README.md", "LICENSE"} <= copied
    assert all((REPOSITORY / source).exists() for source in copied)


def test_the_image_does_not_run_as_root() -> None:
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, flags=re.MULTILINE)[-1] == "failslow"


@pytest.mark.parametrize("name", SERVICES)
def test_every_mounted_file_exists(name: str) -> None:
    assert [path for path in mounts(SERVICES[name]).values() if not path.exists()] == []


@pytest.mark.parametrize("name", SERVICES)
def test_a_port_is_reachable_from_this_computer_alone(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", ()))


def test_no_two_services_publish_the_same_port() -> None:
    published = [port.split(":")[1] for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(published) == len(set(published))


def test_our_services_are_topic_declaration_worker_and_agents() -> None:
    assert {name: tuple(words[:2]) for name, words in OURS.items()} == {
        "init": ("failslow", "init"),
        "worker": ("failslow", "run"),
        "agents": ("failslow-agent", "run"),
    }


@pytest.mark.parametrize("name", OURS)
def test_a_command_line_is_understood_by_the_real_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert parse(OURS[name]).params["bootstrap"] == "kafka:19092"


def test_a_misspelt_option_would_be_noticed() -> None:
    with pytest.raises(click.UsageError):
        parse([*OURS["worker"], "--metrics-prot", "9464"])


def test_topics_are_declared_before_a_worker_starts_and_only_once_the_broker_answers() -> None:
    assert SERVICES["init"]["depends_on"]["kafka"]["condition"] == "service_healthy"
    assert "healthcheck" in SERVICES["kafka"]
    assert SERVICES["worker"]["depends_on"]["init"]["condition"] == "service_completed_successfully"


def test_the_broker_advertises_what_the_services_and_this_computer_connect_to() -> None:
    advertised = dict(item.split("://") for item in properties()["advertised.listeners"].split(","))
    listening = dict(item.split("://") for item in properties()["listeners"].split(","))
    assert advertised == {"INSIDE": "kafka:19092", "OUTSIDE": "localhost:9092"}
    assert SERVICES["kafka"]["ports"] == ["127.0.0.1:9092:9092"]
    assert {name: address.split(":")[1] for name, address in listening.items() if name in advertised} == {
        name: address.split(":")[1] for name, address in advertised.items()
    }
    assert mounts(SERVICES["kafka"])["/mnt/shared/config/server.properties"] == KAFKA_PROPERTIES


def test_the_broker_keeps_its_log_in_the_volume_and_creates_no_topic_by_itself() -> None:
    assert any(volume.split(":")[1] == properties()["log.dirs"] for volume in SERVICES["kafka"]["volumes"])
    assert properties()["auto.create.topics.enable"] == "false"


def test_prometheus_scrapes_the_port_that_the_worker_serves() -> None:
    configured = mounts(SERVICES["prometheus"])["/etc/prometheus/prometheus.yml"]
    (scrape,) = yaml.safe_load(configured.read_text())["scrape_configs"]
    port = parse(OURS["worker"]).params["metrics_port"]
    assert scrape["static_configs"] == [{"targets": [f"worker:{port}"]}]
    assert SERVICES["worker"]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_grafana_finds_prometheus_and_the_dashboard_where_they_are() -> None:
    inside = mounts(SERVICES["grafana"])
    provisioning = inside["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "failslow.yml").read_text())["providers"]
    assert (inside[provider["options"]["path"]] / "failslow.json").is_file()
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])


def test_prometheus_itself_accepts_its_configuration(debian_tool: Callable[[str], str]) -> None:
    check = subprocess.run(
        [debian_tool("promtool"), "check", "config", "deploy/prometheus.yml"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr


def test_prometheus_is_of_the_major_version_that_the_tests_start(debian_tool: Callable[[str], str]) -> None:
    said = subprocess.run([debian_tool("prometheus"), "--version"], capture_output=True, text=True, check=True)
    native = re.search(r"version (\d+)\.", said.stdout + said.stderr)
    image = re.search(r":v(\d+)\.", SERVICES["prometheus"]["image"])
    assert native
    assert image
    assert native.group(1) == image.group(1)


def test_the_broker_is_the_version_that_the_tests_start() -> None:
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{apache_kafka.VERSION}"


def test_the_tests_start_the_broker_with_the_deployed_configuration() -> None:
    assert apache_kafka.DEPLOYED.resolve() == KAFKA_PROPERTIES
