"""The Grafana dashboard, read and not shown: whole, in PromQL, and without two panels in one place."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from pipeline.metrics import Metrics
from tests import dashboard

GRID_COLUMNS = 24


def test_it_shows_jobs_slowdown_per_gpu_incidents_and_the_pipeline_itself() -> None:
    rows = [panel["title"] for panel in dashboard.load()["panels"] if panel["type"] == "row"]
    assert rows == ["Jobs", "Slowdown per GPU", "Incidents", "Pipeline"]


def test_every_panel_asks_for_something_and_explains_itself() -> None:
    panels = [panel for panel in dashboard.load()["panels"] if panel["type"] != "row"]
    assert panels
    assert [panel["title"] for panel in panels if not panel["targets"] or not panel["description"]] == []
    assert [panel["title"] for panel in panels if "unit" not in panel["fieldConfig"]["defaults"]] == []


def test_every_panel_asks_the_provisioned_source() -> None:
    provisioned = Path(dashboard.PATH).parent.parent / "provisioning" / "datasources" / "prometheus.yml"
    (source,) = yaml.safe_load(provisioned.read_text())["datasources"]
    asked = {
        target["datasource"]["uid"] for panel in dashboard.load()["panels"] for target in panel.get("targets", ())
    } | {variable["datasource"]["uid"] for variable in dashboard.load()["templating"]["list"]}
    assert asked == {source["uid"]}


def test_no_two_panels_share_a_place_or_an_id() -> None:
    panels = dashboard.load()["panels"]
    cells: list[tuple[int, int]] = []
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID_COLUMNS
        cells += [
            (column, line)
            for column in range(place["x"], place["x"] + place["w"])
            for line in range(place["y"], place["y"] + place["h"])
        ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_no_query_uses_a_variable_that_is_not_declared() -> None:
    declared = {variable["name"] for variable in dashboard.load()["templating"]["list"]}
    used = {
        name
        for panel in dashboard.load()["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"\$\{?(\w+)", target["expr"])
    }
    assert used == declared


def test_prometheus_itself_accepts_every_query(debian_tool: Callable[[str], str], tmp_path: Path) -> None:
    rules = [{"record": f"query_{number}", "expr": query} for number, (_, query) in enumerate(dashboard.queries())]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    check = subprocess.run(
        [debian_tool("promtool"), "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr
    assert f"{len(rules)} rules found" in check.stdout


def test_only_metrics_that_a_worker_registers_are_asked_for() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    declared = set(registry._names_to_collectors)
    asked = dashboard.metrics()
    assert asked
    assert asked <= declared


def test_queries_and_legends_use_labels_that_their_metrics_have() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    labels_by_name = {
        name: set(metric._labelnames)
        for name, metric in registry._names_to_collectors.items()
        if isinstance(metric, MetricWrapperBase)
    }
    for panel in dashboard.load()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            known = set().union(*(labels_by_name[name] for name in dashboard.METRIC.findall(query)))
            grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
            matched = set(re.findall(r"(\w+)=~?", query))
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert grouped | matched | shown <= known, panel["title"]


def test_the_job_is_never_called_by_the_label_that_the_scrape_owns() -> None:
    for title, query in dashboard.queries():
        for labels in re.findall(r"\{([^}]*)\}", query):
            assert not re.search(r"\bjob\s*=", labels), title


@pytest.mark.parametrize("word", ["step", "iteration"])
def test_no_query_groups_by_an_iteration(word: str) -> None:
    assert [query for _, query in dashboard.queries() if re.search(rf"by \([^)]*\b{word}\b", query)] == []
