#!/bin/bash
cd /work || exit 78
A='it'"'"'s' \
    DIFFUSION_SCHEDULER=local \
    DIFFUSION_JOB=job-two \
    DIFFUSION_NODES=2 \
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
    DIFFUSION_WORKING_FOLDER=/working/node0 \
    python -m diffusion.launch.node -- run.py yamls/small.yaml runs_dir=s3://bucket/runs seed=5 streams.photos.local=photos eval_streams.photos.local=photos init_from=s3://bucket/runs/one &
A='it'"'"'s' \
    DIFFUSION_SCHEDULER=local \
    DIFFUSION_JOB=job-two \
    DIFFUSION_NODES=2 \
    DIFFUSION_PROCESSES_PER_NODE=2 \
    DIFFUSION_GPU=none \
    DIFFUSION_MASTER_PORT=12345 \
    DIFFUSION_PREFLIGHT=deep \
    DIFFUSION_MAX_RESTARTS=7 \
    DIFFUSION_ON_EXIT='3=retry,75=elsewhere,76=stop,78=stop,*=stop' \
    DIFFUSION_NOTICE_SECONDS=120 \
    CUDA_VISIBLE_DEVICES='' \
    DIFFUSION_HANG_SECONDS=600 \
    DIFFUSION_NODE_RANK=1 \
    DIFFUSION_MASTER_ADDR=127.0.0.1 \
    DIFFUSION_WORKING_FOLDER=/working/node1 \
    python -m diffusion.launch.node -- run.py yamls/small.yaml runs_dir=s3://bucket/runs seed=5 streams.photos.local=photos eval_streams.photos.local=photos init_from=s3://bucket/runs/one &
status=0
for node in $(jobs -p); do wait "$node" || status=$?; done
exit "$status"
