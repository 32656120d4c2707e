# The image of a service with torch, the trainer or inference:
#
#   docker build -f deploy/torch.Dockerfile --build-arg SERVICE=trainer --build-arg FOLDER=services/trainer .
#
# As in Dockerfile, with one difference: what trainer and inference share, torch and its CUDA libraries above all, is a
# layer of its own before anything that tells them apart. It is built, stored and pulled once for both.
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
COPY deploy/requirements/${SERVICE}.txt requirements.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir --root-user-action=ignore --no-deps --require-hashes -r requirements.txt
ARG EXTRA=deploy/requirements/extra.txt
COPY ${EXTRA} extra.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir --root-user-action=ignore --no-deps --require-hashes -r extra.txt
# Volumes take their owner from the folders of the image.
RUN install -d -o headrace -g headrace /var/lib/headrace /var/lib/headrace/blobs /var/lib/headrace/${SERVICE} \
    /srv/code /models
COPY deploy/healthy.py deploy/start ./
COPY --from=code /opt/headrace headrace
ENV SERVICE=${SERVICE} PYTHONPATH=/opt/headrace:/srv/code HEADRACE_DATA_DIR=/var/lib/headrace PYTHONUNBUFFERED=1 \
    HF_HOME=/tmp/huggingface HF_HUB_OFFLINE=1
USER headrace
WORKDIR /srv/code
ENTRYPOINT ["/opt/start"]
