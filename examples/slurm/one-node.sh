#!/bin/bash
# One machine of eight GPUs, one process each. Submit with: sbatch examples/slurm/one-node.sh
#
# SLURM signals this script five minutes before the time is up. The script then stops the run, which saves a checkpoint,
# and puts the job back into the queue, where --resume_from_checkpoint auto continues it. (--requeue alone does so only
# after a failed node or a preemption.)
#SBATCH --job-name=stepjepa
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --output=%x-%j.log

set -euo pipefail

# The trained model and data are read from disk alone; leave the line out to have them fetched.
export STEPJEPA_OFFLINE=1

time_is_up=
trap 'time_is_up=1; kill -TERM $! || true' USR1

# Since SLURM 22.05, srun does not inherit --cpus-per-task.
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun --standalone --nproc_per_node 8 -m stepjepa train \
    --config examples/qwen3-8b-8xh200.yaml --output_dir "runs/$SLURM_JOB_NAME" --save_strategy steps --save_steps 200 \
    --save_total_limit 2 --resume_from_checkpoint auto &

code=0
wait $! || code=$?
if [[ $time_is_up ]]; then
    wait $! || true # the signal ended only the first wait
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
