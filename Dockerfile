# syntax=docker/dockerfile:1
# NVIDIA's PyTorch, with Transformer Engine and apex, and megatron_snip in it:
#   docker build -t megatron_snip .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 -v "$PWD":/data -it megatron_snip
# IMAGE is any release of the container with PyTorch 2.11 or newer; 26.06 is Megatron-LM's.
ARG IMAGE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${IMAGE}

WORKDIR /workspace/megatron_snip
COPY pyproject.toml setup.py README.md LICENSE pretrain_llama.py ./
COPY megatron_snip ./megatron_snip
COPY tools ./tools
COPY examples ./examples

# torch stays NVIDIA's, whose version counts as older than the release of the same number
RUN python -c "import pathlib, tomllib; \
found = tomllib.loads(pathlib.Path('pyproject.toml').read_text())['project']; \
lines = [*found['dependencies'], *found['optional-dependencies']['hf'], *found['optional-dependencies']['wandb']]; \
print(*(line for line in lines if not line.startswith('torch>')), sep='\n')" > /tmp/requirements.txt \
    && pip install --no-cache-dir -r /tmp/requirements.txt \
    && pip install --no-cache-dir --no-build-isolation --no-deps -e . \
    && rm /tmp/requirements.txt \
    && megatron-snip --version
