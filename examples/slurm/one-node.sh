#!/bin/bash
# One machine of eight GPUs, one process each. Submit with: sbatch examples/slurm/one-node.sh
#
# --signal has SLURM send SIGTERM five minutes before the time is up: the run saves a checkpoint and ends, and
# --requeue with --resume_from_checkpoint auto goes on with it.
#SBATCH --job-name=stepjepa
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --output=%x-%j.log

set -euo pipefail

# The trained model and data are read from disk alone; leave the line out to have them fetched.
export STEPJEPA_OFFLINE=1

srun torchrun --standalone --nproc_per_node 8 -m stepjepa train --config examples/qwen3-8b-8xh200.yaml \
    --output_dir "runs/$SLURM_JOB_NAME" --save_strategy steps --save_steps 200 --save_total_limit 2 \
    --resume_from_checkpoint auto
