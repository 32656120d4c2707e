# The image of the trainer with the back end trinity, for GPUs of NVIDIA:
#
#   docker build -f deploy/trinity.Dockerfile --build-arg SERVICE=trainer --build-arg FOLDER=services/trainer .
#
# As in torch.Dockerfile, and beside the trainer's packages a second environment, /opt/trinity, with Trinity-RFT, verl and Ray
# out of requirements/trinity.lock: their numpy is older than ours. EXTRA names a file of packages for that one, such as
# the wheel of FlashAttention that fits your CUDA, with its hash. /tmp has to allow programs (`exec`).
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
COPY deploy/requirements/torch.txt torch.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir --root-user-action=ignore --no-deps --require-hashes -r torch.txt
ARG SERVICE
COPY deploy/requirements/${SERVICE}-trinity.txt requirements.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir --root-user-action=ignore --no-deps --require-hashes -r requirements.txt
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY requirements/trinity.lock trinity.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv trinity && \
    trinity/bin/pip install --no-cache-dir --no-deps --require-hashes -r trinity.txt
ARG EXTRA=deploy/requirements/extra.txt
COPY ${EXTRA} extra.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    trinity/bin/pip install --no-cache-dir --no-deps --require-hashes -r extra.txt
# Volumes take their owner from the folders of the image.
RUN install -d -o headrace -g headrace /var/lib/headrace /var/lib/headrace/blobs /var/lib/headrace/${SERVICE} \
    /srv/code /models
COPY deploy/healthy.py deploy/start deploy/trinity-run ./
COPY --from=code /opt/headrace headrace
ENV SERVICE=${SERVICE} PYTHONPATH=/opt/headrace:/srv/code HEADRACE_DATA_DIR=/var/lib/headrace PYTHONUNBUFFERED=1 \
    HF_HOME=/tmp/huggingface HF_HUB_OFFLINE=1
USER headrace
WORKDIR /srv/code
ENTRYPOINT ["/opt/start"]
