#!/bin/bash
# The runs of a sweep evaluated side by side, one GPU each: sbatch --array=0-7 examples/slurm/evaluate-array.sh sweeps/a
# ('stepjepa sweep --engine slurm' submits training and evaluation of every trial by itself.)
#SBATCH --job-name=stepjepa-evaluate
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#SBATCH --output=%x-%A-%a.log

set -euo pipefail

runs=("$1"/*/seed*/)
run=${runs[$SLURM_ARRAY_TASK_ID]}

srun --cpus-per-task "$SLURM_CPUS_PER_TASK" stepjepa evaluate --model_path "$run" --test_file data/test.jsonl \
    --output_file "$run/test.jsonl" --batch_size 64
