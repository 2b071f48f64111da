#!/bin/bash
# A job on several hosts. When its time is up, it saves a checkpoint, SLURM requeues it, and it resumes from there:
#   sbatch --nodes=4 --gpus-per-node=8 --ntasks-per-node=8 configs/slurm.sh --config configs/llama-125m.yaml \
#     --config configs/ddp.yaml --data.micro_batch_size 16
# Use one task per GPU. The run directory and the token store must be on a file system that all hosts share.
#SBATCH --job-name=lightning-llm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --output=%x-%j.log
set -euo pipefail

# USR1 arrives 120 s before the end: each process finishes its step, and the first one saves and requeues the job.
# --kill-on-bad-exit: a lost process ends the others at once, instead of after their timeout.
exec srun --kill-on-bad-exit=1 lightning-llm fit "$@" \
  --trainer.num_nodes "$SLURM_JOB_NUM_NODES" --trainer.devices "${SLURM_NTASKS_PER_NODE:-1}" \
  --trainer.enable_progress_bar false
