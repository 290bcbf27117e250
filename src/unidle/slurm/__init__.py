"""Training as SLURM jobs: the sbatch script, its submission, and the process that supervises training in the job."""
