# Three images from one file:
#   docker build --target gateway    -t tidegate-gateway .       the HTTP server, without torch
#   docker build --target worker     -t tidegate-worker .        the engine, on CUDA
#   docker build --target worker-cpu -t tidegate-worker-cpu .    the engine, on CPU
# All run `tidegate` as an unprivileged user. docker-compose.yml combines them.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
# Contains torch. The build must not replace it by another version.
ARG CUDA_IMAGE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime

# -- the project's wheel, and its dependencies with torch separate -----------------------------------------------------
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && python docker/requirements.py pyproject.toml > /wheels/requirements.txt \
    && python docker/requirements.py pyproject.toml --extras otel storage >> /wheels/requirements.txt \
    && python docker/requirements.py pyproject.toml --extras gpu > /wheels/gpu.txt \
    && python docker/requirements.py pyproject.toml --torch > /wheels/torch.txt

# -- base of gateway and worker on CPU ---------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    HF_HOME=/var/lib/tidegate/huggingface \
    TIDEGATE_DATA_DIR=/var/lib/tidegate
RUN useradd --system --uid 10001 --create-home tidegate \
    && install --directory --owner tidegate --mode 700 /var/lib/tidegate
# Install dependencies before the project, so that a change of code keeps their layer.
COPY --from=wheel /wheels/requirements.txt /wheels/
RUN pip install -r /wheels/requirements.txt
VOLUME /var/lib/tidegate
WORKDIR /var/lib/tidegate
STOPSIGNAL SIGTERM
ENTRYPOINT ["tidegate"]

# -- gateway: transformers loads tokenizers without torch --------------------------------------------------------------
FROM base AS gateway
COPY --from=wheel /wheels /wheels
RUN pip install --no-deps /wheels/*.whl
USER tidegate
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=4s --start-period=20s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=3)"]
CMD ["gateway", "--host", "0.0.0.0", "--port", "8000"]

# -- worker on CPU -----------------------------------------------------------------------------------------------------
# Workers have no port and no health check. A worker that cannot continue ends and is restarted, and the gateway's
# /ready counts the heartbeats of the workers.
FROM base AS worker-cpu
# The engine compiles its kernels at start, for the processor of the machine.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
RUN pip install --index-url https://download.pytorch.org/whl/cpu -r /wheels/torch.txt \
    && pip install --no-deps /wheels/*.whl
USER tidegate
CMD ["worker"]

# -- worker on CUDA ----------------------------------------------------------------------------------------------------
FROM ${CUDA_IMAGE} AS worker
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_BREAK_SYSTEM_PACKAGES=1 \
    HF_HOME=/var/lib/tidegate/huggingface \
    TIDEGATE_DATA_DIR=/var/lib/tidegate
# Triton needs a C compiler for the code that launches its kernels.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --create-home tidegate \
    && install --directory --owner tidegate --mode 700 /var/lib/tidegate
COPY --from=wheel /wheels/requirements.txt /wheels/gpu.txt /wheels/
RUN pip install -r /wheels/requirements.txt -r /wheels/gpu.txt
COPY --from=wheel /wheels /wheels
RUN pip install --no-deps /wheels/*.whl
VOLUME /var/lib/tidegate
WORKDIR /var/lib/tidegate
STOPSIGNAL SIGTERM
USER tidegate
ENTRYPOINT ["tidegate"]
CMD ["worker"]
