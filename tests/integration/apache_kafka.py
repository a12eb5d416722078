"""A real Apache Kafka for tests: one KRaft node on 127.0.0.1, from Maven artifacts, with the deployed configuration."""

import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

VERSION = "4.1.0"  # as in docker-compose.yml
SCALA = "2.13"
SLF4J_BINDING = "2.24.3"  # of log4j, as Kafka 4.1 uses it
CLUSTER_ID = "ZmFpbHNsb3ctdGVzdHMtMA"  # any 16 bytes in base64
STARTED_S_MAX = 60.0
ENDED_S_MAX = 20.0
POLL_S = 0.1
DEPLOYED = Path(__file__).resolve().parents[2] / "deploy" / "kafka" / "server.properties"

POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>failslow</groupId>
  <artifactId>kafka-for-tests</artifactId>
  <version>0</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_{SCALA}</artifactId><version>{VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId><artifactId>log4j-slf4j-impl</artifactId>
      <version>{SLF4J_BINDING}</version>
    </dependency>
  </dependencies>
</project>
"""
PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"

LOG4J = """<Configuration status="ERROR">
  <Appenders><Console name="console"><PatternLayout pattern="%d %p %c: %m%n"/></Console></Appenders>
  <Loggers><Root level="WARN"><AppenderRef ref="console"/></Root></Loggers>
</Configuration>
"""


class KafkaMissing(RuntimeError):
    """Java, Maven or the artifacts are not to be had; the message says what to install."""


def jars() -> Path:
    """Return the folder of Kafka's jars, fetched once per version of what is asked for. Raises KafkaMissing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "failslow"
    folder = cache / f"kafka-{VERSION}-{hashlib.sha256(POM.encode()).hexdigest()[:8]}"
    if folder.is_dir():
        return folder
    for program, package in (("mvn", "maven"), ("java", "openjdk-17-jre-headless")):
        if shutil.which(program) is None:
            raise KafkaMissing(f"no {program}: install Debian's {package}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        fetched = Path(name)
        (fetched / "pom.xml").write_text(POM)
        said = subprocess.run(
            ["mvn", "-B", "-q", PLUGIN, "-DincludeScope=runtime", "-DoutputDirectory=libs"],
            cwd=fetched,
            capture_output=True,
            text=True,
            check=False,
        )
        if said.returncode:
            raise KafkaMissing(f"Maven could not fetch Apache Kafka {VERSION}:\n{said.stdout[-2000:]}")
        (fetched / "libs" / "log4j2.xml").write_text(LOG4J)
        try:
            (fetched / "libs").rename(folder)  # of two test runs at a time, one is first
        except OSError:
            if not folder.is_dir():
                raise
    return folder


class ApacheKafka:
    """One broker with its own data folder; a context manager. It keeps its ports and data over stop() and start().

    Raises KafkaMissing, or RuntimeError with the end of its log where it does not start.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, self._controller_port = _free_ports(2)
        self.bootstrap = f"127.0.0.1:{self._port}"
        self._log = folder / "kafka.log"
        self._process: subprocess.Popen[bytes] | None = None
        jar_folder = jars()
        self._java = [
            "java", "-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto",
            f"-Dlog4j2.configurationFile={jar_folder / 'log4j2.xml'}", "-cp", f"{jar_folder}/*",
        ]  # fmt: skip
        self._properties = folder / "server.properties"
        self._properties.write_text(self._configuration())
        self._format()
        self.start()

    def start(self) -> None:
        """Start the broker and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._java, "kafka.Kafka", str(self._properties)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline_s = time.monotonic() + STARTED_S_MAX
        admin = self._admin()
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                admin.list_topics(timeout=1)
            except KafkaException:
                time.sleep(POLL_S)
            else:
                return
        self.stop()
        raise RuntimeError(f"Apache Kafka did not start:\n{self._log.read_text()[-4000:]}")

    def clear(self) -> None:
        """Delete all topics; start the broker where a test has left it stopped."""
        if self._process is None:
            self.start()
        admin = self._admin()
        names = [name for name in admin.list_topics(timeout=STARTED_S_MAX).topics if not name.startswith("__")]
        if names:
            for future in admin.delete_topics(names).values():
                future.result()

        deadline_s = time.monotonic() + STARTED_S_MAX
        while set(names) & admin.list_topics(timeout=STARTED_S_MAX).topics.keys():
            assert time.monotonic() < deadline_s, f"{names} are still there"
            time.sleep(POLL_S)

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0, "reconnect.backoff.max.ms": 200})

    def stop(self) -> None:
        """Stop the broker; its data stay."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(ENDED_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End the broker as a power cut would; its data stay."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def pause(self) -> None:
        """Let it answer nobody, its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End a pause."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.go_on()
        self.stop()

    def _configuration(self) -> str:
        """The deployed configuration with ports and folders of its own."""
        inside, controller = self._port, self._controller_port
        changed = {
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"INSIDE://127.0.0.1:{inside},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"INSIDE://127.0.0.1:{inside}",
            "listener.security.protocol.map": "INSIDE:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self._folder / "data"),
            "offsets.topic.num.partitions": "1",
            "broker.session.timeout.ms": "2000",  # a killed broker is let in again after this
            "broker.heartbeat.interval.ms": "500",
            "log.cleaner.dedupe.buffer.size": str(2 << 20),
        }
        deployed = dict(re.findall(r"^([\w.]+)=(.*)$", DEPLOYED.read_text(), flags=re.MULTILINE))
        return "\n".join(f"{name}={value}" for name, value in (deployed | changed).items())

    def _format(self) -> None:
        said = subprocess.run(
            [*self._java, "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(self._properties)],
            capture_output=True,
            text=True,
            check=False,
        )
        if said.returncode:
            raise RuntimeError(f"Apache Kafka's storage could not be formatted:\n{said.stdout}{said.stderr}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
