# One image with everything for one machine: `headrace up` with all services, trainer and inference on CPUs among them.
#
#   docker build -f deploy/all.Dockerfile -t headrace .
#   docker run --rm -v headrace-demo:/srv/code/.headrace headrace demo --short
#
# Packages are those of `make demo`, requirements/demo.lock, with versions and hashes. Its own supervisor starts services
# again that die or hang. On several machines or GPUs use the images of one service each (docker-compose.yml, deploy/helm).
FROM python:3.11-slim
WORKDIR /opt
RUN useradd --uid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin headrace
COPY requirements/demo.lock requirements.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir --root-user-action=ignore --no-deps --require-hashes -r requirements.txt
COPY schemas src/schemas
COPY packages src/packages
COPY gateway src/gateway
COPY services src/services
COPY examples src/examples
COPY LICENSE src/LICENSE
RUN pip install --no-cache-dir --root-user-action=ignore --no-index --no-deps --no-build-isolation \
    src/schemas src/packages/* src/gateway src/services/* src/examples
RUN install -d -o headrace -g headrace /var/lib/headrace /srv/code /srv/code/.headrace /models
COPY deploy/start ./
# CONTAINER_RUN is the beginning of the commands that `headrace demo` prints at its end.
ENV PYTHONUNBUFFERED=1 HF_HOME=/tmp/huggingface CONTAINER_RUN="docker run --rm -v headrace-demo:/srv/code/.headrace"
USER headrace
WORKDIR /srv/code
EXPOSE 8000
ENTRYPOINT ["/opt/start"]
CMD ["up", "--data-dir", "/var/lib/headrace"]
