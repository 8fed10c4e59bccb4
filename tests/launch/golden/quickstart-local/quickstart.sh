#!/bin/bash
OMP_NUM_THREADS=1 \
    DIFFUSION_SCHEDULER=local \
    DIFFUSION_JOB=quickstart \
    DIFFUSION_NODES=2 \
    DIFFUSION_PROCESSES_PER_NODE=2 \
    DIFFUSION_GPU=none \
    DIFFUSION_MASTER_PORT=29500 \
    DIFFUSION_PREFLIGHT=fast \
    DIFFUSION_MAX_RESTARTS=5 \
    DIFFUSION_ON_EXIT='75=retry,76=elsewhere,78=stop,*=retry' \
    DIFFUSION_NOTICE_SECONDS=120 \
    CUDA_VISIBLE_DEVICES='' \
    DIFFUSION_NODE_RANK=0 \
    DIFFUSION_MASTER_ADDR=127.0.0.1 \
    python -m diffusion.launch.node -- run.py yamls/quickstart.yaml name=quickstart-local &
OMP_NUM_THREADS=1 \
    DIFFUSION_SCHEDULER=local \
    DIFFUSION_JOB=quickstart \
    DIFFUSION_NODES=2 \
    DIFFUSION_PROCESSES_PER_NODE=2 \
    DIFFUSION_GPU=none \
    DIFFUSION_MASTER_PORT=29500 \
    DIFFUSION_PREFLIGHT=fast \
    DIFFUSION_MAX_RESTARTS=5 \
    DIFFUSION_ON_EXIT='75=retry,76=elsewhere,78=stop,*=retry' \
    DIFFUSION_NOTICE_SECONDS=120 \
    CUDA_VISIBLE_DEVICES='' \
    DIFFUSION_NODE_RANK=1 \
    DIFFUSION_MASTER_ADDR=127.0.0.1 \
    python -m diffusion.launch.node -- run.py yamls/quickstart.yaml name=quickstart-local &
status=0
for node in $(jobs -p); do wait "$node" || status=$?; done
exit "$status"
