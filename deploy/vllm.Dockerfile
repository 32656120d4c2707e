# The image of inference with the engine vllm, for GPUs of NVIDIA:
#
#   docker build -f deploy/vllm.Dockerfile --build-arg SERVICE=inference --build-arg FOLDER=services/inference .
#
# As in torch.Dockerfile, with two differences: packages come out of requirements/vllm.lock, whose numpy is older and whose
# click is newer than ours, and there is a C compiler, with which Triton builds what starts its kernels. Nothing is built
# while a request waits: it is done when a version is loaded and probed. /tmp has to allow programs (`exec`).
FROM python:3.11-slim AS code
WORKDIR /src
COPY deploy/requirements/build.txt .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir --root-user-action=ignore --no-deps --require-hashes -r build.txt
COPY schemas schemas
COPY packages/runtime runtime
COPY packages/statistics statistics
ARG FOLDER
COPY ${FOLDER} service
RUN pip install --no-cache-dir --root-user-action=ignore --no-index --no-deps --no-build-isolation \
    --target /opt/headrace ./schemas ./statistics ./runtime ./service

FROM python:3.11-slim
WORKDIR /opt
RUN useradd --uid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin headrace
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ARG SERVICE
COPY deploy/requirements/${SERVICE}-vllm.txt requirements.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir --root-user-action=ignore --no-deps --require-hashes -r requirements.txt
ARG EXTRA=deploy/requirements/extra.txt
COPY ${EXTRA} extra.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir --root-user-action=ignore --no-deps --require-hashes -r extra.txt
# Volumes take their owner from the folders of the image.
RUN install -d -o headrace -g headrace /var/lib/headrace /var/lib/headrace/blobs /var/lib/headrace/${SERVICE} /srv/code
COPY deploy/healthy.py deploy/start ./
COPY --from=code /opt/headrace headrace
ENV SERVICE=${SERVICE} PYTHONPATH=/opt/headrace:/srv/code HEADRACE_DATA_DIR=/var/lib/headrace PYTHONUNBUFFERED=1 \
    HF_HOME=/tmp/huggingface HF_HUB_OFFLINE=1
USER headrace
WORKDIR /srv/code
ENTRYPOINT ["/opt/start"]
