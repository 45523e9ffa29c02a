# Three images from one file:
#   docker build --target gateway    -t tidegate-gateway .       the HTTP server, without torch
#   docker build --target worker     -t tidegate-worker .        the engine, on CUDA
#   docker build --target worker-cpu -t tidegate-worker-cpu .    the engine, on CPU, without compilers
# All run `tidegate` as an unprivileged user. docker-compose.yml combines them; `make images-check` builds and tries them.

# Any image with Python 3.11 or newer and its venv, on Debian or Ubuntu.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
# Contains torch. The build must not replace it by another version.
ARG CUDA_IMAGE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime

# -- base of all stages without CUDA: a Python environment of its own, and the user ------------------------------------
FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/tidegate/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    HF_HOME=/var/lib/tidegate/huggingface \
    TIDEGATE_DATA_DIR=/var/lib/tidegate
RUN python3 -m venv /opt/tidegate \
    && useradd --system --uid 10001 --create-home tidegate \
    && install --directory --owner tidegate --mode 700 /var/lib/tidegate

# -- the project's wheel, and its dependencies with torch separate -----------------------------------------------------
FROM base AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-deps --wheel-dir /wheels . \
    && python docker/requirements.py pyproject.toml > /wheels/requirements.txt \
    && python docker/requirements.py pyproject.toml --extras otel storage oidc >> /wheels/requirements.txt \
    && python docker/requirements.py pyproject.toml --extras gpu > /wheels/gpu.txt \
    && python docker/requirements.py pyproject.toml --extras embedding > /wheels/embedding.txt \
    && python docker/requirements.py pyproject.toml --torch > /wheels/torch.txt

# -- what gateway and worker on CPU have in common ---------------------------------------------------------------------
FROM base AS packages
# Install dependencies before the project, so that a change of code keeps their layer.
COPY --from=wheel /wheels/requirements.txt /wheels/
RUN pip install -r /wheels/requirements.txt
VOLUME /var/lib/tidegate
WORKDIR /var/lib/tidegate
STOPSIGNAL SIGTERM
ENTRYPOINT ["tidegate"]

# -- gateway: transformers loads tokenizers without torch --------------------------------------------------------------
FROM packages AS gateway
COPY --from=wheel /wheels/*.whl /wheels/
RUN pip install --no-deps /wheels/*.whl
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=4s --start-period=20s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=3)"]
CMD ["gateway", "--host", "0.0.0.0", "--port", "8000"]

# -- worker on CPU -----------------------------------------------------------------------------------------------------
FROM packages AS torch
# Where torch without CUDA is: an index of packages.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=wheel /wheels/torch.txt /wheels/embedding.txt /wheels/
RUN pip install --index-url ${TORCH_CPU_INDEX} -r /wheels/torch.txt && pip install -r /wheels/embedding.txt

# The engine's C++ kernels, for several kinds of processors: the machine that runs the image is not the one that builds it.
FROM torch AS kernels
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libc6-dev
COPY --from=wheel /wheels/*.whl /wheels/
RUN pip install --no-deps /wheels/*.whl && python -m engine.native.cpu.build

# A worker's port has /livez, /readyz and /metrics, and is for the deployment's own network.
FROM torch AS worker-cpu
COPY --from=kernels /opt/tidegate/lib/tidegate /opt/tidegate/lib/tidegate
COPY --from=wheel /wheels/*.whl /wheels/
RUN pip install --no-deps /wheels/*.whl
USER 10001
ENV TIDEGATE_HEALTH_HOST=0.0.0.0 TIDEGATE_HEALTH_PORT=8001
EXPOSE 8001
HEALTHCHECK --interval=10s --timeout=4s --start-period=20s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8001/livez', timeout=3)"]
CMD ["worker"]

# -- worker on CUDA ----------------------------------------------------------------------------------------------------
FROM ${CUDA_IMAGE} AS worker
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_BREAK_SYSTEM_PACKAGES=1 \
    HF_HOME=/var/lib/tidegate/huggingface \
    TRITON_CACHE_DIR=/var/lib/tidegate/triton \
    TIDEGATE_DATA_DIR=/var/lib/tidegate
# Triton compiles the code that launches its kernels on the machine with the GPU: against Python's headers, which a base
# image may lack, and the GPU's driver, which no image has.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && printf '#include <Python.h>\n' > /tmp/probe.c \
    && has_headers() { gcc -fsyntax-only $(python3 -c "import sysconfig as s; print('-I' + s.get_path('include', 'posix_prefix'))") /tmp/probe.c; } \
    && { has_headers || { apt-get install --yes --no-install-recommends python3-dev && has_headers; } } \
    && rm -rf /tmp/probe.c /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --create-home tidegate \
    && install --directory --owner tidegate --mode 700 /var/lib/tidegate
COPY --from=wheel /wheels/requirements.txt /wheels/gpu.txt /wheels/embedding.txt /wheels/
RUN python3 -m pip install -r /wheels/requirements.txt -r /wheels/gpu.txt -r /wheels/embedding.txt
COPY --from=wheel /wheels/*.whl /wheels/
RUN python3 -m pip install --no-deps /wheels/*.whl
VOLUME /var/lib/tidegate
WORKDIR /var/lib/tidegate
STOPSIGNAL SIGTERM
USER 10001
ENV TIDEGATE_HEALTH_HOST=0.0.0.0 TIDEGATE_HEALTH_PORT=8001
EXPOSE 8001
HEALTHCHECK --interval=10s --timeout=4s --start-period=20s --retries=3 \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8001/livez', timeout=3)"]
ENTRYPOINT ["tidegate"]
CMD ["worker"]
