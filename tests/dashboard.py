"""The dashboard as tests see it: its queries, and which metrics they ask for."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

PATH = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards" / "failslow.json"
METRIC = re.compile(r"\bfailslow_[a-z0-9_]+")


def load() -> dict[str, Any]:
    """Read the dashboard."""
    content: dict[str, Any] = msgspec.json.decode(PATH.read_bytes())
    return content


def queries() -> Iterator[tuple[str, str]]:
    """Title of the panel and PromQL of every query, with all jobs chosen."""
    for panel in load()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$job_id", ".*")


def variables() -> Iterator[tuple[str, str]]:
    """Metric and label that each variable takes its values from."""
    for variable in load()["templating"]["list"]:
        asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
        assert asked, variable["query"]
        yield asked.group(1), asked.group(2)


def metrics() -> set[str]:
    """Every metric that the dashboard asks for."""
    return {name for _, query in queries() for name in METRIC.findall(query)} | {metric for metric, _ in variables()}
