# pgleaderlock in a container: the lock server by itself, or any other command. docs/deployment.md explains it.
FROM python:3.13-slim AS build
WORKDIR /build
COPY requirements-dev.txt ./
# The versions that the tests ran with, for the build backend too.
RUN sed -n 's/^\([A-Za-z0-9._-]*==[^ ;\\]*\).*/\1/p' requirements-dev.txt > versions.txt
ENV PIP_CONSTRAINT=/build/versions.txt PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m venv /opt/pgleaderlock \
  && /opt/pgleaderlock/bin/pip install --no-cache-dir '.[server,metrics]'

FROM python:3.13-slim
# A user by name: libpq asks who it runs as. Nothing but /data belongs to it.
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin pgleaderlock \
  && install --directory --owner=pgleaderlock /data
COPY --from=build /opt/pgleaderlock /opt/pgleaderlock
ENV PATH=/opt/pgleaderlock/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HEALTH_URL=http://127.0.0.1:7420/healthz
# By number: Kubernetes can then see that it is not root.
USER 10001
WORKDIR /data
VOLUME /data
# The lock server; the dashboard; probes and metrics of a node.
EXPOSE 7420 7421 7422
# For another command, HEALTH_URL says where it answers.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ['HEALTH_URL'], timeout=3)"]
# No shell in front of it: SIGTERM has to reach the program.
ENTRYPOINT ["pgleaderlock"]
CMD ["serve", "--store", "sqlite:////data/locks.db", "--host", "0.0.0.0", "--token-file", "/run/secrets/pgleaderlock-tokens"]
