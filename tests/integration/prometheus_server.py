"""A real Prometheus for a test: on a free loopback port, with the deployed configuration, ended by its process."""

import re
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import yaml

STARTED_S_MAX = 30.0
ENDED_S_MAX = 10.0
POLL_S = 0.1
LISTENING = re.compile(r'msg="Listening on".* address=127\.0\.0\.1:(\d+)')


class PrometheusServer:
    """Prometheus with `deployed` as its configuration, but scraping 127.0.0.1:target_port, and more often.

    A context manager; data and log are in `folder`. Raises RuntimeError with the log where it does not start.
    """

    def __init__(self, program: str, deployed: Path, target_port: int, folder: Path) -> None:
        configuration = yaml.safe_load(deployed.read_text())
        configuration["global"]["scrape_interval"] = "500ms"  # and its time-out with it
        for scrape in configuration["scrape_configs"]:
            scrape["static_configs"] = [{"targets": [f"127.0.0.1:{target_port}"]}]
        configured = folder / "prometheus.yml"
        configured.write_text(yaml.safe_dump(configuration))
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={configured}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._port = 0

    def __enter__(self) -> Self:
        try:
            self._port = self._wait_for_port()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Evaluate one PromQL expression now: its series, each with `metric` (labels) and `value`."""
        answer = self._get("/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def label_values(self, metric: str, label: str) -> list[str]:
        """Return the values that a label of a metric has taken, as a dashboard's variable asks for them."""
        answer = self._get(f"/api/v1/label/{label}/values?" + urllib.parse.urlencode({"match[]": metric}))
        values: list[str] = answer["data"]
        return values

    def wait_for(self, expression: str, *, within_s: float) -> list[dict[str, Any]]:
        """Ask until there is an answer; the last, empty one after `within_s` seconds."""
        deadline = time.monotonic() + within_s
        while not (found := self.query(expression)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return found

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as answer:
            content: dict[str, Any] = msgspec.json.decode(answer.read())
        return content

    def _wait_for_port(self) -> int:
        deadline = time.monotonic() + STARTED_S_MAX
        while time.monotonic() < deadline:
            said = self._log.read_text()
            listening = LISTENING.search(said)
            if listening and "Server is ready to receive web requests" in said:
                return int(listening.group(1))
            if self._process.poll() is not None:
                break
            time.sleep(POLL_S)
        raise RuntimeError(f"Prometheus did not start:\n{self._log.read_text()}")

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(ENDED_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
