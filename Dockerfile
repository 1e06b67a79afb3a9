# Lockstep in a container. docs/container.md has the commands.
#   TORCH    the build of torch, as uv names it: cpu, or that of a CUDA version, such as cu130
FROM python:3.11-slim

ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_TORCH_BACKEND=${TORCH}

WORKDIR /usr/src/lockstep
COPY requirements.lock ./
RUN pip install -c requirements.lock uv && \
    uv pip install --python python -c requirements.lock torch setuptools

COPY pyproject.toml setup.py README.md LICENSE ./
COPY conf/ conf/
COPY sync/ sync/
COPY collectors/ collectors/
COPY lockstep_check/ lockstep_check/
COPY lockstep_conformance/ lockstep_conformance/
COPY lockstep_trl/ lockstep_trl/
COPY harness/ harness/
COPY hydra_plugins/ hydra_plugins/
RUN uv pip install --python python -c requirements.lock --no-build-isolation ".[tensorboard]"

# Runs are written to /runs/outputs. HOME is for the caches of matplotlib and W&B, whoever the user is.
ENV HOME=/runs
WORKDIR /runs
RUN chmod a+rwx .
ENTRYPOINT ["lockstep"]
CMD ["experiment=ppo_cartpole"]
