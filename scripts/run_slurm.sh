#!/usr/bin/env bash
# GPT-2 124M on 10B tokens under Slurm: one task per GPU. From the repository, on a disk that all nodes share:
#
#   sbatch scripts/run_slurm.sh                              # --nodes=4 and the like on the command line win over what is here
#
# A lost rank (exit code 4) starts a new step on the same nodes, from the newest checkpoint. A lost node ends the job: it is queued
# again and goes on from there too. At its time limit a job leaves a checkpoint, if writing that takes less than Slurm's KillWait, often
# 30 s: submit it again, or several times at once with --dependency=singleton, and each goes on where the one before ended.
# Ranks that have met end each other, and say why; were srun to end them (--kill-on-bad-exit=1), its exit code would be 143, of those it
# killed, and not 2, 3 or 4, which tell the restart loop what to do.
#SBATCH --job-name=gpt2_124M
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append

export LAUNCH="srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task=${SLURM_CPUS_PER_TASK:-8}"
exec "${SLURM_SUBMIT_DIR:-.}/scripts/run_gpt2_124M_multi.sh"
