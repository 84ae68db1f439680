# neuzip in a container, for the CPU or for NVIDIA GPUs:
#
#   docker build --tag neuzip .
#   docker build --tag neuzip:cuda --build-arg DEVICE=cuda .
#   docker run --rm --volume "$PWD:/work" --user "$(id -u):$(id -g)" neuzip compress my-model my-model.nz
#   docker run --rm --gpus all --volume "$PWD:/work" neuzip:cuda generate my-model.nz "The"
#
# For GPUs the base is the same: torch's CUDA build brings CUDA along, the host its driver and NVIDIA's container
# toolkit. Packages have the pinned versions of requirements-dev.txt.
FROM python:3.12-slim AS build
ARG DEVICE=cpu
COPY requirements-dev.txt /source/
RUN python -m venv /opt/neuzip \
    && grep '^torch==' /source/requirements-dev.txt > /tmp/torch.txt \
    && case "$DEVICE" in \
         cpu) index=https://download.pytorch.org/whl/cpu ;; \
         cuda) index=https://pypi.org/simple ;; \
         *) echo "error: DEVICE=$DEVICE: give cpu or cuda" >&2; exit 1 ;; \
       esac \
    && /opt/neuzip/bin/pip install --no-cache-dir --index-url "$index" --extra-index-url https://pypi.org/simple \
         --constraint /source/requirements-dev.txt --requirement /tmp/torch.txt
COPY . /source
RUN /opt/neuzip/bin/pip install --no-cache-dir --constraint /source/requirements-dev.txt /source

FROM python:3.12-slim
# Triton compiles a small launcher in C when a kernel is first used.
ARG DEVICE=cpu
RUN if [ "$DEVICE" = cuda ]; then \
      apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --create-home --uid 1000 neuzip && mkdir /work && chown neuzip: /work
COPY --from=build /opt/neuzip /opt/neuzip
# Any user may run it: caches are in a folder that everybody can write to.
ENV PATH=/opt/neuzip/bin:$PATH HOME=/home/neuzip NUMBA_CACHE_DIR=/home/neuzip/.cache/numba
RUN mkdir -p "$NUMBA_CACHE_DIR" && chmod -R a+rwX /home/neuzip
USER neuzip
WORKDIR /work
ENTRYPOINT ["neuzip"]
CMD ["--help"]
