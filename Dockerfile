# The loop and the runtimes' API. `make image` prepares the context in dist/image and says how to build from it:
#
#   requirements.txt   what uv.lock has, with hashes
#   *.whl              this program
#   bin/               the engine and its providers, for this platform
#
# BASE is any image with Python >= 3.11 (with venv) and util-linux. Nothing is fetched when a container starts.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /build
COPY requirements.txt *.whl ./
RUN python3 -m venv /opt/orca-infra \
    && /opt/orca-infra/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r requirements.txt \
    && /opt/orca-infra/bin/python -m pip install --no-cache-dir --no-deps ./*.whl \
    && /opt/orca-infra/bin/python -m pip uninstall --yes --quiet pip \
    && /opt/orca-infra/bin/python -m compileall -q -j 0 /opt/orca-infra/lib

FROM ${BASE}
COPY --from=build /opt/orca-infra /opt/orca-infra
COPY bin/ /opt/orca-infra/bin/
RUN echo "orca:x:10001:10001:orca-infra:/var/lib/orca-infra:/usr/sbin/nologin" >> /etc/passwd \
    && echo "orca:x:10001:" >> /etc/group \
    && mkdir -p /var/lib/orca-infra \
    && chown 10001:10001 /var/lib/orca-infra
ENV PATH=/opt/orca-infra/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/var/lib/orca-infra \
    ORCA_HOME=/var/lib/orca-infra \
    PYTHONDONTWRITEBYTECODE=1 \
    PULUMI_SKIP_UPDATE_CHECK=true \
    PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION=true
# The root file system may be read-only: /var/lib/orca-infra and /tmp are what is written.
USER 10001:10001
ENTRYPOINT ["orca-infra"]
CMD ["run"]
