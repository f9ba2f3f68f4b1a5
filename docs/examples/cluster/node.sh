#!/bin/bash
# One node's part of a training, which srun starts on each: bash node.sh -m pipeline.distill RECIPE
exec accelerate launch --config_file "$(dirname "$0")/several_nodes.yaml" \
    --num_machines "$SLURM_JOB_NUM_NODES" \
    --num_processes "$((SLURM_JOB_NUM_NODES * SLURM_GPUS_ON_NODE))" \
    --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$MAIN_NODE" \
    --main_process_port "$((30000 + SLURM_JOB_ID % 35000))" \
    "$@"
