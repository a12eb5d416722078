# The agent with bcc, for real nodes. Build the image of the repository's Dockerfile first, then this one:
#   docker build -t failslow:0.1.0 . && docker build -t failslow-agent:0.1.0 -f deploy/agent.Dockerfile deploy
# The container needs the node's process numbers and network, tracefs, and the capabilities of failslow-agent.service;
# docs/agent-privileges.md has the command that starts it.
FROM failslow:0.1.0

USER root
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-bpfcc=0.26.0+ds-1 \
    && rm -rf /var/lib/apt/lists/*

# What NVIDIA's container runtime has to put into the container: libnvidia-ml.so.1 and all GPUs, none for computing.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=utility
VOLUME /var/lib/failslow
CMD ["failslow-agent", "run"]
