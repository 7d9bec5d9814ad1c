# The image of a worker on Dataflow (or another container engine): Python, Beam's harness and
# Gristmill with the versions of constraints.txt. docs/dataflow.md says how to build and use it.
#
#   docker build --tag IMAGE .

# What has to be compiled is compiled here, and the compiler stays here.
FROM python:3.11.14-slim-trixie AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY models models
COPY pipelines pipelines
COPY training training
COPY scripts scripts
COPY data_manifests data_manifests
RUN pip wheel --no-cache-dir --constraint constraints.txt --wheel-dir /wheels '.[dataflow]'
# lmplz and build_binary, so that the image can also train language models.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-index --find-links=/wheels gristmill \
    && GRISTMILL_CACHE=/gristmill-cache gristmill models build-kenlm

FROM python:3.11.14-slim-trixie
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libstdc++6 libgomp1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=apache/beam_python3.11_sdk:2.77.0 /opt/apache/beam /opt/apache/beam
COPY --from=build /gristmill-cache /opt/gristmill-cache
# Into the image's own Python, not a virtual environment: Beam's boot program makes one that sees
# the packages of the image's Python only.
# No version: /wheels holds one of each, chosen by constraints.txt.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links=/wheels 'gristmill[dataflow]' \
    && pip check
# Registered models to bring along; workers fetch all others from the staging folder.
ARG MODELS="lid.176.ftz"
ENV GRISTMILL_CACHE=/opt/gristmill-cache \
    PYTHONUNBUFFERED=1
RUN mkdir -p "$GRISTMILL_CACHE" \
    && for model in $MODELS; do gristmill models fetch "$model" || exit 1; done
# The build ends here if a library is missing or the harness has another version than the SDK.
RUN python -c "import fasttext, gcsfs, kenlm, sentencepiece, apache_beam, pipelines.mine; \
assert apache_beam.__version__ == '2.77.0', apache_beam.__version__" \
    && test -x /opt/apache/beam/boot
# Root, as in Beam's own images: the boot program writes to folders of the worker that are root's.
ENTRYPOINT ["/opt/apache/beam/boot"]
