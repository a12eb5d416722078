# One image, two commands: failslow (the pipeline) and failslow-agent (a node).
FROM python:3.11.13-slim-bookworm AS build

RUN python -m venv /opt/failslow && pip install --no-cache-dir uv==0.13.9
WORKDIR /source

# Dependencies first: this layer is built anew only when they change. The lock file pins every version and hash.
COPY pyproject.toml requirements.lock ./
RUN uv pip install --python /opt/failslow/bin/python --no-cache --constraint requirements.lock -r pyproject.toml

COPY README.md LICENSE ./
COPY agents agents
COPY detectors detectors
COPY pipeline pipeline
COPY schemas schemas
RUN uv pip install --python /opt/failslow/bin/python --no-cache --no-deps .

FROM python:3.11.13-slim-bookworm

COPY --from=build /opt/failslow /opt/failslow
ENV PATH=/opt/failslow/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /srv/failslow
COPY scenarios scenarios

# The pipeline and simulated agents need no privilege. An agent that attaches probes on a real node is started with
# `--user 0 --privileged --pid host`.
RUN useradd --system --create-home --uid 10001 failslow
USER failslow
CMD ["failslow", "--help"]
