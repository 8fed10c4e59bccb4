#!/bin/bash
cd /work || exit 78
A='it'"'"'s' \
    DIFFUSION_SCHEDULER=local \
    DIFFUSION_JOB=job-one \
    DIFFUSION_NODES=1 \
    DIFFUSION_PROCESSES_PER_NODE=2 \
    DIFFUSION_GPU=none \
    DIFFUSION_MASTER_PORT=12345 \
    DIFFUSION_PREFLIGHT=deep \
    DIFFUSION_MAX_RESTARTS=7 \
    DIFFUSION_ON_EXIT='3=retry,75=elsewhere,76=stop,78=stop,*=stop' \
    DIFFUSION_NOTICE_SECONDS=120 \
    CUDA_VISIBLE_DEVICES='' \
    DIFFUSION_HANG_SECONDS=600 \
    DIFFUSION_NODE_RANK=0 \
    DIFFUSION_MASTER_ADDR=127.0.0.1 \
    python -m diffusion.launch.node -- run.py yamls/quickstart.yaml runs_dir=s3://bucket/runs seed=5 name=one 'loggers.wandb.tags=['"'"'${oc.env:A}'"'"']' &
status=0
for node in $(jobs -p); do wait "$node" || status=$?; done
exit "$status"
