#!/bin/bash
# Four machines of eight GPUs: one torchrun on each, which find each other on the first one.
# Submit with: sbatch examples/slurm/several-nodes.sh
# Before the time is up, the run is stopped and the job put back into the queue, as in one-node.sh.
#SBATCH --job-name=stepjepa-4x8
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --output=%x-%j.log

set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

time_is_up=
trap 'time_is_up=1; kill -TERM $! || true' USR1

srun --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun --nnodes "$SLURM_NNODES" --nproc_per_node 8 \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$first:29500" -m stepjepa train \
    --config examples/qwen3-8b-8xh200.yaml --output_dir "runs/$SLURM_JOB_NAME" --save_strategy steps --save_steps 200 \
    --save_total_limit 2 --resume_from_checkpoint auto &

code=0
wait $! || code=$?
if [[ $time_is_up ]]; then
    wait $! || true # the signal ended only the first wait
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
