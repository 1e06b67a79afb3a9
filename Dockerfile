# Lockstep in a container. docs/container.md has the commands.
#   TORCH    the build of torch: cpu, or that of a CUDA version, such as cu130
FROM python:3.11-slim

ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1 \
    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/${TORCH}

WORKDIR /usr/src/lockstep
COPY requirements.lock ./
RUN pip install -c requirements.lock torch setuptools

COPY pyproject.toml setup.py README.md LICENSE ./
COPY conf/ conf/
COPY sync/ sync/
COPY collectors/ collectors/
COPY harness/ harness/
COPY hydra_plugins/ hydra_plugins/
RUN pip install -c requirements.lock --no-build-isolation ".[tensorboard]"

# Runs are written to /runs/outputs. HOME is for the caches of matplotlib and W&B, whoever the user is.
ENV HOME=/runs
WORKDIR /runs
RUN chmod a+rwx .
ENTRYPOINT ["lockstep"]
CMD ["experiment=ppo_cartpole"]
